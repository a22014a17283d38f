"""Prebuilt chat requests: the same for every router, each one different."""

from __future__ import annotations

import functools
import itertools
import json
import random
from dataclasses import dataclass

from benchmarks.router.mock import MODEL

# About what OpenAI's client sends. One Host, so that all routers get the same bytes.
HEAD = (
    "POST /v1/chat/completions HTTP/1.1\r\n"
    "Host: bench.local\r\n"
    "Accept: application/json\r\n"
    "Accept-Encoding: identity\r\n"
    "Connection: keep-alive\r\n"
    "User-Agent: AsyncOpenAI/Python 1.99.0\r\n"
    "X-Stainless-Lang: python\r\n"
    "X-Stainless-Retry-Count: 0\r\n"
    "Authorization: Bearer sk-0123456789abcdef0123456789abcdef\r\n"
    "Content-Type: application/json\r\n"
    "Content-Length: {}\r\n\r\n"
)
NONCE = "0" * 16
SHARED_EVERY = 4  # one request in four has a shared prefix
SHARED_PREFIXES = 8
SHARED_PART = 0.75  # of its text

# Quotes, newlines and non-ASCII letters are the most expensive to parse.
TEXT = (
    'the worker "short" answers;\n while a long prompt waits nobody notices. Zürich: 12 °C '
    "router queue token\t cache block prefix of decode step it is to batch and"
)
WORDS = TEXT.split(" ")
UNIT_BYTES = 131_072  # longer text repeats


@dataclass(frozen=True)
class Pace:
    """The number and interval of a streamed answer's events."""

    events: int
    gap_ms: int


class Prompts:
    """An endless sequence of requests with bodies of `size` bytes, different for each seed."""

    def __init__(self, size: int, *, seed: int, pace: Pace | None = None) -> None:
        self.events = pace.events if pace else 0  # per answer
        self._numbers = itertools.count(seed << 32)
        unique = [_template(size, pace, "")] * (SHARED_EVERY - 1)
        shared = [_template(size, pace, f"Manual {n}. ") for n in range(SHARED_PREFIXES)]
        self._templates = itertools.cycle([t for s in shared for t in (*unique, s)])

    def next(self) -> tuple[bytes, bytes, bytes]:
        """Return the next request in three pieces."""
        before, after = next(self._templates)
        return before, b"%016x" % next(self._numbers), after


@functools.cache
def _template(size: int, pace: Pace | None, title: str) -> tuple[bytes, bytes]:
    """Return a request's bytes before and after its number; a shared prefix is in the first."""
    room = size - len(_body("", "", pace))
    rng = random.Random(title)
    shared = title + _filler(int(room * SHARED_PART) - len(title), rng) if title else ""
    body = _body(shared, _filler(room - _encoded(shared), rng), pace)
    before, _, after = (HEAD.format(len(body)).encode() + body).partition(NONCE.encode())
    return before, after


def _body(shared: str, text: str, pace: Pace | None) -> bytes:
    body: dict[str, object] = {
        "model": MODEL,
        "messages": [
            {"role": "system", "content": shared + NONCE},
            {"role": "user", "content": (f"gap-{pace.gap_ms}ms " if pace else "") + text},
        ],
        "temperature": 0.7,
        "max_tokens": pace.events if pace else 16,
    }
    if pace:
        body["stream"] = True
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()


def _filler(size: int, rng: random.Random) -> str:
    """Return text that takes exactly `size` bytes of JSON."""
    if size > UNIT_BYTES:
        return _filler(UNIT_BYTES, rng) * (size // UNIT_BYTES) + _filler(size % UNIT_BYTES, rng)
    text = ""
    while (length := _encoded(word := rng.choice(WORDS) + " ")) <= size:
        text += word
        size -= length
    return text + "." * size


def _encoded(text: str) -> int:
    return len(json.dumps(text, ensure_ascii=False).encode()) - len('""')
