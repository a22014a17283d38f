"""The requests that the journal has numbers for."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from vllm.v1.request import Request

from vllm_sched.engine.journal.client_ids import client_ids

MAX_EARLY_NAMES: Final = 4096


@dataclass(slots=True, eq=False)
class KnownRequest:
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
    shares: list[tuple[KnownRequest, int]] = field(default_factory=list)

    def add_share(self, owner: KnownRequest, end: int) -> None:
        if owner is self:
            return
        if self.shares and self.shares[-1][0] is owner:
            self.shares.pop()
        self.shares.append((owner, end))

    def resident_prefix(self) -> int:
        """Return the resident tokens, considering evictions of shared blocks."""
        least = self.resident
        visited = {self}
        pending = [*self.shares]
        while pending:
            owner, end = pending.pop()
            if owner.resident < end:
                least = min(least, owner.resident)
            if owner not in visited:
                visited.add(owner)
                pending += [(other, min(limit, end)) for other, limit in owner.shares]
        return least


class KnownRequests:
    """Running requests, and ended ones that own cached blocks."""

    def __init__(self) -> None:
        self.running: dict[str, KnownRequest] = {}
        self._known: dict[int, KnownRequest] = {}
        self._numbers = itertools.count(1)
        self._unneeded: list[KnownRequest] = []
        self._by_client_id: defaultdict[str, list[KnownRequest]] = defaultdict(list)
        self._early_names: dict[str, bytes] = {}  # of requests that have not arrived

    def add(self, request: Request) -> KnownRequest:
        known = KnownRequest(
            next(self._numbers), request.request_id, request.num_prompt_tokens, request
        )
        self.running[known.request_id] = self._known[known.number] = known
        for client_id in client_ids(known.request_id):
            others = self._by_client_id[client_id]
            known.name = (
                known.name
                or self._early_names.pop(client_id, b"")
                or next((each.name for each in others if _are_sequences(each, known)), b"")
            )
            others.append(known)
        return known

    def name(self, client_id: str, name: bytes) -> list[KnownRequest]:
        """Name the requests with an X-Request-Id, now or when they arrive; return the named."""
        named = [known for known in self._by_client_id.get(client_id, ()) if not known.name]
        for known in named:
            known.name = name
        if not named:
            self._early_names[client_id] = name
            if len(self._early_names) > MAX_EARLY_NAMES:
                del self._early_names[next(iter(self._early_names))]
        return named

    def end(self, known: KnownRequest) -> None:
        del self.running[known.request_id]
        known.request = None
        self.release_if_unneeded(known)

    def release_if_unneeded(self, known: KnownRequest) -> None:
        if known.request is None and not known.owned_blocks:
            self._unneeded.append(known)

    def pop_unneeded(self) -> list[int]:
        """Forget the requests without a further use, and return their numbers."""
        if not self._unneeded:
            return []
        numbers = [known.number for known in self._unneeded]
        self._unneeded = []
        for number in numbers:
            known = self._known.pop(number)
            for client_id in client_ids(known.request_id):
                others = self._by_client_id[client_id]
                others.remove(known)
                if not others:
                    del self._by_client_id[client_id]
        return numbers

    def all(self) -> Iterable[KnownRequest]:
        return self._known.values()


def _are_sequences(one: KnownRequest, other: KnownRequest) -> bool:
    """Return whether they are sequences of one request: `0_ID` and `1_ID`."""
    number, _, request_id = one.request_id.partition("_")
    return number.isdigit() and other.request_id.partition("_")[2] == request_id
