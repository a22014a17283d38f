"""vLLM's KV connectors: their classes, packages, settings, and the user's own configuration."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_sched.workers.flags import json_object, with_config_file

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
ROLES: Mapping[str, str] = {"prefill": "kv_producer", "decode": "kv_consumer"}
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
# How long a prefill worker keeps unread blocks: LEASE_FACTOR times the router's lease, if any,
# because vLLM reads blocks even after their lease.
DEFAULT_LEASE_S, LEASE_FACTOR = 60, 2.0

CONFIG_FLAG, FAILURE_KEY = "--kv-transfer-config", "kv_load_failure_policy"
# Several connectors in one worker. vLLM loads a prompt from the first that has any of its blocks.
SEVERAL, PARTS_KEY, EXTRA_KEY = "MultiConnector", "connectors", "kv_connector_extra_config"
OFFLOADING, OFFLOADING_FLAG = "OffloadingConnector", "--kv-offloading-size"
# What that flag sets as the connector, in place of any other.
SET_BY_OFFLOADING = (None, OFFLOADING, "SimpleCPUOffloadConnector", "LMCacheMPConnector")


def connector_parts(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the configurations of a worker's connectors; none if they are not in a list."""
    if config.get("kv_connector") != SEVERAL:
        return [config]
    extra = config.get(EXTRA_KEY)
    parts = extra.get(PARTS_KEY) if isinstance(extra, dict) else None
    return [part for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []


def connector_class(connector: str, mode: str = "pull") -> str:
    """Return vLLM's class for a connector; its newest name if none is installed."""
    names = connector_classes(connector, mode)
    return next((name for name in names if name in _factory_source()), names[0])


def connector_classes(connector: str, mode: str = "pull") -> tuple[str, ...]:
    """Return vLLM's classes for a connector, all compatible with each other."""
    return CLASSES["nixl push" if mode == "push" else connector]


def missing_requirement(connector: str, mode: str = "pull") -> str:
    """Return the vLLM class or package that a connector lacks here, or an empty text.

    Without vLLM nothing is missing: the start of a worker reports that.
    """
    if not (known_classes := _factory_source()):
        return ""
    if f'"{connector_class(connector, mode)}"' not in known_classes:
        return f"the vLLM installed here has no {connector_class(connector, mode)}"
    packages = PACKAGES.get(connector, ())
    if packages and not any(map(_importable, packages)):
        return f"the package {packages[0]} is not installed here"
    return ""


def _importable(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


@functools.cache
def _factory_source() -> str:
    """Return the source of vLLM's connector registry, because importing it takes seconds."""
    vllm = importlib.util.find_spec("vllm")
    if vllm is None or vllm.origin is None:
        return ""
    file = Path(vllm.origin).parent / "distributed/kv_transfer/kv_connector/factory.py"
    return file.read_text() if file.is_file() else ""


def kv_layout(args: Sequence[str], env: Mapping[str, str]) -> str:
    """Return the KV cache layout of a NIXL worker; empty if the worker can convert layouts.

    NIXL has a default layout of its own.
    """
    parts = connector_parts(user_config(args) or {})
    if any(part.get("enable_permute_local_kv") for part in parts):
        return ""
    layout = env.get(LAYOUT) or USUAL_LAYOUT
    return LAYOUTS.get(layout, layout)


def user_config(args: Sequence[str]) -> dict[str, Any] | None:
    """Return the user's --kv-transfer-config, whole or by keys; empty if it is not a JSON object.

    To vLLM, a single key replaces all that was written before it.
    """
    return json_object(with_config_file(args), CONFIG_FLAG)
