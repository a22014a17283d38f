"""What a prefill or decode worker is started with, so that KV caches can move between the two.

No engine id is written but Mooncake's, for which decode workers look by a name that is known
before: vLLM makes one up at each start, so what a worker that died had promised can't be read from
the one that takes its place.
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
from vllm_sched.workers.flags import fields, last
from vllm_sched.workers.flags_file import expanded

Part = Literal["prefill", "decode"]

# By the name in a fleet file: vLLM's classes, the first one that is installed. All of a line are
# one and the same to the other end.
CLASSES: Mapping[str, tuple[str, ...]] = {
    "nixl": ("NixlConnector", "NixlPullConnector"),
    "nixl push": ("NixlPushConnector",),
    "shared-storage": ("ExampleConnector", "SharedStorageConnector"),
    "mooncake": ("MooncakeConnector",),
    "lmcache": ("LMCacheConnectorV1",),
    "p2p-nccl": ("P2pNcclConnector",),
}
# What these import besides, when a worker starts: one of each.
PACKAGES: Mapping[str, tuple[str, ...]] = {
    "nixl": ("nixl", "rixl"),
    "mooncake": ("mooncake",),
    "lmcache": ("lmcache",),
}
ROLES: Mapping[Part, str] = {"prefill": "kv_producer", "decode": "kv_consumer"}
# Our own variants of vLLM's NIXL classes.
OURS, MODULE = "vllm_sched.engine.nixl", "kv_connector_module_path"
LAYOUT, USUAL_LAYOUT = "VLLM_KV_CACHE_LAYOUT", "LBHNC"
LAYOUTS = {"HND": "LBHNC", "NHD": "LBNHC"}  # by vLLM's older names
SIDE_HOST, SIDE_PORT = "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"
BOOTSTRAP_PORT, USUAL_BOOTSTRAP_PORT = "VLLM_MOONCAKE_BOOTSTRAP_PORT", "8998"

# It stores what the last of a prompt's chunks computed, and who reads that dies of it.
WHOLE = "--no-enable-chunked-prefill"

# A block is a descriptor per layer and more: a 12,000-token transfer took 12 ms with 128.
CPU_BLOCK = "128"
# What no decode worker has asked for. Nearly all is freed at once, by the router's word; a lease
# that ends too early is worse than a late one, as vLLM reads the blocks then all the same. So it is
# longer than the router is told.
LEASE_S, SPARE = 60, 2.0

OWN = "--kv-transfer-config"


@dataclass(frozen=True, slots=True)
class Wiring:
    """A worker's end of the transfer: its flags, its environment, and both in a line for people."""

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
) -> Wiring:
    """Describe one end; `args` and `env` are the user's own, which win where they speak.

    Be it in a file that they name. `few_cpus`: the worker is bound to some processors, which it
    then can't share with a thread that polls. `address` is where it listens, for connectors that
    must be told.
    """
    env = env or {}
    on_cpu = launch.on_cpu()
    config: dict[str, Any] = {"kv_connector": class_of(connector, mode), "kv_role": ROLES[part]}
    extra: dict[str, Any] = {}
    more: dict[str, str] = {}
    said = [f"{config['kv_connector']} as {ROLES[part]}"]
    if on_cpu:  # elsewhere vLLM's own default is the accelerator
        config["kv_buffer_device"] = "cpu"
    if connector == "nixl":
        # Else a prefill worker that dies takes with it the requests that were to be handed over.
        config["kv_load_failure_policy"] = "recompute"
        extra["kv_lease_duration"] = ceil(SPARE * lease_s) if lease_s else LEASE_S
        more[SIDE_HOST] = env.get(SIDE_HOST, host)
        more[SIDE_PORT] = env.get(SIDE_PORT) or str(launch.free_port())
        said.append(f"side channel {more[SIDE_HOST]}:{more[SIDE_PORT]}")
        if on_cpu or few_cpus:
            config[MODULE] = OURS
            said.append("it computes where it was bound, and NIXL's thread sleeps between polls")
    elif connector == "shared-storage":
        config["kv_role"] = "kv_both"  # it knows no sides
        extra["shared_storage_path"] = path
        said = [f"{config['kv_connector']} in {path}, prompts computed whole"]
    elif connector == "mooncake" and part == "prefill":
        config["engine_id"] = name
        # Whatever it is: one that is exported where `up` runs is not where decode workers look.
        more[BOOTSTRAP_PORT] = str(urlsplit(address).port) if address else USUAL_BOOTSTRAP_PORT
        said.append("when it was started anew, its decode workers have to be, too")
    elif connector == "p2p-nccl" and address:
        config["kv_port"] = address.rpartition(":")[2]
    if extra:
        config["kv_connector_extra_config"] = extra
    flags = ["--enable-prompt-tokens-details"]  # in which a client sees what was cached
    blocks: list[str] = []
    if on_cpu:
        block = last(expanded(args), "--block-size") or CPU_BLOCK
        flags += ["--block-size", block]
        blocks.append(f"blocks of {block}")
    if connector == "shared-storage":
        flags.append(WHOLE)
    if (own := own_config(args)) is None:
        flags += [OWN, json.dumps(config)]
    else:
        said = ["--kv-transfer-config as given"]
        if MODULE in config and not own.get(MODULE):
            said.append(f'without "{MODULE}": "{OURS}" in it NIXL\'s thread takes a processor')
    said += blocks
    return Wiring(tuple(flags), more, ", ".join(said))


def class_of(connector: str, mode: str = "pull") -> str:
    """Name vLLM's class for a connector; the newest of its names where none is installed."""
    names = classes(connector, mode)
    return next((name for name in names if name in _factory()), names[0])


def classes(connector: str, mode: str = "pull") -> tuple[str, ...]:
    """Name vLLM's classes for a connector, any of which the other end understands."""
    return CLASSES["nixl push" if mode == "push" else connector]


def missing(connector: str, mode: str = "pull") -> str:
    """Name what a connector lacks here: vLLM's class, or its package; empty if nothing."""
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
    """Return the text of vLLM's list of connectors: to import it would take seconds."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        return ""
    file = Path(found.origin).parent / "distributed/kv_transfer/kv_connector/factory.py"
    return file.read_text() if file.is_file() else ""


def layout_of(args: Sequence[str], env: Mapping[str, str]) -> str:
    """Name the layout of a NIXL worker's KV cache; empty where it is no matter.

    NIXL has one of its own where none is set, and can be told to turn another round as it comes.
    """
    if (own_config(args) or {}).get("enable_permute_local_kv"):
        return ""
    said = env.get(LAYOUT) or USUAL_LAYOUT
    return LAYOUTS.get(said, said)


def own_config(args: Sequence[str]) -> dict[str, Any] | None:
    """Return the user's own --kv-transfer-config, whole or by keys; empty if it is no JSON object.

    One key is all of it to vLLM: what was written before it counts no more.
    """
    return fields(expanded(args), OWN)
