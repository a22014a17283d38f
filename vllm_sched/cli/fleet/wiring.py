"""The transfer wiring of prefill and decode workers that `up` starts, and its checks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final, cast

from proxy.config import FleetConfig, LaunchConfig, PartialConfig, TransferConfig, WorkerConfig
from proxy.config.types import LAST_PORT
from proxy.errors import Problem
from vllm_sched.workers import launch, transfer
from vllm_sched.workers.ends import differences
from vllm_sched.workers.flags import expanded, last, names, number
from vllm_sched.workers.transfer import Part, Wiring

PARTS = ("prefill", "decode")
LENGTH_FLAG, MAX_PORT_DIGITS = "--max-model-len", len(str(LAST_PORT))
VLLM_LEASE_S = 30.0  # vLLM's default
# LMCache's settings that name a shared store or a push target, or a file with all settings, with
# some older names.
STORE_VARIABLES = (
    "LMCACHE_CONFIG_FILE",
    "LMCACHE_REMOTE_URL",
    "LMCACHE_REMOTE_STORAGE_PLUGINS",
    "LMCACHE_STORAGE_PLUGINS",
    "LMCACHE_EXTERNAL_BACKENDS",
    "LMCACHE_EXTRA_CONFIG",
    "LMCACHE_GDS_PATH",
    "LMCACHE_WEKA_PATH",
    "LMCACHE_MARU_PATH",
    "LMCACHE_ENABLE_P2P",
    "LMCACHE_ENABLE_PD",
    "LMCACHE_ENABLE_XPYD",
    "LMCACHE_ENABLE_NIXL",
)
UNSET_VALUES = ("", "0", "false")  # values that mean "not set"


def wiring_of(config: FleetConfig, worker: WorkerConfig) -> Wiring:
    """Return a worker's transfer wiring; empty if it has no transfer."""
    told = worker.launch or LaunchConfig()
    if config.transfer is None or worker.role not in PARTS:
        size = told.kv_offloading_size
        return Wiring() if size is None else transfer.offloading_wiring(size)
    host, _ = worker.address or (launch.LOOPBACK, None)
    made = transfer.wiring(
        config.transfer.connector,
        cast("Part", worker.role),
        name=worker.name,
        mode=config.transfer.mode,
        host=host,
        args=told.args,
        env=told.env,
        few_cpus=bool(told.cpus),
        path=config.transfer.path,
        address=config.transfer.addresses.get(worker.name),
        lease_s=config.transfer.lease_s,
        offload_gib=told.kv_offloading_size,
    )
    if worker.role != "decode" or worker.slots is None:
        return made
    return replace(
        made, said=f"{made.said}, {worker.slots} slots for hand-overs and other requests"
    )


def compatibility_problems(draft: PartialConfig) -> Iterator[Problem]:
    """Check that workers that hand over prompts to each other are compatible."""
    yield from offloading_problems(draft)
    if draft.transfer is None:
        return
    if draft.transfer.connector == "shared-storage" and draft.transfer.path is None:
        ends = (w for w in draft.workers.values() if w.launch and w.role in PARTS)
        if any(transfer.own_config(w.launch.args) is None for w in ends if w.launch):
            yield Problem(
                "transfer.path",
                "is missing: shared-storage keeps its files in a folder that all workers can read; "
                "name one, as in transfer: {connector: shared-storage, path: /kv}",
            )
    if draft.transfer.connector == "mooncake":
        yield from _bootstrap_problems(draft.transfer, draft.workers)
    elif draft.transfer.connector == "lmcache":
        yield from _store_problems(draft.workers)
    first: dict[str | None, tuple[int, WorkerConfig, LaunchConfig]] = {}
    sides: dict[tuple[str, str], int] = {}
    for index, worker in draft.workers.items():
        told = worker.launch
        if told is None or worker.role not in PARTS:
            continue
        yield from _own_config_problems(draft.transfer, index, worker, told)
        if draft.transfer.connector == "shared-storage":
            yield from _chunk_problems(index, told)
        if (port := told.env.get(transfer.SIDE_PORT)) is not None:
            if not (
                port.isdecimal() and len(port) <= MAX_PORT_DIGITS and 0 < int(port) <= LAST_PORT
            ):
                yield Problem(
                    f"workers[{index}].launch.env.{transfer.SIDE_PORT}",
                    f"{port!r} is not a port; leave it out to get a free port",
                )
            place = (told.env.get(transfer.SIDE_HOST, "here"), port)
            if (other := sides.setdefault(place, index)) != index:
                yield Problem(
                    f"workers[{index}].launch.env.{transfer.SIDE_PORT}",
                    f"{port}: workers[{other}] has the same port; leave it out to get a free one",
                )
        model = draft.model_of(worker)
        there, other_worker, others = first.setdefault(model, (index, worker, told))
        if there == index:
            continue
        named = f"workers[{there}] ({other_worker.name})"
        loaded, theirs_loaded = told.model or model or "", others.model or model or ""
        if loaded != theirs_loaded:
            yield Problem(
                f"workers[{index}].launch.model",
                f"{loaded or 'none'}: {named} loads {theirs_loaded or 'none'}, and a worker can't "
                "read another model's KV cache; give both the same model",
            )
        if draft.transfer.connector == "nixl":
            layout, theirs = (transfer.layout_of(each.args, each.env) for each in (told, others))
            if layout and theirs and layout != theirs:
                yield Problem(
                    f"workers[{index}].launch.env.{transfer.LAYOUT}",
                    f"{layout}: {named} has {theirs}, and NIXL needs equal KV cache layouts; give "
                    "both the same layout, or neither",
                )
        for flag, ours, theirs in differences(told.args, others.args, model=loaded):
            yield Problem(
                f"workers[{index}].launch.args",
                f"{flag} {ours or '(none)'}: {named} has {theirs or 'none'}, and a KV cache can "
                f"move only between workers with the same {flag}; make them equal",
            )


