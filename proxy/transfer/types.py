"""The protocol between a hand-over and whatever moves its KV cache.

A hand-over is one request in two legs: the prefill leg, whose answer says where the KV cache lies,
and the decode leg, which is told. Pure data in, data out: a connector reads and writes members of
bodies, and sends nothing itself.
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
# What no worker serves: a request for it is refused before it is scheduled, and the refusal has the
# decode worker tell the prefill worker that nobody will come for its blocks.
NO_MODEL = "vllm-sched:release"
CACHED, READ = "cached_tokens", "cache_read_input_tokens"
APART = (READ, "cache_creation_input_tokens")
MOST = 2.0**53  # beyond it no float is a count
LEASE_USED = 0.8  # of the time for which blocks are kept: what comes later may read others' blocks


class Side(NamedTuple):
    """A worker at one end of a transfer."""

    name: str
    host: str  # of its URL


class Pair(NamedTuple):
    """Two workers, and the id of one hand-over between them, which no other ever has."""

    prefill: Side
    decode: Side
    id: str


class PrefillResult(NamedTuple):
    """What a prefill worker's answer leaves to the decode leg, for one use only."""

    params: bytes | None = None  # JSON text; None: there is nothing to be fetched
    cached_tokens: int | None = None  # for the client's usage, where the decode worker can't know


class Connector:
    """One way of moving KV caches."""

    name: ClassVar[str]
    needs_params: ClassVar[bool] = True  # whether without parameters there is nothing to fetch
    connects: ClassVar[bool] = True  # whether two workers shake hands before their first transfer
    # Whether by its parameters vLLM knows that a prefill leg is one, and what it then lets pass.
    is_marked: ClassVar[bool] = False
    names_decode: ClassVar[bool] = False  # whether a prefill is told which decode worker comes
    usual_lease_s: ClassVar[float] = inf  # for which a prefill worker keeps what nobody fetches

    def __init__(self, config: TransferConfig) -> None:
        self.config = config
        self.lease_s = config.lease_s or self.usual_lease_s

    @property
    def within_s(self) -> float:
        """The time within which a decode worker must have fetched what a prefill left behind."""
        return LEASE_USED * self.lease_s

    def prefill(self, pair: Pair) -> Fields:  # noqa: ARG002
        """Name the members that a prefill leg carries beside one output token and no stream."""
        return NOTHING

    def take(self, pair: Pair, answer: Mapping[str, Any]) -> PrefillResult:  # noqa: ARG002
        """Read what a prefill leg's answer leaves to the decode leg."""
        return PrefillResult(None, cached_tokens_in(answer))

    def taken(self, pair: Pair, answer: Mapping[str, Any]) -> PrefillResult:
        """Take it, or nothing where it makes no sense: JSON is read deeper than it is written."""
        try:
            return self.take(pair, answer)
        except (TypeError, ValueError):
            return PrefillResult()

    def decode(self, pair: Pair, taken: PrefillResult) -> Fields:  # noqa: ARG002
        """Name the members that a decode leg carries."""
        return NOTHING if taken.params is None else {PARAMS: taken.params}

    def request_id(self, pair: Pair) -> bytes | None:  # noqa: ARG002
        """Return the X-Request-Id that both legs must have; None: the client's, or any."""
        return None

    def doubt(self, pair: Pair, taken: PrefillResult) -> str:  # noqa: ARG002
        """Say what in these can't be right between two workers, and what to do; empty if nothing.

        Asked once per pair: a decode worker that finds nobody may compute the prompt itself, and
        then its answer tells nothing.
        """
        return ""

    def release(self, taken: PrefillResult) -> bytes | None:
        """Write a request to /v1/completions of a decode worker that frees what nobody fetches."""
        if taken.params is None:
            return None
        return b'{"model":"%b","prompt":[0],"max_tokens":1,"%b":%b}' % (
            NO_MODEL.encode(),
            PARAMS.encode(),
            taken.params,
        )


def usage_of(answer: Mapping[str, Any]) -> Usage | None:
    """Read what a prefill worker says it computed; None where it doesn't say.

    Anthropic's `input_tokens` leave out what was cached, which is told beside them; Cohere's are
    within `tokens`.
    """
    usage = _object(answer.get("usage"))
    prompt = _number(usage.get("prompt_tokens"))
    if not prompt and (prompt := _number(usage.get("input_tokens"))) is not None:
        prompt += sum(_number(usage.get(name)) or 0 for name in APART)
    if prompt is None:
        prompt = _number(_object(usage.get("tokens")).get("input_tokens"))
    return None if prompt is None else Usage(prompt, 1, cached_tokens_in(answer) or 0)


def cached_tokens_in(answer: Mapping[str, Any]) -> int | None:
    """Read how much of the prompt a worker says it had cached; None where it doesn't say."""
    usage = _object(answer.get("usage"))
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    if details is not None:
        return _number(_object(details).get(CACHED))
    cached = usage.get(CACHED)
    return _number(usage.get(READ) if cached is None else cached)


def _object(value: object) -> dict[str, Any]:
    return value if type(value) is dict else {}


def _number(value: object) -> int | None:
    """Read a count of tokens, which Cohere's API writes as 5.0."""
    if type(value) is float and value.is_integer() and abs(value) < MOST:
        return int(value)
    return value if type(value) is int else None


def params_of(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return an answer's transfer parameters; none where it has none."""
    params = answer.get(PARAMS)
    return params if type(params) is dict else {}


def text(params: Mapping[str, Any]) -> bytes:
    """Write parameters as JSON."""
    return orjson.dumps(params)
