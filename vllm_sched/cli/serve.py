"""`vllm-sched serve MODEL`: vLLM's OpenAI server in this process, with our scheduler."""

from __future__ import annotations

import argparse
import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_sched.errors import UsageError
from vllm_sched.policies import registry
from vllm_sched.workers import launch

DEFAULT_POLICY = "long_prompt"
NO_POLICY = "none"
TINY = "tiny"


def add_serve(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe the command."""
    command = commands.add_parser(
        "serve",
        help="start vLLM's OpenAI server with our scheduler",
        description=(
            "Start vLLM's OpenAI server in this process, with scheduling policies. Every flag "
            "of `vllm serve` that is not named below is passed on as it is."
        ),
        allow_abbrev=False,
    )
    command.add_argument(
        "model", metavar="MODEL", help=f"as for `vllm serve`; {TINY!r} is a random model for trials"
    )
    command.add_argument(
        "--policy",
        dest="policies",
        action="append",
        metavar="NAME",
        help=f"a policy to switch on, repeatable: {', '.join(registry.POLICIES)}; "
        f"{NO_POLICY} leaves all off (default: {DEFAULT_POLICY})",
    )
    command.add_argument(
        "--set",
        dest="sets",
        action="append",
        default=[],
        metavar="NAME.KEY=VALUE",
        help="a setting of a policy, repeatable",
    )
    command.add_argument(
        "--trace",
        type=Path,
        metavar="OUT.json",
        help="write what the engine did, step by step, for Perfetto: at the end and on SIGUSR1",
    )
    command.add_argument(
        "--dry-run", action="store_true", help="print the equivalent `vllm serve` command only"
    )
    command.set_defaults(func=serve)


def serve(arguments: argparse.Namespace) -> int:
    """Check everything that can be checked before the model loads, then start."""
    vllm_arguments = vllm_command(
        arguments.model, arguments.policies, arguments.sets, arguments.rest
    )
    variables = {}
    if arguments.trace is not None:
        variables = launch.tracing(arguments.trace)
        vllm_arguments += launch.trace_flags(arguments.rest)
    if arguments.dry_run:
        set_first = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
        print(*set_first, shlex.join(["vllm", "serve", *vllm_arguments]))
        return 0
    os.environ.update(variables)
    if arguments.model == TINY and launch.on_cpu():
        for name, value in launch.CPU_ENV.items():
            os.environ.setdefault(name, value)
    from vllm_sched.engine import server

    server.serve(vllm_arguments)
    return 0


def vllm_command(
    model: str, policies: Sequence[str] | None, sets: Sequence[str], flags: Sequence[str]
) -> list[str]:
    """Return the arguments of `vllm serve` that do the same."""
    names = [DEFAULT_POLICY] if policies is None else [p for p in policies if p != NO_POLICY]
    config = registry.parse_settings(names, sets)
    flags, additional = _take_additional_config(flags)
    if any(flag.split("=")[0] in ("--scheduler-cls", "--scheduler_cls") for flag in flags):
        raise UsageError(
            "--scheduler-cls is what this command sets; leave it out, or use `vllm serve`"
        )
    if "vllm_sched" in additional:
        raise UsageError(
            "--additional-config has a vllm_sched key, which --policy and --set write here; "
            "use one or the other"
        )
    if config:
        additional["vllm_sched"] = config
    arguments = [_model_path(model), *_tiny_flags(model, flags), *flags]
    arguments += ["--scheduler-cls", launch.scheduler_cls(flags)]
    if additional:
        arguments += ["--additional-config", json.dumps(additional)]
    return arguments


def _take_additional_config(flags: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Take the user's own --additional-config out of the flags, to merge ours into it."""
    kept: list[str] = []
    found: dict[str, Any] = {}
    remaining = iter(flags)
    for flag in remaining:
        name, equals, value = flag.partition("=")
        if name not in ("--additional-config", "--additional_config"):
            kept.append(flag)
            continue
        text = value if equals else next(remaining, "")
        try:
            parsed = json.loads(text)
        except json.JSONDecodeError:
            parsed = None
        if not isinstance(parsed, dict):
            raise UsageError(f"--additional-config {text!r} is not a JSON object")
        found |= parsed
    return kept, found


def _model_path(model: str) -> str:
    if model != TINY:
        return model
    from vllm_sched.workers.tiny_model import tiny_model

    return str(tiny_model())


def _tiny_flags(model: str, flags: Sequence[str]) -> list[str]:
    """Return what the tiny model needs to run on any CPU, unless the user said otherwise."""
    if model != TINY:
        return []
    kept = ["--served-model-name", TINY]
    given = {flag.split("=")[0] for flag in flags}
    wanted = launch.CPU_FLAGS if launch.on_cpu() else ()
    skipping = False
    for word in wanted:
        if word.startswith("--"):
            skipping = word in given
        if not skipping:
            kept.append(word)
    return kept
