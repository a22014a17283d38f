"""NIXL: the decode worker reads the prefill worker's blocks (pull), or receives them (push).

The prefill worker's response has the location of the blocks. The prefill worker holds them for 30 s
by default, or until they are read or released.

In push mode, the prefill worker writes to the decode worker with the same request id, which the
router generates. Pushed blocks can't be released.

Incomplete parameters are dropped: a decode worker's engine crashes if they name too few blocks.
Without parameters the decode worker computes the prompt itself.
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
    json_bytes,
    params_of,
)

PREFILL: Fields = {
    PARAMS: json_bytes(
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
SIZE, USUAL_SIZE = "tp_size", 1  # a decode worker in pull mode assumes 1 if tp_size is missing
LOOPBACK = frozenset(["localhost", "127.0.0.1", "::1"])
CACHED = "remote_prefill_cached_tokens"  # reported in the decode worker's usage since vLLM 0.32


class Nixl(Connector):
    name = "nixl"
    is_marked = True
    usual_lease_s = 30.0

    def prefill(self, pair: Pair) -> Fields:  # noqa: ARG002
        return PREFILL

    def request_id(self, pair: Pair) -> bytes | None:
        """Return the hand-over's id in push mode."""
        return pair.id.encode() if self.config.mode == "push" else None

    def release(self, result: PrefillResult) -> bytes | None:
        """Return the release request; None in push mode."""
        return None if self.config.mode == "push" else super().release(result)

    def warning(self, pair: Pair, result: PrefillResult) -> str:
        """Return a warning if the blocks are at another host's loopback address."""
        host = orjson.loads(result.params or b"{}").get("remote_host")
        first, second = pair.prefill, pair.decode
        if (
            type(host) is not str
            or host not in LOOPBACK
            or first.host in LOOPBACK
            or first.host == second.host
        ):
            return ""
        return (
            f"announces its blocks at {host}, which {second.name} resolves to itself; start it "
            f"with VLLM_NIXL_SIDE_CHANNEL_HOST={first.host}"
        )

    def result_of(self, pair: Pair, response: Mapping[str, Any]) -> PrefillResult:  # noqa: ARG002
        """Return the response's parameters unchanged, if they are complete."""
        params = params_of(response)
        if not _are_whole(params, pushed=self.config.mode == "push"):
            return PrefillResult(cached_tokens=cached_tokens_in(response))
        reported = type(params.get(CACHED)) is int
        return PrefillResult(json_bytes(params), None if reported else cached_tokens_in(response))


def _are_whole(params: dict[str, Any], *, pushed: bool) -> bool:
    if not params.get("do_remote_prefill") or not params.keys() >= NEEDED:
        return False
    if params.get(SIZE, None if pushed else USUAL_SIZE) is None:
        return False
    blocks = params.get("remote_block_ids")
    return type(blocks) is list and any(blocks) and None not in needed(params)
