"""The fleet file of a plan."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import yaml

from vllm_sched.cost.profiles import read_parts
from vllm_sched.files import write_whole
from vllm_sched.sim.planning.plan import FleetPlan
from vllm_sched.workers.connectors import CLASSES, CONFIG_FLAG, FAILURE_KEY, ROLES, SIDE_HOST

MODEL_NAMES: Final = {
    "-8b": "meta-llama/Llama-3.1-8B-Instruct",
    "-13b": "facebook/opt-13b",
    "-70b": "meta-llama/Llama-3.3-70B-Instruct",
    "qwen3-32b": "Qwen/Qwen3-32B",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
    "qwen3-235b-a22b": "Qwen/Qwen3-235B-A22B",
    "deepseek-v3": "deepseek-ai/DeepSeek-V3",
}


def fleet_of(plan: FleetPlan, model: str, folder: Path) -> dict[str, Any]:
    """Return the content of the best fleet's file, which will be in `folder`."""
    machine, prefill = plan.question.machines
    model = model or _checkpoint(machine.profile)
    machine = replace(machine, profile=_relative_profile(folder, machine.profile))
    if prefill is not None:
        prefill = replace(prefill, profile=_relative_profile(folder, prefill.profile))
    return plan.best.shape.to_fleet(model, machine, prefill)


def launch_lines(fleet: Mapping[str, Any]) -> list[str]:
    """Return the command that starts a worker by itself, for each role."""
    lines: dict[str, str] = {}
    for worker in fleet["workers"]:
        role, launch = worker["role"], worker["launch"]
        words = ["vllm-sched", "serve", fleet["model"]]
        policies = launch.get("policies", {})
        for name, settings in policies.items():
            words += ["--policy", name]
            words += [f"--set={name}.{key}={value}" for key, value in settings.items()]
        if not policies:
            words += ["--policy", "none"]
        words += launch["args"]
        if role in ROLES:
            transfer = {"kv_connector": CLASSES["nixl"][0], "kv_role": ROLES[role]}
            transfer[FAILURE_KEY] = "recompute"  # as `up` sets it
            words.append(f"{CONFIG_FLAG}={json.dumps(transfer)}")
            # NIXL's default is loopback, which workers on other hosts cannot reach.
            words.insert(0, f"{SIDE_HOST}=THIS_HOST")
        lines[role] = shlex.join(words)
    return [*lines.values()]


def _checkpoint(profile: str) -> str:
    """Return the model that a profile names; "model" if it names none."""
    if "=" in profile and not profile.endswith(".json"):
        named = read_parts(profile).get("model", "")
        if "/" in named:
            return named
    return next((name for part, name in MODEL_NAMES.items() if part in profile), "model")


def _relative_profile(folder: Path, profile: str) -> str:
    if not profile.endswith(".json") or Path(profile).is_absolute():
        return profile
    # Resolve links: `..` of a linked folder is the parent of its target.
    path = Path(profile)
    return os.path.relpath(path.parent.resolve() / path.name, folder.resolve())


def _unfinished(plan: FleetPlan) -> list[str]:
    if plan.stopped_at is None:
        return []
    return [
        f"# The search was interrupted at {plan.stopped_at:.0%}: the best that it had judged.",
        "#",
    ]


def write(plan: FleetPlan, path: Path, *, model: str, command: str, traffic: str) -> None:
    targets = " ".join(
        f"{name}:{value:g}"
        for name, value in plan.question.targets.as_ms().items()
        if value is not None
    )
    file = shlex.quote(str(path))
    fleet = fleet_of(plan, model, path.parent)
    head = [
        f"# {plan.best.shape}",
        "#",
        *_unfinished(plan),
        f"# Planned for {plan.question.source.name} within {targets}: serves about "
        f"{plan.best.rate:.3g} requests/s. By",
        f"#     {command}",
        "#",
        f"#     vllm-sched check {file}",
        f"#     vllm-sched simulate {file} {traffic}",
        "#",
        "# To run it, start the workers of each role by",
        *(f"#     {line}" for line in launch_lines(fleet)),
        "# and write their urls here. With all GPUs in this machine, give each its own under",
        "# launch.env (CUDA_VISIBLE_DEVICES), and run `vllm-sched up`.",
    ]
    content = yaml.safe_dump(fleet, sort_keys=False, width=100)
    text = "\n".join(head) + "\n" + content
    # The command may contain file names with arbitrary bytes.
    write_whole(path, text, errors="backslashreplace")