def _chunk_problems(index: int, told: LaunchConfig) -> Iterator[Problem]:
    """Refuse chunked prompts, because shared storage keeps only the last chunk."""
    if told.policies:
        yield Problem(
            f"workers[{index}].launch.policies",
            f"{', '.join(told.policies)}: policies may split a prompt into chunks, and "
            "shared-storage keeps only the last chunk; leave them out",
        )
    args = expanded(told.args)
    if "--enable-chunked-prefill" in names(args):
        yield Problem(
            f"workers[{index}].launch.args",
            "--enable-chunked-prefill: shared-storage keeps only the last chunk of a prompt; "
            "leave it out",
        )
    budget, longest = (number(args, name) for name in ("--max-num-batched-tokens", LENGTH_FLAG))
    if budget is not None and longest is not None and budget < longest:
        yield Problem(
            f"workers[{index}].launch.args",
            f"--max-num-batched-tokens {budget}: {LENGTH_FLAG} is {longest}, and a prompt must fit "
            f"one step, because shared-storage keeps only the last chunk; give at least {longest}",
        )


def _bootstrap_problems(
    moved_by: TransferConfig, workers: Mapping[int, WorkerConfig]
) -> Iterator[Problem]:
    """Refuse prefill workers of Mooncake that decode workers would not find."""
    taken: dict[str, str] = {}
    for index, worker in workers.items():
        told = worker.launch
        if told is None or worker.role != "prefill":
            continue
        engines = number(expanded(told.args), "--data-parallel-size") or 1
        if engines > 1:
            yield Problem(
                f"workers[{index}].launch.args",
                f"--data-parallel-size {engines}: vLLM appends a number to each engine's id, and "
                f"decode workers look for {worker.name!r}; start {engines} workers with one "
                "engine each, or use nixl",
            )
        given = moved_by.addresses.get(worker.name, "").rpartition(":")[2].strip("/")
        sought = given or transfer.USUAL_BOOTSTRAP_PORT
        own = told.env.get(transfer.BOOTSTRAP_PORT)
        if own is not None and own != sought:
            yield Problem(
                f"workers[{index}].launch.env.{transfer.BOOTSTRAP_PORT}",
                f"{own!r}: decode workers use port {sought}; leave it out, and set the port in "
                f"transfer.addresses, as in {worker.name}: http://127.0.0.1:{own or '8999'}",
            )
        port = own or sought
        if (other := taken.setdefault(port, worker.name)) != worker.name:
            yield Problem(
                "transfer.addresses",
                f"{worker.name!r} would listen on port {port}, like {other!r}; give each worker "
                f"its own port, as in {worker.name}: http://127.0.0.1:8999",
            )


