"""The interface between a hand-over and a KV connector.

The prefill leg's response has the location of the KV cache, and the decode leg carries it. A
connector reads and writes fields of bodies; it does no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any, ClassVar, NamedTuple

import orjson

from proxy.config import TransferConfig
from proxy.core.model.types import Usage

Fields = Mapping[str, bytes | None]
PARAMS = "kv_transfer_params"
NOTHING: Fields = {}
# No worker serves this model. A decode worker refuses the request before scheduling, then has the
# blocks released.
NO_MODEL = "vllm-sched:release"
CACHED, READ = "cached_tokens", "cache_read_input_tokens"
UNCOUNTED = (READ, "cache_creation_input_tokens")
MAX_COUNT = 2.0**53  # larger floats are not exact
LEASE_USED = 0.8  # share of the lease; a later read could get blocks of another request


class Side(NamedTuple):
    """A worker at one end of a transfer."""

    name: str
    host: str  # from the worker's URL


class Pair(NamedTuple):
    """The workers and the unique id of a hand-over."""

    prefill: Side
    decode: Side
    id: str


class PrefillResult(NamedTuple):
    """Data for one decode leg, from the prefill worker's response."""

    params: bytes | None = None  # JSON; None: no blocks to fetch
    cached_tokens: int | None = None  # for usage, if the decode worker can't know it


class Connector:
    name: ClassVar[str]
    needs_params: ClassVar[bool] = True  # no parameters means no blocks
    connects: ClassVar[bool] = True  # a first transfer needs a handshake
    # vLLM recognises a prefill leg by its parameters and relaxes validation.
    is_marked: ClassVar[bool] = False
    names_decode: ClassVar[bool] = False  # the prefill leg names the decode worker
    usual_lease_s: ClassVar[float] = inf  # the prefill worker's default lease

    def __init__(self, config: TransferConfig) -> None:
        self.config = config
        self.lease_s = config.lease_s or self.usual_lease_s

    @property
    def read_within_s(self) -> float:
        """Seconds within which a decode worker must have read the blocks."""
        return LEASE_USED * self.lease_s

    def prefill(self, pair: Pair) -> Fields:  # noqa: ARG002
        """Return the prefill leg's fields, besides the output limit and `stream`."""
        return NOTHING

    def result_of(self, pair: Pair, response: Mapping[str, Any]) -> PrefillResult:  # noqa: ARG002
        return PrefillResult(cached_tokens=cached_tokens_in(response))

    def valid_result(self, pair: Pair, response: Mapping[str, Any]) -> PrefillResult:
        """Return the result of `result_of`, or an empty result for an invalid response."""
        try:  # orjson parses deeper nesting than it serialises
            return self.result_of(pair, response)
        except (TypeError, ValueError):
            return PrefillResult()

    def decode(self, pair: Pair, result: PrefillResult) -> Fields:  # noqa: ARG002
        return NOTHING if result.params is None else {PARAMS: result.params}

    def request_id(self, pair: Pair) -> bytes | None:  # noqa: ARG002
        """Return the X-Request-Id that both legs must have; None if any id will do."""
        return None

    def warning(self, pair: Pair, result: PrefillResult) -> str:  # noqa: ARG002
        """Return what is wrong with the parameters and the remedy; empty if nothing is.

        Checked once per pair: a decode worker that can't reach the prefill worker may compute the
        prompt itself without an error.
        """
        return ""

    def release(self, result: PrefillResult) -> bytes | None:
        """Return a /v1/completions body that has a decode worker release the blocks, or None."""
        if result.params is None:
            return None
        return b'{"model":"%b","prompt":[0],"max_tokens":1,"%b":%b}' % (
            NO_MODEL.encode(),
            PARAMS.encode(),
            result.params,
        )


def usage_of(response: Mapping[str, Any]) -> Usage | None:
    """Return the usage in a prefill worker's response; None if there is none.

    Anthropic's `input_tokens` exclude cached tokens. Cohere's counts are in `tokens`.
    """
    usage = _object(response.get("usage"))
    prompt = _number(usage.get("prompt_tokens"))
    if not prompt and (prompt := _number(usage.get("input_tokens"))) is not None:
        prompt += sum(_number(usage.get(name)) or 0 for name in UNCOUNTED)
    if prompt is None:
        prompt = _number(_object(usage.get("tokens")).get("input_tokens"))
    return None if prompt is None else Usage(prompt, 1, cached_tokens_in(response) or 0)


def cached_tokens_in(response: Mapping[str, Any]) -> int | None:
    usage = _object(response.get("usage"))
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    if details is not None:
        return _number(_object(details).get(CACHED))
    cached = usage.get(CACHED)
    return _number(usage.get(READ) if cached is None else cached)


def _object(value: object) -> dict[str, Any]:
    return value if type(value) is dict else {}


def _number(value: object) -> int | None:
    """Return a count of tokens. Cohere's API writes counts as floats."""
    if type(value) is float and value.is_integer() and abs(value) < MAX_COUNT:
        return int(value)
    return value if type(value) is int else None


def params_of(response: Mapping[str, Any]) -> dict[str, Any]:
    params = response.get(PARAMS)
    return params if type(params) is dict else {}


def json_bytes(params: Mapping[str, Any]) -> bytes:
    return orjson.dumps(params)
