"""Refusals of prefill and decode workers that can't transfer KV caches to each other."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from proxy.config import FleetConfig, LaunchConfig, PartialConfig, TransferConfig, WorkerConfig
from proxy.config.types import LAST_PORT
from proxy.errors import Problem
from vllm_sched.workers import connectors, launch
from vllm_sched.workers.flags import flag_names, int_value, last_value, with_config_file
from vllm_sched.workers.transfer_compatibility import incompatible_flags

LENGTH_FLAG, MAX_PORT_DIGITS = "--max-model-len", len(str(LAST_PORT))
VLLM_LEASE_S = 30.0  # vLLM's default
# LMCache's settings, also by older names, for a shared store, a push target or a file of settings.
STORE_VARIABLES = (
    "LMCACHE_CONFIG_FILE", "LMCACHE_REMOTE_URL", "LMCACHE_REMOTE_STORAGE_PLUGINS",
    "LMCACHE_STORAGE_PLUGINS", "LMCACHE_EXTERNAL_BACKENDS", "LMCACHE_EXTRA_CONFIG",
    "LMCACHE_GDS_PATH", "LMCACHE_WEKA_PATH", "LMCACHE_MARU_PATH", "LMCACHE_ENABLE_P2P",
    "LMCACHE_ENABLE_PD", "LMCACHE_ENABLE_XPYD", "LMCACHE_ENABLE_NIXL",
)  # fmt: skip
UNSET_VALUES = ("", "0", "false")  # values that mean "not set"


@dataclass(frozen=True, slots=True)
class LaunchedWorker:
    """A worker that `up` starts, with its place in the fleet file."""

    index: int
    worker: WorkerConfig
    launch: LaunchConfig

    @property
    def label(self) -> str:
        return f"workers[{self.index}] ({self.worker.name})"

    def problem(self, key: str, text: str) -> Problem:
        return Problem(f"workers[{self.index}].launch.{key}", text)


def compatibility_problems(draft: PartialConfig) -> Iterator[Problem]:
    """Check that workers that hand over prompts to each other are compatible."""
    transfer = draft.config.transfer
    if transfer is None:
        return
    ends = [end for end in _launched(draft) if end.worker.role in connectors.ROLES]
    if transfer.connector == "shared-storage":
        yield from _folder_problems(transfer, ends)
        for end in ends:
            yield from _chunk_problems(end)
    elif transfer.connector == "mooncake":
        yield from _bootstrap_problems(transfer, ends)
    elif transfer.connector == "lmcache":
        yield from _store_problems(ends)
    yield from _side_port_problems(ends)
    first_of: dict[str, LaunchedWorker] = {}
    for end in ends:
        yield from _own_config_problems(transfer, end)
        model = draft.config.model_of(end.worker)
        first = first_of.setdefault(model, end)
        if first is not end:
            yield from _pair_problems(transfer, first, end, model)


def _launched(draft: PartialConfig) -> list[LaunchedWorker]:
    return [
        LaunchedWorker(index, worker, worker.launch)
        for index, worker in draft.workers.items()
        if worker.launch is not None
    ]


def _pair_problems(
    transfer: TransferConfig, first: LaunchedWorker, second: LaunchedWorker, served: str
) -> Iterator[Problem]:
    """Refuse two workers of one served model that can't read each other's KV cache."""
    ours, theirs = (end.launch.model or served for end in (second, first))
    if ours != theirs:
        yield second.problem(
            "model",
            f"{ours or 'none'}: {first.label} loads {theirs or 'none'}, and a worker can't "
            "read another model's KV cache; give both the same model",
        )
    if transfer.connector == "nixl":
        layout, other = (
            connectors.kv_layout(end.launch.args, end.launch.env) for end in (second, first)
        )
        if layout and other and layout != other:
            yield second.problem(
                f"env.{connectors.LAYOUT}",
                f"{layout}: {first.label} has {other}, and NIXL needs equal KV cache layouts; give "
                "both the same layout, or neither",
            )
    for flag, value, other in incompatible_flags(second.launch.args, first.launch.args, model=ours):
        yield second.problem(
            "args",
            f"{flag} {value or '(none)'}: {first.label} has {other or 'none'}, and a KV cache can "
            f"move only between workers with the same {flag}; make them equal",
        )


def _side_port_problems(ends: Sequence[LaunchedWorker]) -> Iterator[Problem]:
    taken: dict[tuple[str, str], LaunchedWorker] = {}
    for end in ends:
        env, key = end.launch.env, f"env.{connectors.SIDE_PORT}"
        port = env.get(connectors.SIDE_PORT)
        if port is None:
            continue
        if not _is_port(port):
            yield end.problem(key, f"{port!r} is not a port; leave it out to get a free port")
        other = taken.setdefault((env.get(connectors.SIDE_HOST, "here"), port), end)
        if other is not end:
            yield end.problem(
                key,
                f"{port}: workers[{other.index}] has the same port; leave it out to get a free one",
            )


def _is_port(text: str) -> bool:
    return text.isdecimal() and len(text) <= MAX_PORT_DIGITS and 0 < int(text) <= LAST_PORT


def _folder_problems(transfer: TransferConfig, ends: Sequence[LaunchedWorker]) -> Iterator[Problem]:
    if transfer.path is None and any(
        connectors.user_config(end.launch.args) is None for end in ends
    ):
        yield Problem(
            "transfer.path",
            "is missing: shared-storage keeps its files in a folder that all workers can read; "
            "name one, as in transfer: {connector: shared-storage, path: /kv}",
        )


def _chunk_problems(end: LaunchedWorker) -> Iterator[Problem]:
    """Refuse chunked prompts, because shared storage keeps only the last chunk."""
    if end.launch.policies:
        yield end.problem(
            "policies",
            f"{', '.join(end.launch.policies)}: policies may split a prompt into chunks, and "
            "shared-storage keeps only the last chunk; leave them out",
        )
    args = with_config_file(end.launch.args)
    if "--enable-chunked-prefill" in flag_names(args):
        yield end.problem(
            "args",
            "--enable-chunked-prefill: shared-storage keeps only the last chunk of a prompt; "
            "leave it out",
        )
    budget, longest = (int_value(args, name) for name in ("--max-num-batched-tokens", LENGTH_FLAG))
    if budget is not None and longest is not None and budget < longest:
        yield end.problem(
            "args",
            f"--max-num-batched-tokens {budget}: {LENGTH_FLAG} is {longest}, and a prompt must fit "
            f"one step, because shared-storage keeps only the last chunk; give at least {longest}",
        )


def _bootstrap_problems(
    transfer: TransferConfig, ends: Sequence[LaunchedWorker]
) -> Iterator[Problem]:
    """Refuse prefill workers of Mooncake that decode workers would not find."""
    taken: dict[str, str] = {}
    for end in ends:
        if end.worker.role != "prefill":
            continue
        name = end.worker.name
        engines = int_value(with_config_file(end.launch.args), "--data-parallel-size") or 1
        if engines > 1:
            yield end.problem(
                "args",
                f"--data-parallel-size {engines}: vLLM appends a number to each engine's id, and "
                f"decode workers look for {name!r}; start {engines} workers with one "
                "engine each, or use nixl",
            )
        port = transfer.addresses.get(name, "").rpartition(":")[2].strip("/")
        sought = port or connectors.USUAL_BOOTSTRAP_PORT
        own = end.launch.env.get(connectors.BOOTSTRAP_PORT)
        if own is not None and own != sought:
            yield end.problem(
                f"env.{connectors.BOOTSTRAP_PORT}",
                f"{own!r}: decode workers use port {sought}; leave it out, and set the port in "
                f"transfer.addresses, as in {name}: http://127.0.0.1:{own or '8999'}",
            )
        port = own or sought
        if (other := taken.setdefault(port, name)) != name:
            yield Problem(
                "transfer.addresses",
                f"{name!r} would listen on port {port}, like {other!r}; give each worker "
                f"its own port, as in {name}: http://127.0.0.1:8999",
            )


def _store_problems(ends: Sequence[LaunchedWorker]) -> Iterator[Problem]:
    """Refuse LMCache workers without a shared store, which would compute each prompt twice."""
    for end in ends:
        if connectors.user_config(end.launch.args) is not None:
            continue
        env = {**os.environ, **end.launch.env}  # the worker's environment
        if all(env.get(name, "").lower() in UNSET_VALUES for name in STORE_VARIABLES):
            yield end.problem(
                "env",
                "names no store that the LMCache workers share or push through; set "
                "LMCACHE_CONFIG_FILE, LMCACHE_REMOTE_URL or LMCACHE_ENABLE_PD, or use nixl",
            )


def _own_config_problems(transfer: TransferConfig, end: LaunchedWorker) -> Iterator[Problem]:
    own = connectors.user_config(end.launch.args)
    if own:
        for mismatch in _mismatches(transfer, end.worker, own):
            yield end.problem("args", f"{connectors.CONFIG_FLAG} with {mismatch}")
    elif own is not None:
        yield end.problem(
            "args",
            f"{connectors.CONFIG_FLAG} is not a JSON object with at least one key; leave the flag "
            "out, or correct it",
        )


def _mismatches(
    transfer: TransferConfig, worker: WorkerConfig, own: Mapping[str, Any]
) -> Iterator[str]:
    parts = connectors.connector_parts(own)
    part = parts[0] if parts else own
    is_nested = part is not own
    if is_nested and any("engine_id" in part for part in parts):
        yield (
            f"engine_id in a part of {connectors.SEVERAL}: vLLM sets it "
            "there itself and fails; move it next to kv_connector"
        )
    engine = own.get("engine_id")
    if transfer.connector == "mooncake" and worker.role == "prefill" and engine != worker.name:
        yield (
            f"engine_id {engine!r}: decode workers look for "
            f"{worker.name!r}, this worker's name; use that"
        )
    named = part.get("kv_connector")
    if named not in connectors.connector_classes(transfer.connector, transfer.mode):
        wanted = connectors.connector_class(transfer.connector, transfer.mode)
        pushed = " with mode: push" if transfer.mode == "push" else ""
        place = f" first in {connectors.SEVERAL}" if is_nested else ""
        yield (
            f"the connector {named!r}{place}: transfer is {transfer.connector}{pushed}, "
            f"which needs {wanted}; leave the flag out, or correct one of the two"
        )
    role = connectors.ROLES[worker.role]
    if part.get("kv_role") not in (role, "kv_both"):
        yield (
            f"kv_role {part.get('kv_role')!r}: a {worker.role} worker "
            f"needs {role}; leave the flag out, or correct it"
        )
    router_s, kept_s = transfer.lease_s or VLLM_LEASE_S, _kept_s(part)
    if transfer.connector == "nixl" and kept_s < router_s:
        yield (
            f"kv_lease_duration {kept_s:g}: transfer.lease_s is "
            f"{router_s:g}, and blocks read after the lease may hold another prompt; give this "
            f"worker at least {router_s:g}"
        )


def _kept_s(part: Mapping[str, Any]) -> float:
    """Return how long a connector keeps unread blocks; infinity if the value is not a number."""
    extra = part.get(connectors.EXTRA_KEY)
    kept = extra.get("kv_lease_duration", VLLM_LEASE_S) if isinstance(extra, dict) else VLLM_LEASE_S
    return kept if isinstance(kept, (int, float)) else math.inf


def unsupported_here(config: FleetConfig) -> Iterator[Problem]:
    """Yield what launched workers need and the vLLM installed here lacks."""
    yield from _unsupported_offloading(config)
    transfer = config.transfer
    if transfer is None:
        return
    if not (why := connectors.missing_requirement(transfer.connector, transfer.mode)):
        return
    if any(worker.launch and worker.role in connectors.ROLES for worker in config.workers):
        names = [name for name in connectors.CLASSES if " " not in name]
        have = [name for name in names if not connectors.missing_requirement(name)]
        others = f"choose from {', '.join(have)}" if have else "install one"
        yield Problem("transfer", f"{transfer.connector!r}: {why}; {others}")


def offloading_problems(draft: PartialConfig) -> Iterator[Problem]:
    """Check `launch.kv_offloading_size` against other flags and the transfer."""
    for launched in _launched(draft):
        settings, is_end = launched.launch, launched.worker.role in connectors.ROLES
        transfer = draft.config.transfer if is_end else None
        size = settings.kv_offloading_size
        flag = last_value(with_config_file(settings.args), connectors.OFFLOADING_FLAG)
        own = connectors.user_config(settings.args)
        replaced = (own or {}).get("kv_connector") not in connectors.SET_BY_OFFLOADING
        if flag is not None and (transfer is not None or size is not None or replaced):
            remedy = (
                f"set launch.kv_offloading_size: {flag} instead"
                if own is None
                else f"put {connectors.OFFLOADING} into {connectors.CONFIG_FLAG} instead"
            )
            yield launched.problem(
                "args",
                f"{connectors.OFFLOADING_FLAG} {flag}: vLLM would run only its offloading "
                f"connector, and no other; {remedy}",
            )
        if size is None:
            continue
        if own is not None:
            yield launched.problem(
                "kv_offloading_size",
                f"{size:g}: launch.args has {connectors.CONFIG_FLAG} too; leave one of the two out",
            )
        if transfer is not None and transfer.connector != "nixl":
            yield launched.problem(
                "kv_offloading_size",
                f"{size:g}: transfer is {transfer.connector}, and only nixl is run together with "
                "offloading; leave it out, or use nixl",
            )


def _unsupported_offloading(config: FleetConfig) -> Iterator[Problem]:
    for index, worker in enumerate(config.workers):
        if worker.launch and worker.launch.kv_offloading_size and launch.on_cpu():
            yield Problem(
                f"workers[{index}].launch.kv_offloading_size",
                "the vLLM installed here is for CPUs, and vLLM offloads KV blocks only from "
                "accelerators; leave it out",
            )
