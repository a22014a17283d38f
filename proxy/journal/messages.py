"""The messages of an engine's journal, with their types checked."""

from __future__ import annotations

from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec import Meta

from proxy.errors import ProxyError

RUN_BYTES: Final = 8
POSITION_BYTES: Final = 16

Number = Annotated[int, Meta(ge=0)]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 32)]


class MalformedMessageError(ProxyError):
    """A message that does not follow the protocol."""


class Position(NamedTuple):
    """The engine's run, and the message's number in it."""

    run: bytes
    number: int


class ArrivedRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    number: Number
    id: str
    prompt_tokens: Number


class NamedRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    number: Number
    name: bytes


class EndedRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    number: Number
    reason: str


class JournalStep(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What happened in one step of the engine."""

    arrived: list[ArrivedRequest]
    named: list[NamedRequest]
    cleared: bool
    evicted: list[Number]  # number, first and last token of each range
    resident: list[Number]  # number and tokens of each request
    numbers: list[Number]
    counts: list[Number]
    tokens: list[TokenId]
    preempted: list[Number]
    ended: list[EndedRequest]
    forgotten: list[Number]
    found: list[Number] = []  # number of each request that started, and cached tokens

    def __post_init__(self) -> None:
        if len(self.evicted) % 3 or len(self.resident) % 2 or len(self.found) % 2:
            raise ValueError("`evicted` has no threes, or `resident` or `found` no pairs")
        if self.counts and len(self.counts) != len(self.numbers):
            raise ValueError("`counts` and `numbers` differ in length")
        if (sum(self.counts) if self.counts else len(self.numbers)) != len(self.tokens):
            raise ValueError("`tokens` does not have the tokens of `counts`")


class SnapshotRow(msgspec.Struct, array_like=True, frozen=True, gc=False):
    number: Number
    id: str
    prompt_tokens: Number
    name: bytes
    resident: Number
    running: bool
    tokens: list[TokenId]


class JournalSnapshot(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """All requests that the engine knows; `decode_row` reads a request."""

    block_tokens: Number
    requests: list[msgspec.Raw]


_NAMES: Final = msgspec.msgpack.Encoder()
_STEPS: Final = msgspec.msgpack.Decoder(JournalStep)
_SNAPSHOTS: Final = msgspec.msgpack.Decoder(JournalSnapshot)
_ROWS: Final = msgspec.msgpack.Decoder(SnapshotRow)


def read_position(frame: bytes) -> Position:
    if len(frame) != POSITION_BYTES:
        raise MalformedMessageError(f"the position has {len(frame)} bytes, not {POSITION_BYTES}")
    return Position(frame[:RUN_BYTES], int.from_bytes(frame[RUN_BYTES:], "big"))


def encode_name(request_id: str, name: bytes) -> bytes:
    return _NAMES.encode((request_id, name))


def decode_step(payload: bytes) -> JournalStep:
    try:
        return _STEPS.decode(payload)
    except msgspec.DecodeError as error:
        raise MalformedMessageError(f"step: {error}") from None


def decode_snapshot(payload: bytes) -> JournalSnapshot:
    try:
        return _SNAPSHOTS.decode(payload)
    except msgspec.DecodeError as error:
        raise MalformedMessageError(f"snapshot: {error}") from None


def decode_row(row: msgspec.Raw) -> SnapshotRow:
    try:
        return _ROWS.decode(row)
    except msgspec.DecodeError as error:
        raise MalformedMessageError(f"request in a snapshot: {error}") from None
