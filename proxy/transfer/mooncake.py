"""Mooncake: the decode worker reads the prefill worker's blocks by an id that the router generates.

The decode leg names the engine that holds the blocks and its bootstrap server:

- The prefill worker's `engine_id` must be its name in the fleet file; `up` sets it.
- The bootstrap server is at the worker's host, port 8998, unless `transfer.addresses` names it.

Mooncake keeps the blocks only if the prefill ends at its length limit, so `min_tokens` forbids an
end of sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proxy.transfer.types import (
    PARAMS,
    Connector,
    Fields,
    Pair,
    PrefillResult,
    cached_tokens_in,
    json_bytes,
)

BOOTSTRAP_PORT = 8998


class Mooncake(Connector):
    name = "mooncake"
    is_marked = True

    def prefill(self, pair: Pair) -> Fields:
        """Return the parameters that keep the blocks under the hand-over's id."""
        params = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "transfer_id": pair.id,
        }
        return {PARAMS: json_bytes(params), "min_tokens": b"1"}

    def result_of(self, pair: Pair, response: Mapping[str, Any]) -> PrefillResult:
        """Return the location of the blocks, which does not depend on the response."""
        side = pair.prefill
        host = f"[{side.host}]" if ":" in side.host else side.host
        params = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_bootstrap_addr": self.config.addresses.get(
                side.name, f"http://{host}:{BOOTSTRAP_PORT}"
            ),
            "remote_engine_id": side.name,
            "transfer_id": pair.id,
        }
        return PrefillResult(json_bytes(params), cached_tokens_in(response))
