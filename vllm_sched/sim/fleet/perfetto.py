"""Write a simulation as a Perfetto trace.

Traced schedulers have the tracks of a real worker (`engine/trace`). A further group of tracks shows
requests as clients see them, before and after the first token. Requests share a track if they do
not overlap.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

from vllm_sched.bench.results.outcome import Outcome
from vllm_sched.files import write_whole
from vllm_sched.sim.types import Engines

MICRO: Final = 1e6
CLIENTS: Final = 1
# Process ids: an engine's trace uses two.
FIRST_WORKER, GROUPS = 10, 10


@runtime_checkable
class TracedEngine(Protocol):
    def trace_events(self, now: float) -> Sequence[dict[str, Any]]:
        """Return the events, in Chrome's format."""


def write(path: Path, engines: Engines, outcomes: Iterable[Outcome], now: float) -> None:
    events = [*_client_events(outcomes)]
    for number, (name, engine) in enumerate(engines.items()):
        if isinstance(engine, TracedEngine):
            events += _make_ids_unique(
                engine.trace_events(now), name, FIRST_WORKER + GROUPS * number
            )
    content = {"displayTimeUnit": "ms", "otherData": {"clock": "virtual"}, "traceEvents": events}
    write_whole(path, json.dumps(content, separators=(",", ":")) + "\n")


def _client_events(outcomes: Iterable[Outcome]) -> Iterator[Mapping[str, Any]]:
    yield _named("process_name", CLIENTS, 0, "requests as clients see them")
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    tracks = 0
    for outcome in sorted(outcomes, key=lambda outcome: outcome.at):
        while busy and busy[0][0] <= outcome.at:
            heappush(free, heappop(busy)[1])
        if free:
            track = heappop(free)
        else:
            tracks += 1
            track = tracks
            yield _named("thread_name", CLIENTS, track, f"{track}")
        heappush(busy, (outcome.end, track))
        first = outcome.ticks[0] if outcome.ticks else outcome.end
        facts = {
            "class": outcome.klass,
            "tenant": outcome.tenant,
            "worker": outcome.worker,
            "prompt_tokens": outcome.prompt_tokens,
            "output_tokens": outcome.completed,
            "error": outcome.error,
        }
        name = f"{outcome.klass} {outcome.prompt_tokens:,} tokens"
        yield _slice(track, f"{name}: until the first token", outcome.at, first, facts)
        if outcome.end > first:
            yield _slice(track, f"{name}: output", first, outcome.end, facts)


def _make_ids_unique(
    events: Iterable[dict[str, Any]], worker: str, base: int
) -> Iterator[Mapping[str, Any]]:
    for event in events:
        event["pid"] += base
        if event["name"] == "process_name":
            event["args"] = {"name": f"{event['args']['name']} of {worker}"}
        yield event


def _named(what: str, process: int, thread: int, name: str) -> Mapping[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def _slice(
    track: int, name: str, start: float, end: float, facts: Mapping[str, Any]
) -> Mapping[str, Any]:
    begin = round(start * MICRO)
    return {
        "ph": "X", "name": name, "pid": CLIENTS, "tid": track, "ts": begin,
        "dur": max(round(end * MICRO) - begin, 0), "args": facts,
    }  # fmt: skip
