"""Traces in Mooncake's format: one JSON object per line.

`{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}`: times
in milliseconds, lengths in tokens, and a name for each block of 512 prompt tokens. The last block
may be shorter. Blocks with the same name have the same text up to their end. The text fields
`tenant` and `class` are optional.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from sys import float_info
from typing import TYPE_CHECKING, Any, Final

from vllm_sched.bench.traffic.schedule import MAX_REQUESTS
from vllm_sched.bench.traffic.types import MAX_TOKENS, Piece, Request, TrafficSource
from vllm_sched.errors import UsageError

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator
    from pathlib import Path

BLOCK_TOKENS: Final = 512
TOKENS_TEXT: Final = f"a number of tokens, 1 to {MAX_TOKENS:,}"


class RequestTrace(TrafficSource):
    """A file of requests with times, read line by line each time it is played.

    A pipe is read once and kept in memory.
    """

    timed = True

    def __init__(self, path: Path, block_tokens: int = BLOCK_TOKENS) -> None:
        """Read the file once to find errors and the rate."""
        if block_tokens < 1:
            raise UsageError(
                f"--block-tokens {block_tokens}: must be 1 or more; Mooncake's is {BLOCK_TOKENS}"
            )
        # A file name may contain any bytes, but this name is printed and saved.
        self.name = os.fsencode(path.stem).decode(errors="backslashreplace")
        self._path = path
        self._block = block_tokens
        self._kept = self._keep() if _is_pipe(path) else None
        count, seconds = 0, 0.0
        for request in self._again():
            count += 1
            seconds = request.at
        if not count:
            raise UsageError(f"{path}: the trace is empty; it needs a JSON object per line")
        self.count = count
        self.rate = count / seconds if seconds else float(count)

    def requests(self, rng: random.Random) -> Iterator[Request]:
        del rng
        return self._again()

    def _keep(self) -> list[Request]:
        kept = list(islice(self._read(), MAX_REQUESTS + 1))
        if len(kept) > MAX_REQUESTS:
            raise UsageError(
                f"{self._path}: a pipe's requests are kept in memory, at most {MAX_REQUESTS:,}; "
                "write them to a file, which has no limit"
            )
        return kept

    def _again(self) -> Iterator[Request]:
        return self._read() if self._kept is None else iter(self._kept)

    def _read(self) -> Iterator[Request]:
        first, latest, number = None, 0.0, 0
        try:
            with self._path.open(encoding="utf-8-sig") as lines:
                for line in lines:
                    number += 1
                    if not line.strip():
                        continue
                    request = self._request(line)
                    if first is None:
                        first = request.at
                    elif request.at < latest:
                        raise _BadLineError("timestamp goes back in time; sort the trace by it")
                    latest = request.at
                    yield replace(request, at=request.at - first)
        except OSError as error:
            raise UsageError(f"{self._path}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise UsageError(f"{self._path}, line {number + 1}: is not UTF-8 text") from None
        except _BadLineError as error:
            raise UsageError(f"{self._path}, line {number}: {error}") from None

    def _request(self, line: str) -> Request:
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            raise _BadLineError(f"is not JSON: {line.strip()[:60]!r}") from None
        if not isinstance(entry, dict):
            raise _BadLineError(f"is not a JSON object: {line.strip()[:60]!r}")
        prompt = _field(entry, "input_length", _tokens, TOKENS_TEXT)
        return Request(
            _field(entry, "timestamp", _moment, "milliseconds, 0 or more") / 1000,
            _word(entry, "class") or self.name,
            prompt,
            _field(entry, "output_length", _tokens, TOKENS_TEXT),
            _word(entry, "tenant"),
            self._pieces(entry.get("hash_ids"), prompt),
        )

    def _pieces(self, names: Any, prompt: int) -> tuple[Piece, ...]:
        if names is None:
            return ()
        if not isinstance(names, list) or not all(type(name) in (int, str) for name in names):
            raise _BadLineError(f"hash_ids is {names!r:.60}; it must be numbers or strings")
        most = -(-prompt // self._block)
        if len(names) > most:
            raise _BadLineError(
                f"hash_ids has {len(names)} names, but input_length {prompt} has {most} blocks of "
                f"{self._block} tokens; set the block length with --block-tokens"
            )
        return tuple(
            (name, min(self._block, prompt - i * self._block)) for i, name in enumerate(names)
        )


class _BadLineError(Exception):
    """A line of a trace is invalid."""


def _is_pipe(path: Path) -> bool:
    try:
        return not stat.S_ISREG(path.stat().st_mode)
    except OSError:  # reading reports the error
        return False


def _field(entry: dict[str, Any], key: str, valid: Callable[[Any], bool], takes: str) -> Any:
    if key not in entry:
        raise _BadLineError(f"{key} is missing; it must be {takes}")
    value = entry[key]
    if not valid(value):
        raise _BadLineError(f"{key} is {value!r:.60}; it must be {takes}")
    return value


def _word(entry: dict[str, Any], key: str) -> str:
    value = entry.get(key)
    if value is None:
        return ""
    if not (isinstance(value, str) and value.isprintable()):
        raise _BadLineError(f"{key} is {value!r:.60}; it must be a line of text")
    return value


def _tokens(value: Any) -> bool:
    return type(value) is int and 1 <= value <= MAX_TOKENS


def _moment(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= float_info.max
