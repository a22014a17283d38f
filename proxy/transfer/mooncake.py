"""Mooncake: the decode worker reads the prefill worker's memory by an id that the router makes up.

The prefill's answer says nothing. The decode leg names the engine that holds the blocks and the
bootstrap server where that is found: the prefill worker has to be started with an `engine_id` that
is its name in the fleet file, as `up` starts it, and listens on its own host, port 8998 unless
`transfer.addresses` says where. Its blocks are kept only if the prefill ends because of its length:
`min_tokens` bars the end of the sequence from being the first token.
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
    text,
)

PORT = 8998


class Mooncake(Connector):
    """See the module's text."""

    name = "mooncake"
    is_marked = True

    def prefill(self, pair: Pair) -> Fields:
        """Have the blocks kept under an id."""
        params = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "transfer_id": pair.id,
        }
        return {PARAMS: text(params), "min_tokens": b"1"}

    def take(self, pair: Pair, answer: Mapping[str, Any]) -> PrefillResult:
        """Say where they are."""
        side = pair.prefill
        host = f"[{side.host}]" if ":" in side.host else side.host
        params = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_bootstrap_addr": self.config.addresses.get(side.name, f"http://{host}:{PORT}"),
            "remote_engine_id": side.name,
            "transfer_id": pair.id,
        }
        return PrefillResult(text(params), cached_tokens_in(answer))
