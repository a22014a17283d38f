"""Which policies there are, and how names and settings from outside become policy objects.

The registry's order is the order of precedence. Who may enter: every policy's gate must be open,
and whom one holds those after it do not, so bounds on waits add up at most; among those who may, an
earlier policy's urgency counts before a later one's. In which order prompts are computed: by an
earlier policy's rank, then a later one's. How much: the least budget and the least chunk, each
policy seeing what earlier ones left. So `lanes` decides between classes, `long_prompt` between long
and short within a class, `deferred_prefill` when any but the urgent enter a full engine, `rotation`
between prompts of a kind, and `chunk_budget` how much all of them get in a step.

Policies that contradict each other are refused: `CONFLICTS` says which, and why.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from pydantic import ValidationError

from vllm_sched.errors import UsageError
from vllm_sched.policies.chunk_budget import ChunkBudget
from vllm_sched.policies.deferred_prefill import DeferredPrefill
from vllm_sched.policies.lanes import Lanes
from vllm_sched.policies.long_prompt import LongPrompt
from vllm_sched.policies.prefill_first import PrefillFirst
from vllm_sched.policies.rotation import Rotation
from vllm_sched.policies.static_batching import StaticBatching
from vllm_sched.policies.types import EngineFacts, Policy, Settings

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (
        StaticBatching,
        PrefillFirst,
        Lanes,
        LongPrompt,
        DeferredPrefill,
        Rotation,
        ChunkBudget,
    )
}
WHOLE = "one computes prompts whole, the other in parts"
CONFLICTS: dict[tuple[str, str], str] = {
    ("static_batching", "deferred_prefill"): "both say when a batch of requests enters",
    ("prefill_first", "long_prompt"): WHOLE,
    ("prefill_first", "rotation"): WHOLE,
    ("prefill_first", "chunk_budget"): WHOLE,
}


def find(name: str) -> type[Policy]:
    """Return the policy of that name."""
    try:
        return POLICIES[name]
    except KeyError:
        raise UsageError(
            f"unknown policy {name!r}; valid: {', '.join(sorted(POLICIES))}; "
            "choose one of these or leave it out"
        ) from None


def settings_of(name: str, given: object) -> Settings:
    """Check the settings given for one policy; the error is one line."""
    kind = find(name).settings_type
    if not isinstance(given, Mapping):
        raise UsageError(
            f"policy {name}: settings must be an object of keys and values, got {given!r}; "
            "write {} for the defaults"
        )
    for key in given:
        if key not in kind.model_fields:
            raise UsageError(
                f"unknown key {name}.{key}; valid: {', '.join(kind.model_fields)}; "
                "correct the name or leave it out"
            )
    try:
        return kind.model_validate(dict(given))
    except ValidationError as error:
        raise UsageError("; ".join(_explain(name, kind, e) for e in error.errors())) from None


def _explain(name: str, kind: type[Settings], error: Any) -> str:
    what = error["msg"].removeprefix("Value error, ")
    if not error["loc"]:
        return f"policy {name}: {what}; change one of them"
    key = str(error["loc"][0])
    field = kind.model_fields[key]
    meaning = f" ({field.description})" if field.description else ""
    return f"{name}.{key}={error['input']!r}: {what}{meaning}; default {field.default}"


def parse_settings(names: Sequence[str], sets: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Turn `--policy NAME` and `--set NAME.KEY=VALUE` into the engine's configuration."""
    config: dict[str, dict[str, Any]] = {find(name).name: {} for name in names}
    for text in sets:
        path, equals, value = text.partition("=")
        name, dot, key = path.partition(".")
        if not (equals and dot and name and key):
            raise UsageError(
                f"--set {text!r} is not of the form NAME.KEY=VALUE; "
                f"NAME is the policy's, one of {', '.join(sorted(POLICIES))}"
            )
        find(name)
        if name not in config:
            raise UsageError(
                f"--set {text!r}: policy {name} is off; switch it on too "
                f"(serve: --policy {name}, compare: --candidate {name})"
            )
        wanted = _value(value)
        if key in config[name] and config[name][key] != wanted:
            raise UsageError(
                f"--set {text!r}: {name}.{key} is set to {config[name][key]!r}, too; leave one out"
            )
        config[name][key] = wanted
    for name, given in config.items():
        settings_of(name, given)
    _refuse_conflicts(config)
    return config


def _value(text: str) -> Any:
    for read in (json.loads, float):  # JSON has no .25, no 50. and no +5
        with suppress(ValueError):
            return read(text)
    return text


def build(config: object, facts: EngineFacts) -> list[Policy]:
    """Make the policies that a configuration switches on, in order of precedence."""
    if not isinstance(config, Mapping):
        raise UsageError(f"vllm_sched must be an object of policies, got {config!r}")
    for name in config:
        find(name)
    _refuse_conflicts(config)
    return [
        kind(facts, settings_of(name, config[name]))
        for name, kind in POLICIES.items()
        if name in config
    ]


def _refuse_conflicts(config: Mapping[str, object]) -> None:
    for (one, other), why in CONFLICTS.items():
        if one in config and other in config:
            raise UsageError(
                f"policies {one} and {other} contradict each other: {why}; leave one of them out"
            )
