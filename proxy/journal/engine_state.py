"""An exact replica of what one engine knows: its requests, their tokens and their cached prefixes.

Steps apply in the order of their numbers. If one is missing, the following ones are kept until a
snapshot arrives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import chain
from math import inf
from operator import itemgetter
from typing import TYPE_CHECKING, Final

from proxy.journal.messages import ArrivedRequest, JournalStep, NamedRequest, Position
from proxy.journal.request_ids import request_ids
from proxy.journal.snapshot import JournalRequest, SnapshotReader

if TYPE_CHECKING:
    from proxy.core.learned.resident_prefixes import ResidentPrefixes

MAX_STREAM_TOKENS: Final = 131_072
MAX_KEPT_STEPS: Final = 1000
# Ends after which a stream may go on from another worker. An engine that stops aborts all.
FAILURES: Final = ("abort", "error")
MAX_FAILED: Final = 512
MAX_COMPLETED: Final = 16  # of which the client may not have the last text yet
MAX_OWN_NAMES: Final = 1024


class EngineJournal:
    """The replica of one engine; `exact` is False until a snapshot, and after a gap."""

    def __init__(
        self, max_tokens: int = MAX_STREAM_TOKENS, max_kept_steps: int = MAX_KEPT_STEPS
    ) -> None:
        self.exact = False
        self.run = b""
        self.number = 0  # of the last step
        self.block_tokens = 0
        self.gaps = 0
        self.requests: dict[int, JournalRequest] = {}  # by the engine's number
        self.listener: ResidentPrefixes | None = None
        self.now = 0.0  # set before messages are applied
        self.max_tokens = max_tokens
        self._max_kept_steps = max_kept_steps
        self._kept: deque[tuple[Position, JournalStep]] = deque(maxlen=max_kept_steps)
        self._streams: dict[str, list[int]] = {}  # numbers by possible X-Request-Id
        self._own_names: dict[str, bytes] = {}  # of requests that have not arrived
        self._failed: deque[JournalRequest] = deque(maxlen=MAX_FAILED)
        self._completed: deque[JournalRequest] = deque(maxlen=MAX_COMPLETED)

    def streams(self, request_id: str, since: float = -inf) -> list[JournalRequest]:
        """Return the requests with this X-Request-Id: several if it has more sequences.

        They run, or ended lately and after `since`: clients may use an ID again. A completed one is
        without its last token, which another engine generates.
        """
        streams: dict[int, list[JournalRequest]] = {}
        for number in self._streams.get(request_id, ()):
            request = self.requests[number]
            streams.setdefault(request_ids(request.request_id).index(request_id), []).append(
                request
            )
        if streams:
            return streams[min(streams)]
        ended = [
            (request_ids(request.request_id).index(request_id), -request.ended_at, request)
            for request in chain(self._failed, self._completed)
            if request.ended_at >= since and request_id in request_ids(request.request_id)
        ]
        return [min(ended, key=itemgetter(0, 1))[2]] if ended else []

    def expect(self, request_id: str, name: bytes) -> None:
        """Name a request at its arrival; the engine reports names up to a second later."""
        names = self._own_names
        names[request_id] = name
        if len(names) > MAX_OWN_NAMES:
            del names[next(iter(names))]

    def apply_step(self, position: Position, step: JournalStep) -> bool:
        """Apply the next step; return False if a snapshot is needed."""
        if self.contains(position):
            return True
        run, number = position
        if self.exact and run == self.run:
            if number == self.number + 1:
                self.number = number
                try:
                    self._apply(step)
                except KeyError:  # a number that no message has introduced
                    self.mark_incomplete()
                return self.exact
            self.mark_incomplete()
        self.exact = False
        if self._kept and self._kept[-1][0].run != run:
            self._kept.clear()
        self._kept.append((position, step))
        return False

    def mark_incomplete(self) -> None:
        """Note that a step is missing."""
        self.gaps += self.exact
        self.exact = False

    def contains(self, position: Position) -> bool:
        """Return whether the replica is exact, and has this step."""
        return self.exact and position.run == self.run and position.number <= self.number

    def apply_snapshot(self, snapshot: SnapshotReader) -> bool:
        """Replace the state, and apply the kept steps; return False if a step is missing."""
        if self.contains(snapshot.position):
            return True
        self._replace(snapshot)
        self.run, self.number = snapshot.position
        self.exact = True
        kept, self._kept = self._kept, deque(maxlen=self._max_kept_steps)
        for position, step in kept:
            if position.run == self.run:
                self.apply_step(position, step)
        return self.exact

    def _replace(self, snapshot: SnapshotReader) -> None:
        self.block_tokens = snapshot.block_tokens
        self.requests = {}
        self._streams = {}
        for number, request in snapshot.requests.items():
            self._add(number, request)
        if (listener := self.listener) is None:
            return
        listener.restart(snapshot.block_tokens)
        for number, request in snapshot.requests.items():
            if request.name:
                listener.add_name(number, request.name, request.prompt_tokens)
            if request.resident:
                listener.record_resident(number, request.resident)

    def _add(self, number: int, request: JournalRequest) -> None:
        self.requests[number] = request
        if request.running:
            for request_id in request_ids(request.request_id):
                self._streams.setdefault(request_id, []).append(number)

    def _apply(self, step: JournalStep) -> None:
        """Apply a step's changes in the engine's order; `KeyError`: a request is not known."""
        if step.arrived:
            self._add_arrived(step.arrived)
        if step.named:
            self._set_names(step.named)
        if step.cleared:
            self._clear_cache()
        if step.evicted or step.found or step.resident:
            self._update_cached(step)
        self._append_tokens(step)
        for ended in step.ended:
            self._end(ended.number, kept=ended.reason in FAILURES)
        for number in step.forgotten:
            self._forget(number)

    def _add_arrived(self, arrived: Iterable[ArrivedRequest]) -> None:
        for new in arrived:
            if new.number in self.requests:
                raise KeyError(new.number)
            self._add(new.number, JournalRequest(new.id, new.prompt_tokens))
            if self._own_names and self.listener is not None:
                name = self._pop_own_name(new.id)
                if name is not None:
                    self.listener.add_name(new.number, name, new.prompt_tokens)

    def _pop_own_name(self, engine_id: str) -> bytes | None:
        for request_id in request_ids(engine_id):
            if (name := self._own_names.pop(request_id, None)) is not None:
                return name
        return None

    def _set_names(self, named: Iterable[NamedRequest]) -> None:
        for named_request in named:
            request = self.requests[named_request.number]
            request.name = named_request.name
            if self.listener is not None:
                self.listener.add_name(
                    named_request.number, named_request.name, request.prompt_tokens
                )

    def _clear_cache(self) -> None:
        for request in self.requests.values():
            request.resident = 0
        if self.listener is not None:
            self.listener.clear()

    def _update_cached(self, step: JournalStep) -> None:
        """Apply what the engine's cache lost and gained."""
        requests, listener = self.requests, self.listener
        ranges, started, changes = iter(step.evicted), iter(step.found), iter(step.resident)
        for number, first, last in zip(ranges, ranges, ranges, strict=True):
            request = requests[number]
            request.resident = min(request.resident, first)
            if listener is not None:
                listener.record_evicted(number, first, last)
        for number, cached_now in zip(started, started, strict=True):
            if number not in requests:
                raise KeyError(number)
            if listener is not None:
                listener.record_found(number, cached_now)
        for number, resident in zip(changes, changes, strict=True):
            requests[number].resident = resident
            if listener is not None:
                listener.record_resident(number, resident)

    def _forget(self, number: int) -> None:
        self._end(number)
        del self.requests[number]
        if self.listener is not None:
            self.listener.forget(number)

    def _append_tokens(self, step: JournalStep) -> None:
        requests, limit = self.requests, self.max_tokens
        if not step.counts:
            for number, token in zip(step.numbers, step.tokens, strict=True):
                request = requests[number]
                if request.complete:
                    tokens = request.tokens
                    tokens.append(token)
                    if len(tokens) > limit:
                        request.drop_tokens()
            return
        start = 0
        for number, count in zip(step.numbers, step.counts, strict=True):
            requests[number].extend(step.tokens[start : start + count], limit)
            start += count

    def _end(self, number: int, *, kept: bool = False) -> None:
        request = self.requests[number]
        if not request.running:
            return
        request.running = False
        request.ended_at = self.now
        if kept and request.complete:
            self._failed.append(request)
        else:
            if request.tokens:
                self._completed.append(request.without_last_token())
            request.drop_tokens()
        for request_id in request_ids(request.request_id):
            numbers = self._streams[request_id]
            numbers.remove(number)
            if not numbers:
                del self._streams[request_id]
