"""vLLM's NIXL connectors for CPU workers: the affinity is kept, and the progress thread sleeps.

`kv_connector_module_path` in `--kv-transfer-config` names this module. The classes keep vLLM's
names, because vLLM compares names elsewhere.

1. On a CPU, vLLM binds the computing thread of every worker to the last processor of the NUMA node.
   Here the thread keeps its affinity.
2. NIXL's progress thread polls without a pause, and takes a processor. A low priority does not
   help: the thread often holds UCX's spin lock, on which the computing thread then spins. Under
   SCHED_IDLE streams stopped for 1 to 4 s. Here the thread sleeps in `poll`; events wake it.
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

# The longest sleep, and the delay of a message without an event. An idle agent then uses 3 % of a
# processor.
PAUSE_US = 1000


@contextmanager
def keeping_processors() -> Iterator[None]:
    """Restore this thread's affinity at the end."""
    before = os.sched_getaffinity(0)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def sleeping_progress(bindings: Any, pause_us: int = PAUSE_US) -> Iterator[None]:
    """Have agents that are made here sleep between polls; NIXL's Python API has no setting."""
    plain = bindings.nixlAgentConfig

    class Sleeping(plain):  # type: ignore[misc,valid-type]
        """Settings of an agent with a fixed pause."""

        @property
        def pthrDelay(self) -> int:  # noqa: N802 - NIXL's name
            """Return the pause in microseconds."""
            return int(plain.pthrDelay.__get__(self))

        @pthrDelay.setter
        def pthrDelay(self, _: int) -> None:  # noqa: N802
            plain.pthrDelay.__set__(self, pause_us)

    bindings.nixlAgentConfig = Sleeping
    try:
        yield
    finally:
        bindings.nixlAgentConfig = plain


@contextmanager
def well_behaved() -> Iterator[None]:
    """Keep the affinity, and let the progress thread sleep if the installed NIXL supports it."""
    bindings = importlib.import_module("nixl._api").nixlBind
    if not hasattr(getattr(bindings, "nixlAgentConfig", None), "pthrDelay"):
        logger.warning(
            "this NIXL has no `pthrDelay` setting: its progress thread takes a whole processor"
        )
        with keeping_processors():
            yield
        return
    with keeping_processors(), sleeping_progress(bindings):
        yield


class NixlConnector(nixl.NixlConnector):
    """The pull connector: the decode worker reads."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        with well_behaved():
            super().__init__(vllm_config, role, kv_cache_config)


class NixlPushConnector(nixl.NixlPushConnector):
    """The push connector: the prefill worker writes."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        with well_behaved():
            super().__init__(vllm_config, role, kv_cache_config)
