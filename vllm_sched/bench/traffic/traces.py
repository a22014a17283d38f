"""Traces in Mooncake's format: one JSON object per line.

`{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}`: times
in milliseconds, lengths in tokens, and a name for each block of 512 prompt tokens. The last block
may be shorter. Blocks with the same name have the same text up to their end. The text fields
`tenant` and `class` are optional.
"""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from vllm_sched.bench.traffic.schedule import MAX_REQUESTS
from vllm_sched.bench.traffic.trace_lines import (
    BLOCK_TOKENS,
    BadLineError,
    is_pipe,
    pieces_of,
    read_lines,
    read_milliseconds,
    read_text,
    read_tokens,
)
from vllm_sched.bench.traffic.types import Request, TrafficSource
from vllm_sched.errors import UsageError

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator
    from pathlib import Path


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
        self._kept = self._keep() if is_pipe(path) else None
        count, last = 0, 0.0
        for request in self._again():
            count += 1
            last = request.at
        if not count:
            raise UsageError(f"{path}: the trace is empty; it needs a JSON object per line")
        self.count = count
        self.rate = count / last if last else float(count)

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
        prompt = read_tokens(entry, "input_length")
        return Request(
            read_milliseconds(entry, "timestamp"),
            read_text(entry, "class") or self.name,
            prompt,
            read_tokens(entry, "output_length"),
            read_text(entry, "tenant"),
            pieces_of(entry.get("hash_ids"), prompt, self._block),
        )
