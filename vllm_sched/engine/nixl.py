"""vLLM's NIXL connectors, without two habits that cost a CPU worker its processor.

Named in `--kv-transfer-config` by `kv_connector_module_path`, vLLM's own way to say whose class a
connector is. The classes keep vLLM's names, by which vLLM knows elsewhere what it deals with.

1. On a CPU, vLLM binds the thread that makes the connector, which is the one that computes, to the
   last processor of each NUMA node: all workers of a machine then compute on that one, wherever
   they were bound. Here the thread keeps the processors it had.
2. NIXL's progress thread polls without a pause: a whole processor, idle or not. A low priority is
   no cure. Most of the time it holds UCX's spin lock, and the thread that computes then spins on
   that until the kernel lets the other one go on: under SCHED_IDLE all streams of the worker stood
   still for 1 to 4 s, rarely, at a hand-over. Here it sleeps in `poll`, and events wake it.
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

# The longest sleep: what a message takes that comes with no event. An idle agent then uses 3 % of a
# processor.
PAUSE_US = 1000


@contextmanager
def keeping_processors() -> Iterator[None]:
    """Give this thread the processors back that it had."""
    before = os.sched_getaffinity(0)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def sleeping_progress(bindings: Any, pause_us: int = PAUSE_US) -> Iterator[None]:
    """Have agents made here sleep between two polls; NIXL's Python side knows no setting for it."""
    plain = bindings.nixlAgentConfig

    class Sleeping(plain):  # type: ignore[misc,valid-type]
        """The settings of an agent, whose one wish for no pause is not heard."""

        @property
        def pthrDelay(self) -> int:  # noqa: N802 - NIXL's name
            """The pause in microseconds."""
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
    """Both, as far as the NIXL that is installed can be told."""
    bindings = importlib.import_module("nixl._api").nixlBind
    if not hasattr(getattr(bindings, "nixlAgentConfig", None), "pthrDelay"):
        logger.warning("This NIXL has no pause to set: its progress thread takes a processor")
        with keeping_processors():
            yield
        return
    with keeping_processors(), sleeping_progress(bindings):
        yield


class NixlConnector(nixl.NixlConnector):
    """Pulls: the decode worker reads."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        with well_behaved():
            super().__init__(vllm_config, role, kv_cache_config)


class NixlPushConnector(nixl.NixlPushConnector):
    """Pushes: the prefill worker writes."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        with well_behaved():
            super().__init__(vllm_config, role, kv_cache_config)
