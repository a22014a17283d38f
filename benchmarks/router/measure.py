"""Run the same load against every side in turns.

Sides take turns within each kind of load, in another order each round, so that a slow minute of the
machine affects all of them. Answers before a window are not counted; errors always are.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from benchmarks.router.load import Load, Tally, closed_loop, streams
from benchmarks.router.processes import Memory, cpu_seconds, memory
from benchmarks.router.prompts import Pace, Prompts
from benchmarks.router.stage import DIRECT, Side
from vllm_sched.bench.results.stats import percentile

KIB = 1024
STREAM_BYTES = KIB
TAIL_S = 0.5  # that streams continue after their window


@dataclass(frozen=True)
class Closed:
    """A closed loop."""

    body_bytes: int
    connections: int
    hands_over: bool = False  # from a prefill worker to a decode worker


@dataclass(frozen=True)
class Paced:
    """Streams in parallel."""

    streams: int
    gap_ms: int
    start_s: float  # time over which the streams start
    hands_over: bool = False


Kind = Closed | Paced

CHUNKS, MANY_STREAMS, ONE_BY_ONE = "chunks", "streams", "c1"
LOADS: dict[str, Kind] = {
    "1kb-c32": Closed(KIB, 32),
    "1kb-c256": Closed(KIB, 256),
    "100kb-c32": Closed(100 * KIB, 32),
    "100kb-c256": Closed(100 * KIB, 256),
    "400kb-c8": Closed(400 * KIB, 8),
    "1mb-c8": Closed(1024 * KIB, 8),
    "3mb-c8": Closed(3 * 1024 * KIB, 8),
    ONE_BY_ONE: Closed(KIB, 1),
    CHUNKS: Paced(64, gap_ms=25, start_s=0.025),  # one gap, so that chunks come evenly
    MANY_STREAMS: Paced(2000, gap_ms=500, start_s=2.0),
    "pd-1kb-c32": Closed(KIB, 32, hands_over=True),
    "pd-100kb-c32": Closed(100 * KIB, 32, hands_over=True),
    "pd-chunks": Paced(64, gap_ms=25, start_s=0.025, hands_over=True),
}
ONCE = (MANY_STREAMS,)  # only in the last round


@dataclass(frozen=True)
class Times:
    """Durations in seconds."""

    warm_up: float = 0.4
    closed: float = 1.2
    paced: float = 3.0


QUICK = Times(warm_up=0.2, closed=0.4, paced=1.0)


@dataclass(frozen=True)
class Sample:
    load: str
    side: str
    round: int
    seconds: float
    done: int
    events: int
    cpu_s: float
    p50_s: float | None
    p99_s: float | None
    most_open: int  # parallel streams
    errors: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Results:
    """The samples of all windows, and the routers' memory after them."""

    samples: list[Sample]
    memory: dict[str, Memory]


async def measure(
    sides: Sequence[Side],
    loads: Sequence[str],
    rounds: int,
    times: Times,
    report_progress: Callable[[str], None],
) -> Results:
    """Run all rounds; streams are not measured on the bare worker."""
    samples = []
    for number in range(1, rounds + 1):
        for name in loads:
            if name in ONCE and number < rounds:
                continue
            kind = LOADS[name]
            turns = [side for side in sides if side.hands_over == kind.hands_over]
            if isinstance(kind, Paced):
                turns = [side for side in turns if side.name != DIRECT]
            shift = number % len(turns) if turns else 0
            for side in turns[shift:] + turns[:shift]:
                report_progress(f"round {number} of {rounds}: {name}, {side.name}")
                samples.append(await play(side, name, number, times))
    # The first of two routers with one name counts, because its load is the same in all runs.
    held = {side.name: memory(pids) for side in reversed(sides) if (pids := side.pids())}
    return Results(samples, held)


async def play(side: Side, name: str, number: int, times: Times) -> Sample:
    """Run one load on one side and return the sample of its window."""
    kind = LOADS[name]
    seconds = times.closed if isinstance(kind, Closed) else times.paced
    seed = number << 8 | [*LOADS].index(name)
    gc.collect()  # not in the window
    pids = side.pids()
    async with _loaded(side, kind, seed, times) as load:
        gc.disable()
        try:
            load.tally = Tally()
            begin, before = time.perf_counter(), cpu_seconds(pids)
            await asyncio.sleep(seconds)
            used, took = cpu_seconds(pids) - before, time.perf_counter() - begin
            tally, load.tally = load.tally, Tally()
        finally:
            gc.enable()
    assert side.pids() == pids  # otherwise CPU time is missing
    return Sample(
        name, side.name, number, took, tally.done, tally.events, used,
        percentile(tally.latencies, 50), percentile(tally.latencies, 99),
        load.most_open, dict(load.errors),
    )  # fmt: skip


@asynccontextmanager
async def _loaded(side: Side, kind: Kind, seed: int, times: Times) -> AsyncIterator[Load]:
    """Start the load and warm it up."""
    if isinstance(kind, Closed):
        prompts = Prompts(kind.body_bytes, seed=seed)
        async with closed_loop(side.port, prompts, kind.connections) as load:
            await asyncio.sleep(times.warm_up)
            yield load
        return
    duration_s = kind.start_s + times.warm_up + times.paced + TAIL_S
    pace = Pace(max(2, round(duration_s * 1000 / kind.gap_ms)), kind.gap_ms)
    prompts = Prompts(STREAM_BYTES, seed=seed, pace=pace)
    async with streams(side.port, prompts, kind.streams, kind.start_s) as load:
        await asyncio.sleep(kind.start_s + times.warm_up)
        yield load
