"""Decoding of the journal's messages."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import pytest

from proxy.journal.messages import (
    MalformedMessageError,
    Position,
    decode_snapshot,
    decode_step,
    read_position,
)
from tests.proxy.journal.simulated_engine import SimulatedEngine, read_step

EMPTY: list[Any] = [[], [], False, [], [], [], [], [], [], [], []]
encode = msgspec.msgpack.encode


def test_messages_are_decoded() -> None:
    engine = SimulatedEngine(Random(1))
    for _ in range(50):
        payload = engine.step()
        assert decode_step(encode(payload)) == read_step(payload)


def test_values_of_later_versions_are_ignored() -> None:
    assert decode_step(encode([*EMPTY, [], "new"])) == decode_step(encode(EMPTY))


@pytest.mark.parametrize(
    ("index", "value"),
    [
        (0, [[1, "a"]]),
        (0, [[1, 2, 3]]),
        (0, [["1", "a", 3]]),
        (1, [[1, "name"]]),
        (2, 1),
        (3, [1, 0]),
        (4, [1]),
        (5, [1]),  # without a token
        (6, [1]),  # without a number
        (7, [1]),
        (7, [-1]),
        (7, [1 << 32]),
        (7, [1.5]),
        (9, [[1]]),
        (10, [None]),
        (10, {}),
    ],
)
def test_wrong_values_are_refused(index: int, value: object) -> None:
    payload = [*EMPTY]
    payload[index] = value
    with pytest.raises(MalformedMessageError, match="step: "):
        decode_step(encode(payload))


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\xff" * 100, encode([]), encode({}), b"\x99"])
def test_other_bytes_are_refused(payload: bytes) -> None:
    with pytest.raises(MalformedMessageError):
        decode_step(payload)
    with pytest.raises(MalformedMessageError):
        decode_snapshot(payload)


def test_counts_must_match_the_tokens() -> None:
    good = [[], [], False, [], [], [1, 2], [2, 1], [7, 8, 9], [], [], []]
    assert decode_step(encode(good)).tokens == [7, 8, 9]
    for counts in ([2, 2], [3], [3, 0, 0]):
        with pytest.raises(MalformedMessageError):
            decode_step(encode([*good[:6], counts, *good[7:]]))


def test_position() -> None:
    assert read_position(b"abcdefgh" + (258).to_bytes(8, "big")) == Position(b"abcdefgh", 258)
    with pytest.raises(MalformedMessageError, match="15 bytes"):
        read_position(bytes(15))
