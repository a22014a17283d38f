"""The list of policies, and how names and settings become policy objects.

The order of `POLICIES` is the order of precedence. A request enters if every gate is open. An
earlier policy's urgency and rank count before a later policy's; a later policy sees the budget and
the chunk that earlier policies left. `CONFLICTS` lists pairs that are refused, with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from pydantic import ValidationError

from vllm_sched.errors import UsageError
from vllm_sched.policies.chunk_budget import ChunkBudget
from vllm_sched.policies.deferred_prefill import DeferredPrefill
from vllm_sched.policies.journal_settings import JournalSettings
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
# Not a policy, but set in the same way.
JOURNAL: Final = "journal"
WHOLE_OR_IN_PARTS = "one computes prompts whole, the other in parts"
CONFLICTS: dict[tuple[str, str], str] = {
    ("static_batching", "deferred_prefill"): "both decide when a batch of requests enters",
    ("prefill_first", "long_prompt"): WHOLE_OR_IN_PARTS,
    ("prefill_first", "rotation"): WHOLE_OR_IN_PARTS,
    ("prefill_first", "chunk_budget"): WHOLE_OR_IN_PARTS,
}


def find(name: str) -> type[Policy]:
    try:
        return POLICIES[name]
    except KeyError:
        raise UsageError(
            f"unknown policy {name!r}; valid: {', '.join(sorted(POLICIES))}; "
            "choose one of these or leave it out"
        ) from None


def _settings_type(name: str) -> type[Settings]:
    return JournalSettings if name == JOURNAL else find(name).settings_type


def settings_of(name: str, block: object) -> Settings:
    """Return the validated settings of a policy or the journal; the error is one line."""
    kind = _settings_type(name)
    if not isinstance(block, Mapping):
        raise UsageError(
            f"{name}: settings must be an object of keys and values, got {block!r}; "
            "write {} for the defaults"
        )
    for key in block:
        if key not in kind.model_fields:
            valid = [field for field in kind.model_fields if field not in kind.former]
            raise UsageError(
                f"unknown key {name}.{key}; valid: {', '.join(valid)}; "
                "correct the name or leave it out"
            )
    try:
        return kind.model_validate(dict(block))
    except ValidationError as error:
        raise UsageError("; ".join(_explain(name, kind, e) for e in error.errors())) from None


def _explain(name: str, kind: type[Settings], error: Any) -> str:
    what = error["msg"].removeprefix("Value error, ")
    if not error["loc"]:
        return f"policy {name}: {what}; change one of them"
    key = str(error["loc"][0])
    field = kind.model_fields[key]
    meaning = f" ({field.description})" if field.description else ""
    if field.is_required():
        wrong = "is missing" if error["type"] == "missing" else f"is {error['input']!r}: {what}"
        return f"{name}.{key} {wrong}{meaning}; give one"
    return f"{name}.{key}={error['input']!r}: {what}{meaning}; default {field.default}"


def parse_settings(names: Sequence[str], sets: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the engine configuration for `--policy NAME` and `--set NAME.KEY=VALUE`."""
    config: dict[str, dict[str, Any]] = {find(name).name: {} for name in names}
    for text in sets:
        path, equals, value = text.partition("=")
        name, dot, key = path.partition(".")
        if not (equals and dot and name and key):
            raise UsageError(
                f"--set {text!r} is not of the form NAME.KEY=VALUE; "
                f"NAME is one of {', '.join(sorted(POLICIES))}"
            )
        if name == JOURNAL:
            config.setdefault(name, {})
        _settings_type(name)
        if name not in config:
            raise UsageError(
                f"--set {text!r}: policy {name} is off; enable it too "
                f"(serve: --policy {name}, compare: --candidate {name})"
            )
        parsed = _parse_value(value)
        if key in config[name] and config[name][key] != parsed:
            raise UsageError(
                f"--set {text!r}: {name}.{key} is also set to {config[name][key]!r}; leave one out"
            )
        config[name][key] = parsed
    for name, block in config.items():
        settings_of(name, block)
    _refuse_conflicts(config)
    return config


def _parse_value(text: str) -> Any:
    for read in (json.loads, float):  # JSON has no .25, 50. or +5
        with suppress(ValueError):
            return read(text)
    return text


def former_setting_warnings(config: Mapping[str, Mapping[str, object]]) -> list[str]:
    """Return a warning for each setting that a newer one replaces."""
    warnings = []
    for name, block in config.items():
        former = _settings_type(name).former
        warnings += [f"{name}.{key}: {former[key]}" for key in block if key in former]
    return warnings


def build(config: object, facts: EngineFacts) -> list[Policy]:
    if not isinstance(config, Mapping):
        raise UsageError(f"vllm_sched must be an object of policies, got {config!r}")
    for name in config:
        _settings_type(name)
    _refuse_conflicts(config)
    policies: list[Policy] = []
    for name, kind in POLICIES.items():
        if name not in config or (settings := settings_of(name, config[name])).off:
            continue
        policies.append(kind(facts, settings))
        if policies[-1].decodes_pause:
            facts = replace(facts, decodes_pause=True)
    return policies


def conflicts_of(names: Container[str]) -> Iterator[tuple[str, str, str]]:
    """Yield the pairs of these policies that contradict each other, and why."""
    for (first, second), reason in CONFLICTS.items():
        if first in names and second in names:
            yield first, second, reason


def _refuse_conflicts(config: Mapping[str, object]) -> None:
    for first, second, reason in conflicts_of(config):
        raise UsageError(
            f"policies {first} and {second} contradict each other: {reason}; leave one of them out"
        )
