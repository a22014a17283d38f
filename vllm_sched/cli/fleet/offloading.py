"""The checks of workers that offload KV blocks to host memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from proxy.config import FleetConfig, PartialConfig
from proxy.errors import Problem
from vllm_sched.workers import launch, transfer
from vllm_sched.workers.flags import last
from vllm_sched.workers.flags_file import expanded

FIELD: Final = "launch.kv_offloading_size"
HANDS_OVER: Final = ("prefill", "decode")


def offloading_problems(draft: PartialConfig) -> Iterator[Problem]:
    """Check `launch.kv_offloading_size` against other flags and the transfer."""
    for index, worker in draft.workers.items():
        if (settings := worker.launch) is None:
            continue
        moved_by = draft.transfer if worker.role in HANDS_OVER else None
        size, flag = (
            settings.kv_offloading_size,
            last(expanded(settings.args), transfer.OFFLOADING_FLAG),
        )
        if flag is not None and (moved_by is not None or size is not None):
            yield Problem(
                f"workers[{index}].launch.args",
                f"{transfer.OFFLOADING_FLAG} {flag}: vLLM would run only its offloading connector, "
                f"and no other; set {FIELD}: {flag} instead",
            )
        if size is None:
            continue
        if transfer.own_config(settings.args) is not None:
            yield Problem(
                f"workers[{index}].{FIELD}",
                f"{size:g}: launch.args has {transfer.CONFIG_FLAG} too; leave one of the two out",
            )
        if moved_by is not None and moved_by.connector != "nixl":
            yield Problem(
                f"workers[{index}].{FIELD}",
                f"{size:g}: transfer is {moved_by.connector}, and only nixl is run together with "
                "offloading; leave it out, or use nixl",
            )


def unsupported_offloading(config: FleetConfig) -> Iterator[Problem]:
    """Refuse offloading with a vLLM for CPUs."""
    for index, worker in enumerate(config.workers):
        if worker.launch and worker.launch.kv_offloading_size and launch.on_cpu():
            yield Problem(
                f"workers[{index}].{FIELD}",
                "the vLLM installed here is for CPUs, and vLLM offloads KV blocks only from "
                "accelerators; leave it out",
            )
