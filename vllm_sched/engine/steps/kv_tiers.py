"""The tokens of a waiting request that KV connectors can load.

vLLM asks a connector when a request is about to start. Policies ask earlier and more often, so only
connectors that it does not change are asked. A question to LMCache, Mooncake's store, HF3FS or
FlexKV counts blocks, starts a load or asks another process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from vllm.v1.request import Request

Lookup = Callable[[Request, int], int]  # tokens beyond the computed ones

# Connectors of other projects may set this attribute of their class.
REPEATABLE: Final = "repeatable_lookup"
SIMPLE_OFFLOAD: Final = "SimpleCPUOffloadConnector"
TIERS: Final = frozenset(["OffloadingConnector", "ExampleConnector", SIMPLE_OFFLOAD])


class KvTiers:
    """Look-ups in the tiers behind the GPU cache, without side effects."""

    def __init__(self, connector: Any) -> None:
        parts = () if connector is None else getattr(connector, "sub_connectors", (connector,))
        lookups = [lookup_of(part) for part in parts]
        self._lookups = [lookup for lookup in lookups if lookup is not None]
        self._hands_over = not all(is_tier(part) for part in parts)

    @property
    def have_lookups(self) -> bool:
        return bool(self._lookups)

    def is_handed_over(self, request: Request) -> bool:
        """Return whether the whole prompt comes from a prefill worker."""
        # A client may set this field without such a connector.
        params = request.kv_transfer_params if self._hands_over else None
        return isinstance(params, dict) and bool(params.get("do_remote_prefill"))

    def loadable_tokens(self, request: Request, computed: int) -> int:
        """Return the tokens beyond `computed` that the first connector with any can load."""
        # A preempted request may still have blocks in transfer.
        if not request.num_preemptions:
            for lookup in self._lookups:
                if (tokens := lookup(request, computed)) > 0:
                    return tokens
        return 0


def is_tier(connector: Any) -> bool:
    names = {kind.__name__ for kind in type(connector).__mro__}
    return bool(names & TIERS) or bool(getattr(connector, REPEATABLE, False))


def lookup_of(connector: Any) -> Lookup | None:
    """Return the look-up of a connector; None if it must not be asked."""
    names = {kind.__name__ for kind in type(connector).__mro__}
    if SIMPLE_OFFLOAD in names:
        return simple_offload_lookup(connector)
    if not is_tier(connector):
        return None
    manager = getattr(getattr(connector, "connector_scheduler", None), "manager", None)
    if getattr(manager, "secondary_tiers", None):  # a question would load from these
        return None

    def lookup(request: Request, computed: int) -> int:
        # None: the connector does not know yet.
        return connector.get_num_new_matched_tokens(request, computed)[0] or 0

    return lookup


def simple_offload_lookup(connector: Any) -> Lookup:
    """Return a look-up in the connector's cache; a question would pin the blocks."""
    manager = connector.scheduler_manager

    def lookup(request: Request, computed: int) -> int:
        if manager is None:  # without prefix caching
            return 0
        hashes = request.block_hashes[computed // manager.hash_block_size :]
        max_tokens = request.num_tokens - 1 - computed
        if not hashes or max_tokens <= 0 or computed % manager.block_size:
            return 0
        return int(manager.cpu_coordinator.find_longest_cache_hit(hashes, max_tokens)[1])

    return lookup
