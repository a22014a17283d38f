"""NIXL: the decode worker reads the prefill worker's blocks (pull), or is written to (push).

The prefill's answer says where the blocks lie; the decode leg is given that as it is. Blocks are
held for 30 s, or until the decode worker has fetched them or was refused.

Pushed, the two sides know each other by the request's id: whoever has it is written to. So it is
one of ours, not the client's, who might send another's. Nothing frees what is not fetched then.

What lacks a part is not passed on: a decode worker's engine dies of parameters that name fewer
blocks than it needs. Without any it computes the prompt itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proxy.transfer.types import (
    PARAMS,
    Connector,
    Fields,
    Pair,
    Taken,
    cached_tokens_in,
    params_of,
    text,
)

PREFILL: Fields = {
    PARAMS: text(
        {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }
    )
}
NEEDED = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port", "tp_size")
CACHED = "remote_prefill_cached_tokens"  # for the decode worker's usage, from vLLM 0.32 on


class Nixl(Connector):
    """See the module's text."""

    name = "nixl"

    def prefill(self, pair: Pair) -> Fields:  # noqa: ARG002
        """Ask for the blocks to be kept."""
        return PREFILL

    def request_id(self, pair: Pair) -> bytes | None:
        """Make the id up where it decides whose blocks go where."""
        return pair.id.encode() if self.config.mode == "push" else None

    def release(self, taken: Taken) -> bytes | None:
        """Have pulled blocks freed."""
        return None if self.config.mode == "push" else super().release(taken)

    def take(self, pair: Pair, answer: Mapping[str, Any]) -> Taken:  # noqa: ARG002
        """Take all parameters as they are."""
        params, cached = params_of(answer), cached_tokens_in(answer)
        if not params.get("do_remote_prefill") or any(params.get(key) is None for key in NEEDED):
            return Taken(None, cached)
        blocks = params.get("remote_block_ids")
        if type(blocks) is not list or not blocks or not any(blocks):
            return Taken(None, cached)
        return Taken(text(params), None if type(params.get(CACHED)) is int else cached)
