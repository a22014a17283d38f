"""Traces in Mooncake's format: one JSON object per line.

`{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}`: times
in milliseconds, lengths in tokens, and a name for each block of 512 prompt tokens. The last block
may be shorter. Blocks with the same name have the same text up to their end. The text fields
`tenant` and `class` are optional.
"""

from __future__ import annotations

import json
import os
import random
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from sys import float_info
from typing import Any, Final, TypeVar

from vllm_sched.bench.traffic.schedule import MAX_REQUESTS
from vllm_sched.bench.traffic.types import MAX_TOKENS, Piece, Request, TrafficSource
from vllm_sched.errors import UsageError

BLOCK_TOKENS: Final = 512
TOKENS_TEXT: Final = f"a number of tokens, 1 to {MAX_TOKENS:,}"
MOMENT_TEXT: Final = "milliseconds, 0 or more"
SESSION_KEYS: Final = frozenset(["session_id", "turns"])  # of traces of sessions
T = TypeVar("T")


class BadLineError(Exception):
    """A line of a trace is invalid."""


def read_lines(path: Path, parse: Callable[[dict[str, Any], int], T]) -> Iterator[T]:
    """Yield what `parse` makes of each line's object and number."""
    number, empty = 0, True
    try:
        with path.open(encoding="utf-8-sig") as lines:
            for line in lines:
                number += 1
                if line.strip():
                    empty = False
                    yield parse(_entry(line), number)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path}, line {number + 1}: is not UTF-8 text") from None
    except BadLineError as error:
        raise UsageError(f"{path}, line {number}: {error}") from None
    if empty:
        raise UsageError(f"{path}: the trace is empty; it needs a JSON object per line")


def _entry(line: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        entry = None
    if not isinstance(entry, dict):
        raise BadLineError(f"is not a JSON object, as each line must be: {line.strip()[:60]!r}")
    return entry


def is_pipe(path: Path) -> bool:
    try:
        return not stat.S_ISREG(path.stat().st_mode)
    except OSError:  # reading reports the error
        return False


def field(entry: dict[str, Any], key: str, valid: Callable[[Any], bool], takes: str) -> Any:
    if key not in entry:
        raise BadLineError(f"{key} is missing; it must be {takes}")
    value = entry[key]
    if not valid(value):
        raise BadLineError(f"{key} is {value!r:.60}; it must be {takes}")
    return value


def read_text(entry: dict[str, Any], key: str) -> str:
    value = entry.get(key)
    if value is None:
        return ""
    if not (isinstance(value, str) and value.isprintable()):
        raise BadLineError(f"{key} is {value!r:.60}; it must be a line of text")
    return value


def read_tokens(entry: dict[str, Any], key: str) -> int:
    return int(field(entry, key, lambda n: type(n) is int and 1 <= n <= MAX_TOKENS, TOKENS_TEXT))


def read_milliseconds(entry: dict[str, Any], key: str, maximum: float = float_info.max) -> float:
    takes = MOMENT_TEXT if maximum == float_info.max else f"milliseconds, 0 to {maximum:,}"
    value = field(entry, key, lambda n: type(n) in (int, float) and 0 <= n <= maximum, takes)
    return float(value / 1000)


def pieces_of(names: Any, prompt: int, block_tokens: int) -> tuple[Piece, ...]:
    if names is None:
        return ()
    if not isinstance(names, list) or not all(type(name) in (int, str) for name in names):
        raise BadLineError(f"hash_ids is {names!r:.60}; it must be numbers or strings")
    blocks = -(-prompt // block_tokens)
    if len(names) > blocks:
        raise BadLineError(
            f"hash_ids has {len(names)} names, but input_length {prompt} has {blocks} blocks of "
            f"{block_tokens} tokens; set the block length with --block-tokens"
        )
    return tuple(
        (name, min(block_tokens, prompt - i * block_tokens)) for i, name in enumerate(names)
    )


class TrafficFile(TrafficSource):
    def __init__(self, path: Path, block_tokens: int) -> None:
        if block_tokens < 1:
            raise UsageError(
                f"--block-tokens {block_tokens}: must be 1 or more; Mooncake's is {BLOCK_TOKENS}"
            )
        # A file name may contain any bytes, but this name is printed and saved.
        self.name = os.fsencode(path.stem).decode(errors="backslashreplace")
        self._path = path
        self._block = block_tokens


class RequestTrace(TrafficFile):
    """A file of requests with times, read line by line each time it is played.

    A pipe is read once and kept in memory.
    """

    timed = True

    def __init__(self, path: Path, block_tokens: int = BLOCK_TOKENS) -> None:
        """Read the file once to find errors and the rate."""
        super().__init__(path, block_tokens)
        self._is_pipe = is_pipe(path)
        self._kept = self._keep() if self._is_pipe else None
        count, last = 0, 0.0
        for request in self._repeat():
            count += 1
            last = request.at
        self.count = count
        self.rate = count / last if last else float(count)

    def requests(self, rng: random.Random) -> Iterator[Request]:
        del rng
        return self._repeat()

    def _keep(self) -> list[Request]:
        kept = list(islice(self._read(), MAX_REQUESTS + 1))
        if len(kept) > MAX_REQUESTS:
            raise UsageError(
                f"{self._path}: a pipe's requests are kept in memory, at most {MAX_REQUESTS:,}; "
                "write them to a file, which has no limit"
            )
        return kept

    def _repeat(self) -> Iterator[Request]:
        return self._read() if self._kept is None else iter(self._kept)

    def _read(self) -> Iterator[Request]:
        first: float | None = None
        latest = 0.0

        def parse(entry: dict[str, Any], _: int) -> Request:
            nonlocal first, latest
            request = self._request(entry)
            if first is None:
                first = request.at
            elif request.at < latest:
                raise BadLineError("timestamp goes back in time; sort the trace by it")
            latest = request.at
            return replace(request, at=request.at - first)

        return read_lines(self._path, parse)

    def _request(self, entry: dict[str, Any]) -> Request:
        if self._is_pipe and not SESSION_KEYS.isdisjoint(entry):
            raise BadLineError("sessions are not read from a pipe; write them to a file")
        prompt = read_tokens(entry, "input_length")
        return Request(
            at=read_milliseconds(entry, "timestamp"),
            klass=read_text(entry, "class") or self.name,
            prompt_tokens=prompt,
            output_tokens=read_tokens(entry, "output_length"),
            tenant=read_text(entry, "tenant"),
            shared=pieces_of(entry.get("hash_ids"), prompt, self._block),
        )