def _store_problems(workers: Mapping[int, WorkerConfig]) -> Iterator[Problem]:
    """Refuse LMCache workers without a shared store, which would compute each prompt twice."""
    for index, worker in workers.items():
        told = worker.launch
        if told is None or worker.role not in PARTS or transfer.own_config(told.args) is not None:
            continue
        env = {**os.environ, **told.env}  # the worker's environment
        if all(env.get(name, "").lower() in UNSET_VALUES for name in STORE_VARIABLES):
            yield Problem(
                f"workers[{index}].launch.env",
                "names no store that the LMCache workers share or push through; set "
                "LMCACHE_CONFIG_FILE, LMCACHE_REMOTE_URL or LMCACHE_ENABLE_PD, or use nixl",
            )


def _own_config_problems(
    moved_by: TransferConfig, index: int, worker: WorkerConfig, told: LaunchConfig
) -> Iterator[Problem]:
    """Check the user's own --kv-transfer-config against the fleet file's transfer: block."""
    own = transfer.own_config(told.args)
    if own is None:
        return
    path = f"workers[{index}].launch.args"
    if not own:
        yield Problem(
            path,
            "--kv-transfer-config is not a JSON object with at least one key; leave the flag "
            "out, or correct it",
        )
        return
    parts = transfer.parts_of(own)
    part = parts[0] if parts else own
    if part is not own and any("engine_id" in each for each in parts):
        yield Problem(
            path,
            f"--kv-transfer-config with engine_id in a part of {transfer.SEVERAL}: vLLM sets it "
            "there itself and fails; move it next to kv_connector",
        )
    named = part.get("kv_connector")
    engine, is_sought = own.get("engine_id"), worker.role == "prefill"
    if moved_by.connector == "mooncake" and is_sought and engine != worker.name:
        yield Problem(
            path,
            f"--kv-transfer-config with engine_id {engine!r}: decode workers look for "
            f"{worker.name!r}, this worker's name; use that",
        )
    if named not in transfer.classes(moved_by.connector, moved_by.mode):
        wanted = transfer.class_of(moved_by.connector, moved_by.mode)
        pushed = " with mode: push" if moved_by.mode == "push" else ""
        # vLLM loads a prompt from the first connector with any of its blocks.
        place = "" if part is own else f" first in {transfer.SEVERAL}"
        yield Problem(
            path,
            f"--kv-transfer-config with the connector {named!r}{place}: transfer is "
            f"{moved_by.connector}{pushed}, which needs {wanted}; leave the flag out, or correct "
            "one of the two",
        )
    role = transfer.ROLES[cast("Part", worker.role)]
    if part.get("kv_role") not in (role, "kv_both"):
        yield Problem(
            path,
            f"--kv-transfer-config with kv_role {part.get('kv_role')!r}: a {worker.role} worker "
            f"needs {role}; leave the flag out, or correct it",
        )
    extra = part.get(transfer.EXTRA_KEY)
    kept_s = (
        extra.get("kv_lease_duration", VLLM_LEASE_S) if isinstance(extra, dict) else VLLM_LEASE_S
    )
    told_s = moved_by.lease_s or VLLM_LEASE_S
    if moved_by.connector == "nixl" and isinstance(kept_s, (int, float)) and kept_s < told_s:
        yield Problem(
            path,
            f"--kv-transfer-config with kv_lease_duration {kept_s:g}: transfer.lease_s is "
            f"{told_s:g}, and blocks read after the lease may hold another prompt; give this "
            f"worker at least {told_s:g}",
        )


def missing_connector(config: FleetConfig) -> Iterator[Problem]:
    """Yield a problem if launched workers need a connector that is not installed here."""
    yield from unsupported_offloading(config)
    moved_by = config.transfer
    if moved_by is None or not (why := transfer.missing(moved_by.connector, moved_by.mode)):
        return
    if any(worker.launch and worker.role in PARTS for worker in config.workers):
        have = [name for name in transfer.CLASSES if " " not in name and not transfer.missing(name)]
        others = f"choose from {', '.join(have)}" if have else "install one"
        yield Problem("transfer", f"{moved_by.connector!r}: {why}; {others}")


FIELD: Final = "launch.kv_offloading_size"


def offloading_problems(draft: PartialConfig) -> Iterator[Problem]:
    """Check `launch.kv_offloading_size` against other flags and the transfer."""
    for index, worker in draft.workers.items():
        if (settings := worker.launch) is None:
            continue
        moved_by = draft.transfer if worker.role in PARTS else None
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
