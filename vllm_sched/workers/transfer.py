"""The flags and environment of prefill and decode workers that transfer KV caches.

Only Mooncake gets an engine id, because its decode workers look for a known name. vLLM's own id is
new at each start, so that blocks of a dead worker are not read from its replacement.
"""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from vllm_sched.workers import launch
from vllm_sched.workers.flags import expanded, fields, last

Part = Literal["prefill", "decode"]

# vLLM's classes by connector, compatible within a line; the first installed one is used.
CLASSES: Mapping[str, tuple[str, ...]] = {
    "nixl": ("NixlConnector", "NixlPullConnector"),
    "nixl push": ("NixlPushConnector",),
    "shared-storage": ("ExampleConnector", "SharedStorageConnector"),
    "mooncake": ("MooncakeConnector",),
    "lmcache": ("LMCacheConnectorV1",),
}
# Packages that the classes import, one of each line.
PACKAGES: Mapping[str, tuple[str, ...]] = {
    "nixl": ("nixl", "rixl"),
    "mooncake": ("mooncake",),
    "lmcache": ("lmcache",),
}
ROLES: Mapping[Part, str] = {"prefill": "kv_producer", "decode": "kv_consumer"}
# Our variants of vLLM's NIXL classes.
NIXL_MODULE, MODULE_KEY = "vllm_sched.engine.nixl", "kv_connector_module_path"
LAYOUT, USUAL_LAYOUT = "VLLM_KV_CACHE_LAYOUT", "LBHNC"
LAYOUTS = {"HND": "LBHNC", "NHD": "LBNHC"}  # vLLM's older names
SIDE_HOST, SIDE_PORT = "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"
BOOTSTRAP_PORT, USUAL_BOOTSTRAP_PORT = "VLLM_MOONCAKE_BOOTSTRAP_PORT", "8998"

# The connector stores only a prompt's last chunk; reading the rest crashes a worker.
NO_CHUNKS_FLAG = "--no-enable-chunked-prefill"

# Each block adds descriptors per layer: a 12,000-token transfer took 12 ms with blocks of 128.
CPU_BLOCK = "128"
# How long a prefill worker keeps unread blocks. vLLM reads blocks even after the lease has ended,
# so the worker's lease is SPARE times the router's.
DEFAULT_LEASE_S, LEASE_FACTOR = 60, 2.0

CONFIG_FLAG = "--kv-transfer-config"
# Several connectors in one worker. vLLM loads a prompt from the first that has any of its blocks.
SEVERAL, PARTS_KEY, EXTRA_KEY = "MultiConnector", "connectors", "kv_connector_extra_config"
OFFLOADING, OFFLOADING_FLAG = "OffloadingConnector", "--kv-offloading-size"


@dataclass(frozen=True, slots=True)
class Wiring:
    """A worker's end of the transfer: flags, environment, and a line of text for both."""

    flags: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    said: str = ""


def wiring(
    connector: str,
    part: Part,
    *,
    name: str = "",
    mode: str = "pull",
    host: str = launch.LOOPBACK,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    few_cpus: bool = False,
    path: str | None = None,
    address: str | None = None,
    lease_s: float | None = None,
    offload_gib: float | None = None,
) -> Wiring:
    """Return one end's wiring; the user's `args` (or their file) and `env` have precedence.

    `few_cpus`: the worker is bound to a few CPUs, which a polling thread would occupy. `address`
    is the worker's transfer address. `offload_gib`: the host memory for offloaded blocks.
    """
    env = env or {}
    on_cpu = launch.on_cpu()
    config: dict[str, Any] = {"kv_connector": class_of(connector, mode), "kv_role": ROLES[part]}
    extra: dict[str, Any] = {}
    more: dict[str, str] = {}
    said = [f"{config['kv_connector']} as {ROLES[part]}"]
    if on_cpu:  # vLLM's default is the accelerator
        config["kv_buffer_device"] = "cpu"
    if connector == "nixl":
        # Otherwise a prefill worker's death fails the requests that it hands over.
        config["kv_load_failure_policy"] = "recompute"
        extra["kv_lease_duration"] = ceil(LEASE_FACTOR * lease_s) if lease_s else DEFAULT_LEASE_S
        more[SIDE_HOST] = env.get(SIDE_HOST, host)
        more[SIDE_PORT] = env.get(SIDE_PORT) or str(launch.free_port())
        said.append(f"side channel {more[SIDE_HOST]}:{more[SIDE_PORT]}")
        if on_cpu or few_cpus:
            config[MODULE_KEY] = NIXL_MODULE
            said.append("threads stay on the given CPUs, and NIXL's thread sleeps between polls")
    elif connector == "shared-storage":
        config["kv_role"] = "kv_both"  # the connector has no roles
        extra["shared_storage_path"] = path
        said = [f"{config['kv_connector']} in {path}, prompts computed in one chunk"]
    elif connector == "mooncake" and part == "prefill":
        config["engine_id"] = name
        # Overrides the environment of `up`: decode workers use this port.
        more[BOOTSTRAP_PORT] = str(urlsplit(address).port) if address else USUAL_BOOTSTRAP_PORT
        said.append("restart its decode workers after this worker was restarted")
    if extra:
        config[EXTRA_KEY] = extra
    flags = ["--enable-prompt-tokens-details"]  # shows clients the number of cached tokens
    blocks: list[str] = []
    if on_cpu:
        block = last(expanded(args), "--block-size") or CPU_BLOCK
        flags += ["--block-size", block]
        blocks.append(f"blocks of {block}")
    if connector == "shared-storage":
        flags.append(NO_CHUNKS_FLAG)
    if (own := own_config(args)) is None:
        if offload_gib:
            said.append(offloading_wiring(offload_gib).said)
        sent = with_offloading(config, offload_gib) if offload_gib else config
        flags += [CONFIG_FLAG, json.dumps(sent)]
    else:
        said = ["--kv-transfer-config as given"]
        if MODULE_KEY in config and not any(part.get(MODULE_KEY) for part in parts_of(own)):
            said.append(
                f'set "{MODULE_KEY}": "{NIXL_MODULE}" in it, or NIXL\'s thread occupies a CPU'
            )
    said += blocks
    return Wiring(tuple(flags), more, ", ".join(said))


