"""The flags and environment of prefill and decode workers that `up` starts.

Only Mooncake gets an engine id, because its decode workers look for a known name. vLLM's own id is
new at each start, so that blocks of a dead worker are not read from its replacement.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any
from urllib.parse import urlsplit

from proxy.config import FleetConfig, LaunchConfig, TransferConfig, WorkerConfig
from vllm_sched.workers import connectors, launch
from vllm_sched.workers.flags import last_value, with_config_file


@dataclass(frozen=True, slots=True)
class Wiring:
    """A worker's end of the transfer: flags, environment, and a line of text for both."""

    flags: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    summary: str = ""


@dataclass(frozen=True, slots=True)
class ConnectorSetup:
    config: dict[str, Any]
    env: dict[str, str]
    summary: str


def wiring_of(config: FleetConfig, worker: WorkerConfig) -> Wiring:
    """Return a worker's transfer wiring; empty if it has no transfer."""
    if config.transfer is None or worker.role not in connectors.ROLES:
        size = worker.launch.kv_offloading_size if worker.launch else None
        return Wiring() if size is None else offloading_wiring(size)
    wiring = transfer_wiring(config.transfer, worker)
    if worker.role != "decode" or worker.slots is None:
        return wiring
    return replace(
        wiring, summary=f"{wiring.summary}, {worker.slots} slots for hand-overs and other requests"
    )


def transfer_wiring(transfer: TransferConfig, worker: WorkerConfig) -> Wiring:
    """Return one end's wiring; the user's `args` (or their file) and `env` have precedence."""
    launched = worker.launch or LaunchConfig()
    setup = _setup_of(transfer, worker, launched)
    flags = ["--enable-prompt-tokens-details"]  # shows clients the number of cached tokens
    if transfer.connector == "shared-storage":
        flags.append(connectors.NO_CHUNKS_FLAG)
    summary = []
    if (own := connectors.user_config(launched.args)) is None:
        config = setup.config
        summary.append(setup.summary)
        if gib := launched.kv_offloading_size:
            config = with_offloading(config, gib)
            summary.append(offloading_wiring(gib).summary)
        flags += [connectors.CONFIG_FLAG, json.dumps(config)]
    else:
        summary.append(f"{connectors.CONFIG_FLAG} as given")
        module = setup.config.get(connectors.MODULE_KEY)
        parts = connectors.connector_parts(own)
        if module and not any(part.get(connectors.MODULE_KEY) for part in parts):
            summary.append(
                f'set "{connectors.MODULE_KEY}": "{module}" in it, or NIXL\'s thread occupies a CPU'
            )
    if launch.on_cpu():
        block = last_value(with_config_file(launched.args), "--block-size") or connectors.CPU_BLOCK
        flags += ["--block-size", block]
        summary.append(f"blocks of {block}")
    return Wiring(tuple(flags), setup.env, ", ".join(summary))


def _setup_of(
    transfer: TransferConfig, worker: WorkerConfig, launched: LaunchConfig
) -> ConnectorSetup:
    name = connectors.connector_class(transfer.connector, transfer.mode)
    role = connectors.ROLES[worker.role]
    summary = f"{name} as {role}"
    config: dict[str, Any] = {"kv_connector": name, "kv_role": role}
    if launch.on_cpu():  # vLLM's default is the accelerator
        config["kv_buffer_device"] = "cpu"
    if transfer.connector == "nixl":
        nixl = _nixl_setup(transfer.lease_s, worker, launched)
        return ConnectorSetup(config | nixl.config, nixl.env, f"{summary}, {nixl.summary}")
    if transfer.connector == "shared-storage":
        config["kv_role"] = "kv_both"  # the connector has no roles
        config[connectors.EXTRA_KEY] = {"shared_storage_path": transfer.path}
        summary = f"{name} in {transfer.path}, prompts computed in one chunk"
    if transfer.connector == "mooncake" and worker.role == "prefill":
        config["engine_id"] = worker.name
        address = transfer.addresses.get(worker.name)
        port = str(urlsplit(address).port) if address else connectors.USUAL_BOOTSTRAP_PORT
        summary += ", restart its decode workers after this worker was restarted"
        # Overrides the environment of `up`: decode workers use this port.
        return ConnectorSetup(config, {connectors.BOOTSTRAP_PORT: port}, summary)
    return ConnectorSetup(config, {}, summary)


def _nixl_setup(
    lease_s: float | None, worker: WorkerConfig, launched: LaunchConfig
) -> ConnectorSetup:
    host, _ = worker.address or (launch.LOOPBACK, None)
    host = launched.env.get(connectors.SIDE_HOST, host)
    port = launched.env.get(connectors.SIDE_PORT) or str(launch.free_port())
    summary = f"side channel {host}:{port}"
    kept_s = ceil(connectors.LEASE_FACTOR * lease_s) if lease_s else connectors.DEFAULT_LEASE_S
    config = {
        # Otherwise a prefill worker's death fails the requests that it hands over.
        connectors.FAILURE_KEY: "recompute",
        connectors.EXTRA_KEY: {"kv_lease_duration": kept_s},
    }
    if launch.on_cpu() or launched.cpus:  # a polling thread would occupy one of few CPUs
        config[connectors.MODULE_KEY] = connectors.NIXL_MODULE
        summary += ", threads stay on the given CPUs, and NIXL's thread sleeps between polls"
    return ConnectorSetup(config, {connectors.SIDE_HOST: host, connectors.SIDE_PORT: port}, summary)


def offloading_wiring(gib: float) -> Wiring:
    """Return the wiring of a worker that offloads KV blocks and transfers none."""
    return Wiring(
        (connectors.OFFLOADING_FLAG, f"{gib:g}"), summary=f"KV blocks offloaded to {gib:g} GiB"
    )


def with_offloading(config: dict[str, Any], gib: float) -> dict[str, Any]:
    """Return the configuration of a connector with the offloading connector behind it."""
    part = {key: value for key, value in config.items() if key != connectors.FAILURE_KEY}
    # vLLM reads this key only of the whole configuration.
    whole = {key: value for key, value in config.items() if key == connectors.FAILURE_KEY}
    size = {"cpu_bytes_to_use": int(gib * 2**30)}
    tier = {"kv_connector": connectors.OFFLOADING, "kv_role": "kv_both", connectors.EXTRA_KEY: size}
    several = {"kv_connector": connectors.SEVERAL, "kv_role": "kv_both"}
    return several | whole | {connectors.EXTRA_KEY: {connectors.PARTS_KEY: [part, tier]}}
