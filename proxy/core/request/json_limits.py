"""Refuse JSON that blocks the event loop for too long.

Idea: bound the values. A number takes 30-70 ns (a prompt may have a million), a string 100, an
object 200, a new member name 300. Each MB of text adds 1.5-4 ms; escapes only 7, the worst text 12,
lenient parsing 15.

Four characters are counted, with strings included: too many at worst. Above a bound, strings are
excluded. Cost: 0.1 ms per MB and 10 ns per hit; without strings 2-6 ms per MB. A sample of 64 KB is
counted first, and suffices for most prompts.
"""

from __future__ import annotations

import random

LARGE_BODY_BYTES = 262_144  # shorter text stays below the bounds
MAX_VALUES = 1_100_000
MAX_NODES = 200_000
MAX_QUOTES = 2 * MAX_NODES
PIECE_BYTES = 65_536  # fits the CPU's cache
SAMPLE_BYTES = 512
# The place of each sample in its part of the text is random, so that clients cannot exploit it.
SAMPLE_PLACES = [random.random() for _ in range(128)]
SAMPLE_MARGIN = 2.0  # not counted: a text with a sample below 1/2 of a bound


class JsonMask:
    """A JSON text with escaped quotes blanked: each other quote begins or ends a string.

    Made on demand; that may take longer than parsing.
    """

    def __init__(self, text: bytes) -> None:
        self.text = text
        self._made: bytes | None = None

    @property
    def is_made(self) -> bool:
        return self._made is not None

    def get(self) -> bytes:
        """Return the masked text; positions are unchanged."""
        if self._made is None:
            self._made = masked(self.text)
        return self._made


def masked(text: bytes) -> bytes:
    """Blank escaped quotes, after escaped backslashes."""
    return text.replace(rb"\\", b"..").replace(rb"\"", b"..") if b"\\" in text else text


def may_exceed(body: bytes) -> bool:
    """Return whether a text with its strings exceeds a bound."""
    sample = _take_sample(body)
    scale = SAMPLE_MARGIN * len(body) / max(len(sample), 1)
    quotes, opened, commas = _count_signs(sample)
    if not _exceeded_bound(int(quotes * scale), int(opened * scale), int(commas * scale)):
        return False
    return bool(_exceeded_bound(*_count_signs(body)))


def _take_sample(text: bytes) -> bytes:
    part = len(text) / len(SAMPLE_PLACES)
    starts = [int((number + place) * part) for number, place in enumerate(SAMPLE_PLACES)]
    return b"".join([text[at : at + SAMPLE_BYTES] for at in starts])


def exceeded_bound(mask: JsonMask) -> str:
    """Return the bound that a JSON text exceeds, or ""."""
    plain = mask.get()
    quotes = count_up_to(plain, b'"', MAX_QUOTES)
    if quotes > MAX_QUOTES:
        return _exceeded_bound(quotes, 0, 0)
    _, opened, commas = _count_signs(b"".join(plain.split(b'"')[::2]))
    return _exceeded_bound(quotes, opened, commas)


def _exceeded_bound(quotes: int, opened: int, commas: int) -> str:
    nodes = (quotes + 1) // 2 + opened  # the count may stop inside a string
    if nodes > MAX_NODES:
        return f"{MAX_NODES:,} strings, lists and objects"
    if nodes + commas > MAX_VALUES:
        return f"{MAX_VALUES:,} values"
    return ""


def _count_signs(text: bytes) -> tuple[int, int, int]:
    """Count quotes, opening brackets and commas, until one of them exceeds its bound."""
    quotes = opened = commas = 0
    for at in range(0, len(text), PIECE_BYTES):
        piece = text[at : at + PIECE_BYTES]
        size = len(piece)
        quotes += size - len(piece.replace(b'"', b""))  # ten times as fast as count()
        opened += 2 * size - len(piece.replace(b"[", b"")) - len(piece.replace(b"{", b""))
        commas += size - len(piece.replace(b",", b""))
        if quotes > MAX_QUOTES or opened > MAX_NODES or commas > MAX_VALUES:
            break
    return quotes, opened, commas


def count_up_to(text: bytes, sign: bytes, limit: int) -> int:
    total = 0
    for at in range(0, len(text), PIECE_BYTES):
        piece = text[at : at + PIECE_BYTES]
        total += len(piece) - len(piece.replace(sign, b""))
        if total > limit:
            break
    return total