def offloading_wiring(gib: float) -> Wiring:
    """Return the wiring of a worker that offloads KV blocks and transfers none."""
    return Wiring((OFFLOADING_FLAG, f"{gib:g}"), said=f"KV blocks offloaded to {gib:g} GiB")


def with_offloading(config: dict[str, Any], gib: float) -> dict[str, Any]:
    """Return the configuration of a connector with the offloading connector behind it."""
    # vLLM reads this key only of the whole configuration.
    whole = {key: config.pop(key) for key in ["kv_load_failure_policy"] if key in config}
    tier = {"kv_connector": OFFLOADING, "kv_role": "kv_both"}
    size = {"cpu_bytes_to_use": int(gib * 2**30)}
    parts = [config, {**tier, EXTRA_KEY: size}]
    return {"kv_connector": SEVERAL, "kv_role": "kv_both", **whole, EXTRA_KEY: {PARTS_KEY: parts}}


def parts_of(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the configurations of a worker's connectors; none if they are not in a list."""
    if config.get("kv_connector") != SEVERAL:
        return [config]
    extra = config.get(EXTRA_KEY)
    parts = extra.get(PARTS_KEY) if isinstance(extra, dict) else None
    return [part for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []


def class_of(connector: str, mode: str = "pull") -> str:
    """Return vLLM's class for a connector; its newest name if none is installed."""
    names = classes(connector, mode)
    return next((name for name in names if name in _factory()), names[0])


def classes(connector: str, mode: str = "pull") -> tuple[str, ...]:
    """Return vLLM's classes for a connector, all compatible with each other."""
    return CLASSES["nixl push" if mode == "push" else connector]


def missing(connector: str, mode: str = "pull") -> str:
    """Return the vLLM class or package that a connector lacks here, or an empty text."""
    if f'"{class_of(connector, mode)}"' not in _factory():
        return f"the vLLM installed here has no {class_of(connector, mode)}"
    packages = PACKAGES.get(connector, ())
    if packages and not any(map(_importable, packages)):
        return f"the package {packages[0]} is not installed here"
    return ""


def _importable(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


@functools.cache
def _factory() -> str:
    """Return the source of vLLM's connector registry, because importing it takes seconds."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        return ""
    file = Path(found.origin).parent / "distributed/kv_transfer/kv_connector/factory.py"
    return file.read_text() if file.is_file() else ""


def layout_of(args: Sequence[str], env: Mapping[str, str]) -> str:
    """Return the KV cache layout of a NIXL worker; empty if the worker can convert layouts.

    NIXL has a default layout of its own.
    """
    if any(part.get("enable_permute_local_kv") for part in parts_of(own_config(args) or {})):
        return ""
    said = env.get(LAYOUT) or USUAL_LAYOUT
    return LAYOUTS.get(said, said)


def own_config(args: Sequence[str]) -> dict[str, Any] | None:
    """Return the user's --kv-transfer-config, whole or by keys; empty if it is not a JSON object.

    To vLLM, a single key replaces all that was written before it.
    """
    return fields(expanded(args), CONFIG_FLAG)
