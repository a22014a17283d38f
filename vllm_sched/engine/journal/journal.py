"""The messages of the journal, made from what the scheduler does."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.request import Request

from vllm_sched.engine.journal.known_requests import KnownRequest, KnownRequests
from vllm_sched.engine.journal.resident_prefixes import CacheChanges, ResidentPrefixes


class StepMessage(NamedTuple):
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
NO_CHANGES: Final = CacheChanges(False, [], [])
EMPTY: Final = StepMessage([], [], False, [], [], [], [], [], [], [], [], [])


class Journal:
    def __init__(
        self,
        known: KnownRequests,
        prefixes: ResidentPrefixes | None,
        block_tokens: int,
        first_tokens: Mapping[str, list[int]] = NO_TOKENS,
    ) -> None:
        self.block_tokens = block_tokens
        self._known = known
        self._first_tokens = first_tokens  # of continued requests, by id
        self._prefixes = prefixes  # None: prefix caching is off
        self._arrived: list[tuple[int, str, int]] = []
        self._named: list[tuple[int, bytes]] = []
        self._preempted: list[int] = []
        self._ended: list[tuple[KnownRequest, str]] = []
        self._found: list[int] = []

    def unfollow(self, error: Exception) -> None:
        if self._prefixes is not None:
            self._prefixes.fail(error)

    def record_arrival(self, request: Request) -> None:
        earlier = self._known.running.get(request.request_id)
        if earlier is not None:
            if earlier.request is request or not earlier.has_ended:
                return  # a session goes on
            self._known.end(earlier)
        known = self._known.add(request)
        self._arrived.append((known.number, known.request_id, known.prompt_tokens))
        if known.name:
            self._named.append((known.number, known.name))

    def name(self, client_id: str, name: bytes) -> None:
        """Give the requests with an X-Request-Id a name, for all readers."""
        self._named += [(known.number, name) for known in self._known.name(client_id, name)]

    def record_schedule(self, output: SchedulerOutput) -> None:
        running = self._known.running
        if self._prefixes is not None:
            for new in output.scheduled_new_reqs:
                if (known := running.get(new.req_id)) is not None:
                    self._note_found(known, new.num_computed_tokens)
                    self._prefixes.record_reuse(known, new.num_computed_tokens)
        for request_id in output.preempted_req_ids or ():
            if (known := running.get(request_id)) is not None:
                self._preempted.append(known.number)

    def _note_found(self, known: KnownRequest, computed: int) -> None:
        request = known.request
        if request is None or request.skip_reading_prefix_cache:
            return
        stats = request.prefill_stats
        fetched = 0 if stats is None else stats.num_external_cached_tokens
        self._found += known.number, max(computed - fetched, 0)

    def record_end(self, request: Request) -> None:
        if (known := self._known.running.get(request.request_id)) is not None:
            known.has_ended = True
            self._ended.append((known, str(request.get_finished_reason())))

    def pop_step(self, outputs: Outputs = NO_OUTPUTS) -> StepMessage | None:
        """Return what happened since the last call, and the new tokens of `outputs`."""
        numbers, counts, tokens = self._new_tokens(outputs)
        ended, self._ended = self._ended, []
        for known, _ in ended:
            if known.request is not None:
                self._known.end(known)
        changes = NO_CHANGES if self._prefixes is None else self._prefixes.pop_changes()
        arrived, self._arrived = self._arrived, []
        named, self._named = self._named, []
        preempted, self._preempted = self._preempted, []
        found, self._found = self._found, []
        message = StepMessage(
            arrived,
            named,
            *changes,
            numbers,
            [] if len(tokens) == len(numbers) else counts,
            tokens,
            preempted,
            [(known.number, reason) for known, reason in ended],
            self._known.pop_unneeded(),
            found,
        )
        return None if message == EMPTY else message

    def _new_tokens(self, outputs: Outputs) -> tuple[list[int], list[int], list[int]]:
        """Return the requests' numbers, the count of tokens of each, and all tokens."""
        numbers: list[int] = []
        counts: list[int] = []
        tokens: list[int] = []
        running = self._known.running
        for of_client in outputs.values():
            for output in of_client.outputs:
                new = output.new_token_ids
                if new and (known := running.get(output.request_id)) is not None:
                    numbers.append(known.number)
                    counts.append(len(new))
                    tokens += new
        return numbers, counts, tokens

    def snapshot(self) -> list[SnapshotRow]:
        """Return all known requests; right after `pop_step`, which notes what is pending."""
        return [
            (
                known.number,
                known.request_id,
                known.prompt_tokens,
                known.name,
                known.resident_prefix(),
                known.request is not None,
                self._output_of(known),
            )
            for known in self._known.all()
        ]

    def _output_of(self, known: KnownRequest) -> list[int]:
        if known.request is None:
            return []
        return [*self._first_tokens.get(known.request_id, ()), *known.request.output_token_ids]
