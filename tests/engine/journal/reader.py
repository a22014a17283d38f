"""A reader of the journal, as docs/journal.md describes one. It knows each request's tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tests.engine.schedulers import BLOCK
from vllm_sched.engine.journal.journal import SnapshotRow, StepMessage


class CacheReader:
    """The set of cached blocks, each named by the tokens up to its end."""

    def __init__(self, tokens: Mapping[str, Sequence[int]]) -> None:
        self.blocks: set[int] = set()
        self.output: dict[str, list[int]] = {}
        self.ids: dict[int, str] = {}
        self._tokens = tokens

    def apply(self, message: StepMessage) -> None:
        for number, request_id, _ in message.arrived:
            self.ids[number] = request_id
            self.output[request_id] = []
        if message.cleared:
            self.blocks.clear()
        for number, first, last in _groups(message.evicted, 3):
            self.blocks -= self._keys(number, first, last)
        for number, tokens in _groups(message.resident, 2):
            self.blocks |= self._keys(number, 0, tokens)
        counts = message.counts or [1] * len(message.numbers)
        begin = 0
        for number, count in zip(message.numbers, counts, strict=True):
            self.output[self.ids[number]] += message.tokens[begin : begin + count]
            begin += count
        for number in message.forgotten:
            del self.ids[number]

    def load(self, rows: Sequence[SnapshotRow]) -> None:
        self.blocks.clear()
        self.ids = {row[0]: row[1] for row in rows}
        for number, request_id, _, _, resident, running, tokens in rows:
            self.blocks |= self._keys(number, 0, resident)
            if running:
                self.output[request_id] = list(tokens)

    def cached(self, tokens: Sequence[int]) -> int:
        """Return the leading tokens of a new prompt that the cache holds."""
        # At least one token is computed.
        most = (len(tokens) - 1) // BLOCK
        found = 0
        while found < most and _key(tokens, found) in self.blocks:
            found += 1
        return found * BLOCK

    def _keys(self, number: int, first: int, last: int) -> set[int]:
        tokens = self._tokens[self.ids[number]]
        return {_key(tokens, block) for block in range(first // BLOCK, last // BLOCK)}


def _key(tokens: Sequence[int], block: int) -> int:
    return hash(tuple(tokens[: (block + 1) * BLOCK]))


def _groups(values: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    return (values[begin : begin + size] for begin in range(0, len(values), size))
