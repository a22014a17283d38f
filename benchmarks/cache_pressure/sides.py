"""What the router knows of the caches, on each side of the comparison."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final

import msgspec

from proxy.core.fleet.leases import Decision
from proxy.core.fleet.worker import PrefixHolders
from proxy.core.learned.resident_prefixes import ResidentPrefixes, name_of
from proxy.core.model.types import RequestInfo
from proxy.core.routing.adaptive import Adaptive
from proxy.core.routing.view import View
from proxy.journal.engine_state import EngineJournal
from proxy.journal.messages import JournalStep, Position, decode_step
from proxy.journal.snapshot import SnapshotReader
from vllm_sched.bench.traffic.types import Piece, Request
from vllm_sched.engine.journal.journal import Journal, Outputs
from vllm_sched.engine.journal.scheduler import journal_of
from vllm_sched.sim.engines.prompt_hashes import token_namer
from vllm_sched.sim.fleet.base_fleet import RequestFlight
from vllm_sched.sim.fleet.fleet import SimulatedFleet

LOAD, ESTIMATE, KNOWN, EXACT, ORACLE = SIDES = ("load", "estimate", "sessions", "exact", "oracle")
DELAY_S: Final = 0.005  # from the end of a step to the router's index
RUN: Final = b"a run..."


class VirtualPublisher:
    """Takes the messages of an engine's journal without a socket."""

    def __init__(self, journal: Journal, send: Callable[[Position, JournalStep], None]) -> None:
        self.lock = threading.RLock()
        self.journal = journal
        self._send = send
        self._number = 0
        self._encode = msgspec.msgpack.Encoder().encode

    def publish_step(self, outputs: Outputs) -> None:
        if (message := self.journal.pop_step(outputs)) is not None:
            self._number += 1
            self._send(Position(RUN, self._number), decode_step(self._encode(message)))

    def stop(self) -> None:
        raise AssertionError("the journal failed")


def follow_journals(fleet: SimulatedFleet, delay_s: float = DELAY_S) -> list[ResidentPrefixes]:
    """Have the fleet's router read the journals of its exact engines."""
    roster = fleet.router.fleet.roster
    journals: dict[str, Journal] = {}
    followed = []
    for worker in roster:
        engine: Any = fleet.engines[worker.name]
        replica = EngineJournal()
        replica.listener = prefixes = ResidentPrefixes(roster.prefixes, worker.index)
        journal = journals[worker.name] = journal_of(engine.simulated.scheduler)
        nothing = msgspec.msgpack.encode((journal.block_tokens, []))
        replica.apply_snapshot(SnapshotReader(Position(RUN, 0), nothing, replica.max_tokens))

        def send(position: Position, step: JournalStep, replica: EngineJournal = replica) -> None:
            def apply(now: float) -> None:  # noqa: ARG001
                assert replica.apply_step(position, step)

            fleet._queue.schedule(fleet._queue.now + delay_s, apply)

        engine.simulated.scheduler._publisher = VirtualPublisher(journal, send)
        worker.reports_prefixes = True
        followed.append(prefixes)
    roster.name_prefix = lambda worker, info: journals[worker.name].name(
        flight_id(info), name_of(info.prefix, info.prefix_bytes, info.bytes_before)
    )
    return followed


def flight_id(info: RequestInfo) -> str:
    return info.id.removeprefix("sim-")


class SeesCaches(Adaptive):
    """The rule with the caches as they are, and with the prefixes that are on their way."""

    name = ORACLE

    def __init__(self, fleet: SimulatedFleet) -> None:
        self._fleet = fleet

    def choose(self, view: View) -> Decision | None:
        view.cached_prefixes = self._holders(self._fleet._flights[flight_id(view.info)], view)
        return super().choose(view)

    def _holders(self, own: RequestFlight, view: View) -> PrefixHolders:
        request = own.request
        cached = dict.fromkeys(self._fleet.engines, 0)
        for flight in self._fleet._flights.values():
            if flight.lease is not None and not flight.outcome.ticks:
                name = flight.lease.worker.name
                cached[name] = max(cached[name], common_tokens(flight.request, request))
        masks: dict[int, int] = {}
        for worker in view.candidates:
            tokens = max(cached[worker.name], self._cached_tokens(worker.name, request))
            masks[tokens] = masks.get(tokens, 0) | worker.bit
        return [(tokens, masks[tokens]) for tokens in sorted(masks, reverse=True) if tokens]

    def _cached_tokens(self, name: str, request: Request) -> int:
        engine: Any = self._fleet.engines[name]
        names = block_names(request.shared, engine.model.block_tokens)
        coordinator = engine.simulated.scheduler.kv_cache_manager.coordinator
        return int(coordinator.find_longest_cache_hit(names, request.prompt_tokens - 1)[1])


def common_tokens(one: Request, other: Request) -> int:
    total = 0
    for (name, tokens), (other_name, other_tokens) in zip(one.shared, other.shared, strict=False):
        if name != other_name:
            break
        total += min(tokens, other_tokens)
        if tokens != other_tokens:
            break
    return total


@lru_cache(maxsize=1024)
def block_names(shared: tuple[Piece, ...], block_tokens: int) -> Sequence[bytes]:
    """Return the engine's names of the blocks in the shared pieces."""
    name = token_namer(0, shared)
    blocks = sum(tokens for _, tokens in shared) // block_tokens
    return [name(number * block_tokens) for number in range(1, blocks + 1)]
