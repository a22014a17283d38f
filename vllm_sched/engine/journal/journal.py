"""The messages of the journal, made from what the scheduler does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, NamedTuple

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.request import Request

from vllm_sched.engine.journal.journal_requests import JournalRequest, JournalRequests
from vllm_sched.engine.journal.resident_prefixes import CacheChanges, ResidentPrefixes


class StepMessage(NamedTuple):
    """A message about a step; `docs/journal.md` has its fields, in this order."""

    arrived: list[tuple[int, str, int]]
    named: list[tuple[int, bytes]]
    cleared: bool
    evicted: list[int]
    resident: list[int]
    numbers: list[int]
    counts: list[int]
    tokens: list[int]
    preempted: list[int]
    ended: list[tuple[int, str]]
    forgotten: list[int]
    found: list[int]


# Number, id, prompt tokens, name, resident tokens, whether it runs, output tokens.
SnapshotRow = tuple[int, str, int, bytes, int, bool, list[int]]
NO_TOKENS: Final[Mapping[str, list[int]]] = MappingProxyType({})
Outputs = Mapping[int, EngineCoreOutputs]  # by client
NO_OUTPUTS: Final[Outputs] = MappingProxyType({})
NO_CHANGES: Final = CacheChanges(cleared=False, evicted=[], resident=[])
EMPTY: Final = StepMessage([], [], False, [], [], [], [], [], [], [], [], [])


@dataclass(slots=True)
class UnsentEvents:
    """What happened since the last message, in the terms of `StepMessage`."""

    arrived: list[tuple[int, str, int]] = field(default_factory=list)
    named: list[tuple[int, bytes]] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    ended: list[tuple[JournalRequest, str]] = field(default_factory=list)
    found: list[int] = field(default_factory=list)


class NewTokens(NamedTuple):
    numbers: list[int]  # of requests
    counts: list[int]  # of tokens, for each request
    tokens: list[int]  # of all requests


class Journal:
    def __init__(
        self,
        requests: JournalRequests,
        prefixes: ResidentPrefixes | None,
        block_tokens: int,
        first_tokens: Mapping[str, list[int]] = NO_TOKENS,
    ) -> None:
        self.block_tokens = block_tokens
        self._requests = requests
        self._first_tokens = first_tokens  # of continued requests, by id
        self._prefixes = prefixes  # None: prefix caching is off
        self._events = UnsentEvents()

    def unfollow(self, error: Exception) -> None:
        if self._prefixes is not None:
            self._prefixes.fail(error)

    def record_arrival(self, request: Request) -> None:
        earlier = self._requests.running.get(request.request_id)
        if earlier is not None:
            if earlier.request is request or not earlier.has_ended:
                return  # a session goes on
            self._requests.end(earlier)
        entry = self._requests.add(request)
        self._events.arrived.append((entry.number, entry.request_id, entry.prompt_tokens))
        if entry.name:
            self._events.named.append((entry.number, entry.name))

    def name(self, client_id: str, name: bytes) -> None:
        """Give the requests with an X-Request-Id a name, for all readers."""
        for entry in self._requests.name(client_id, name):
            self._events.named.append((entry.number, name))

    def record_schedule(self, output: SchedulerOutput) -> None:
        running = self._requests.running
        if self._prefixes is not None:
            for new in output.scheduled_new_reqs:
                if (entry := running.get(new.req_id)) is not None:
                    self._record_found(entry, new.num_computed_tokens)
                    self._prefixes.record_reuse(entry, new.num_computed_tokens)
        for request_id in output.preempted_req_ids or ():
            if (entry := running.get(request_id)) is not None:
                self._events.preempted.append(entry.number)

    def _record_found(self, entry: JournalRequest, computed: int) -> None:
        request = entry.request
        if request is None or request.skip_reading_prefix_cache:
            return
        stats = request.prefill_stats
        fetched = 0 if stats is None else stats.num_external_cached_tokens
        self._events.found += entry.number, max(computed - fetched, 0)

    def record_end(self, request: Request) -> None:
        if (entry := self._requests.running.get(request.request_id)) is not None:
            entry.has_ended = True
            self._events.ended.append((entry, str(request.get_finished_reason())))

    def pop_step(self, outputs: Outputs = NO_OUTPUTS) -> StepMessage | None:
        """Return what happened since the last call, and the new tokens of `outputs`."""
        new = self._new_tokens(outputs)
        events, self._events = self._events, UnsentEvents()
        for entry, _ in events.ended:
            if entry.request is not None:
                self._requests.end(entry)
        changes = NO_CHANGES if self._prefixes is None else self._prefixes.pop_changes()
        message = StepMessage(
            events.arrived,
            events.named,
            *changes,
            new.numbers,
            [] if len(new.tokens) == len(new.numbers) else new.counts,
            new.tokens,
            events.preempted,
            [(entry.number, reason) for entry, reason in events.ended],
            self._requests.pop_unneeded(),
            events.found,
        )
        return None if message == EMPTY else message

    def _new_tokens(self, outputs: Outputs) -> NewTokens:
        new = NewTokens([], [], [])
        running = self._requests.running
        for of_client in outputs.values():
            for output in of_client.outputs:
                tokens = output.new_token_ids
                if tokens and (entry := running.get(output.request_id)) is not None:
                    new.numbers.append(entry.number)
                    new.counts.append(len(tokens))
                    new.tokens.extend(tokens)
        return new

    def snapshot(self) -> list[SnapshotRow]:
        """Return all known requests; right after `pop_step`, which notes what is pending."""
        return [
            (
                entry.number,
                entry.request_id,
                entry.prompt_tokens,
                entry.name,
                entry.resident_prefix(),
                entry.request is not None,
                self._output_of(entry),
            )
            for entry in self._requests
        ]

    def _output_of(self, entry: JournalRequest) -> list[int]:
        if entry.request is None:
            return []
        return [*self._first_tokens.get(entry.request_id, ()), *entry.request.output_token_ids]
