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
from operator import itemgetter
from typing import Any

import orjson

from proxy.transfer.types import (
    PARAMS,
    Connector,
    Fields,
    Pair,
    PrefillResult,
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
NEEDED = frozenset(["remote_engine_id", "remote_request_id", "remote_host", "remote_port"])
needed = itemgetter(*NEEDED)
SIZE, USUAL_SIZE = "tp_size", 1  # which a decode worker that pulls takes for this, if it is missing
HERE = frozenset(["localhost", "127.0.0.1", "::1"])
CACHED = "remote_prefill_cached_tokens"  # for the decode worker's usage, from vLLM 0.32 on


class Nixl(Connector):
    """See the module's text."""

    name = "nixl"
    is_marked = True
    usual_lease_s = 30.0

    def prefill(self, pair: Pair) -> Fields:  # noqa: ARG002
        """Ask for the blocks to be kept."""
        return PREFILL

    def request_id(self, pair: Pair) -> bytes | None:
        """Make the id up where it decides whose blocks go where."""
        return pair.id.encode() if self.config.mode == "push" else None

    def release(self, taken: PrefillResult) -> bytes | None:
        """Have pulled blocks freed."""
        return None if self.config.mode == "push" else super().release(taken)

    def doubt(self, pair: Pair, taken: PrefillResult) -> str:
        """Doubt an address at which the decode worker would find itself: vLLM's default."""
        host = orjson.loads(taken.params or b"{}").get("remote_host")
        first, second = pair.prefill, pair.decode
        if (
            type(host) is not str
            or host not in HERE
            or first.host in HERE
            or first.host == second.host
        ):
            return ""
        return (
            f"says that its blocks are at {host}, where {second.name} finds only itself; start it "
            f"with VLLM_NIXL_SIDE_CHANNEL_HOST={first.host}"
        )

    def take(self, pair: Pair, answer: Mapping[str, Any]) -> PrefillResult:  # noqa: ARG002
        """Take all parameters as they are."""
        params = params_of(answer)
        if not _are_whole(params, pushed=self.config.mode == "push"):
            return PrefillResult(None, cached_tokens_in(answer))
        knows = type(params.get(CACHED)) is int
        return PrefillResult(text(params), None if knows else cached_tokens_in(answer))


def _are_whole(params: dict[str, Any], *, pushed: bool) -> bool:
    """Whether a decode worker survives them."""
    if not params.get("do_remote_prefill") or not params.keys() >= NEEDED:
        return False
    if params.get(SIZE, None if pushed else USUAL_SIZE) is None:
        return False
    blocks = params.get("remote_block_ids")
    return type(blocks) is list and any(blocks) and None not in needed(params)
