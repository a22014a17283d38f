"""The requests that the journal has numbers for."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from vllm.v1.request import Request

from vllm_sched.engine.journal.client_ids import client_ids

MAX_EARLY_NAMES: Final = 4096


@dataclass(slots=True, eq=False)
class JournalRequest:
    """A request as readers of the journal know it."""

    number: int
    request_id: str
    prompt_tokens: int
    request: Request | None  # None after its end
    name: bytes = b""  # given by a reader
    has_ended: bool = False
    resident: int = 0  # leading tokens that the KV cache holds
    owned_blocks: int = 0  # cached blocks that it was the first to compute
    stored: int = 0  # tokens when its last block was cached
    # Other owners of its first blocks, with the tokens up to the last block of each.
    shares: list[tuple[JournalRequest, int]] = field(default_factory=list)

    def add_share(self, owner: JournalRequest, end: int) -> None:
        if owner is self:
            return
        if self.shares and self.shares[-1][0] is owner:
            self.shares.pop()
        self.shares.append((owner, end))

    def resident_prefix(self) -> int:
        """Return the resident tokens, considering evictions of shared blocks."""
        resident = self.resident
        visited = {self}
        pending = [*self.shares]
        while pending:
            owner, end = pending.pop()
            if owner.resident < end:
                resident = min(resident, owner.resident)
            if owner not in visited:
                visited.add(owner)
                pending += [(other, min(limit, end)) for other, limit in owner.shares]
        return resident


class JournalRequests:
    """Running requests, and ended ones that own cached blocks."""

    def __init__(self) -> None:
        self.running: dict[str, JournalRequest] = {}
        self._by_number: dict[int, JournalRequest] = {}
        self._numbers = itertools.count(1)
        self._unneeded_requests: list[JournalRequest] = []
        self._by_client_id: defaultdict[str, list[JournalRequest]] = defaultdict(list)
        self._early_names: dict[str, bytes] = {}  # of requests that have not arrived

    def add(self, request: Request) -> JournalRequest:
        entry = JournalRequest(
            next(self._numbers), request.request_id, request.num_prompt_tokens, request
        )
        self.running[entry.request_id] = entry
        self._by_number[entry.number] = entry
        for client_id in client_ids(entry.request_id):
            others = self._by_client_id[client_id]
            entry.name = (
                entry.name
                or self._early_names.pop(client_id, b"")
                or next((other.name for other in others if _are_sequences(other, entry)), b"")
            )
            others.append(entry)
        return entry

    def name(self, client_id: str, name: bytes) -> list[JournalRequest]:
        """Name the requests with an X-Request-Id, now or when they arrive; return the named."""
        named = [entry for entry in self._by_client_id.get(client_id, ()) if not entry.name]
        for entry in named:
            entry.name = name
        if not named:
            self._early_names[client_id] = name
            if len(self._early_names) > MAX_EARLY_NAMES:
                del self._early_names[next(iter(self._early_names))]
        return named

    def end(self, entry: JournalRequest) -> None:
        del self.running[entry.request_id]
        entry.request = None
        self.release_if_unneeded(entry)

    def release_if_unneeded(self, entry: JournalRequest) -> None:
        if entry.request is None and not entry.owned_blocks:
            self._unneeded_requests.append(entry)

    def pop_unneeded(self) -> list[int]:
        """Forget the requests without a further use, and return their numbers."""
        if not self._unneeded_requests:
            return []
        numbers = [entry.number for entry in self._unneeded_requests]
        self._unneeded_requests = []
        for number in numbers:
            entry = self._by_number.pop(number)
            for client_id in client_ids(entry.request_id):
                others = self._by_client_id[client_id]
                others.remove(entry)
                if not others:
                    del self._by_client_id[client_id]
        return numbers

    def __iter__(self) -> Iterator[JournalRequest]:
        return iter(self._by_number.values())


def _are_sequences(first: JournalRequest, second: JournalRequest) -> bool:
    """Return whether they are sequences of one request: `0_ID` and `1_ID`."""
    number, _, request_id = first.request_id.partition("_")
    return number.isdigit() and second.request_id.partition("_")[2] == request_id
