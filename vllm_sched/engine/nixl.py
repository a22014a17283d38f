"""vLLM's NIXL connectors for CPU workers: the affinity is kept, and the progress thread sleeps.

`kv_connector_module_path` in `--kv-transfer-config` names this module. vLLM compares the classes'
names elsewhere, so they are vLLM's.

1. On a CPU, vLLM binds the computing thread of every worker to the last processor of the NUMA node.
2. NIXL's progress thread polls without a pause. A low priority does not help: the thread often
   holds UCX's spin lock, on which the computing thread spins (under SCHED_IDLE for 1 to 4 s). Here
   it sleeps in `poll`, and events wake it.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import nixl
from vllm.logger import init_logger

logger = init_logger(__name__)

# Longest delay of a message without an event. Idle cost: 3 % of a processor.
POLL_PAUSE_US = 1000


@contextmanager
def keep_affinity() -> Iterator[None]:
    before = os.sched_getaffinity(0)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def limit_polling(bindings: Any, pause_us: int = POLL_PAUSE_US) -> Iterator[None]:
    """Make new agents sleep between polls, which NIXL's Python API cannot set."""
    config_class = bindings.nixlAgentConfig

    class SleepingConfig(config_class):  # type: ignore[misc,valid-type]
        @property
        def pthrDelay(self) -> int:  # noqa: N802 - NIXL's name
            return int(config_class.pthrDelay.__get__(self))

        @pthrDelay.setter
        def pthrDelay(self, _: int) -> None:  # noqa: N802
            config_class.pthrDelay.__set__(self, pause_us)

    bindings.nixlAgentConfig = SleepingConfig
    try:
        yield
    finally:
        bindings.nixlAgentConfig = config_class


@contextmanager
def with_cpu_settings() -> Iterator[None]:
    """Apply the settings that the installed NIXL supports."""
    bindings = importlib.import_module("nixl._api").nixlBind
    if not hasattr(getattr(bindings, "nixlAgentConfig", None), "pthrDelay"):
        logger.warning(
            "this NIXL has no `pthrDelay` setting: its progress thread takes a whole processor"
        )
        with keep_affinity():
            yield
        return
    with keep_affinity(), limit_polling(bindings):
        yield


class NixlConnector(nixl.NixlConnector):
    """The pull connector: the decode worker reads."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        with with_cpu_settings():
            super().__init__(vllm_config, role, kv_cache_config)


class NixlPushConnector(nixl.NixlPushConnector):
    """The push connector: the prefill worker writes."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        with with_cpu_settings():
            super().__init__(vllm_config, role, kv_cache_config)
