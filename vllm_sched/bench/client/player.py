"""Play a schedule against an endpoint, and watch whether this client keeps up."""

from __future__ import annotations

import asyncio
import resource
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from vllm_sched.bench.client.events import EventStream
from vllm_sched.bench.client.text import Texts
from vllm_sched.bench.client.wire import WireError
from vllm_sched.bench.compare.runner import ahead_of_others
from vllm_sched.bench.results.outcome import Outcome
from vllm_sched.bench.results.stats import percentile
from vllm_sched.bench.traffic.schedule import AGAIN_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_sched.bench.client.endpoint import Endpoint
    from vllm_sched.bench.client.wire import Wire
    from vllm_sched.bench.traffic.schedule import Schedule
    from vllm_sched.bench.traffic.types import Request

TIMEOUT_S: Final = 600.0
WATCH_S: Final = 0.05
# Beyond these the client is part of what is measured.
LATE_LIMIT_S: Final = 0.05
STALL_LIMIT_S: Final = 0.1
BUSY_LIMIT: Final = 0.8


@dataclass
class RunProgress:
    """How far a run is, for those who watch."""

    began: float = field(default_factory=time.perf_counter)
    sent: int = 0
    done: int = 0
    failed: int = 0
    tokens: int = 0

    @property
    def in_flight(self) -> int:
        """Requests under way."""
        return self.sent - self.ended

    @property
    def ended(self) -> int:
        """Requests that are over, well or not."""
        return self.done + self.failed


@dataclass(frozen=True)
class PlayedRun:
    """A finished run, or the part of one until the user had enough."""

    outcomes: tuple[Outcome, ...]
    duration: float  # until the last answer ended
    busy: float  # the share of one processor that this client took
    stall: float  # the longest time that it was held up
    interrupted: bool = False
    cut: int = 0  # requests cut to what the model holds
    short: int = 0  # answers that ended before their length
    uncounted: int = 0  # answers that did not say how many tokens they have

    @property
    def late_p99(self) -> float:
        """How long after its time a request was sent, at the 99th percentile.

        A timer may fire a little early.
        """
        return max(percentile((each.late for each in self.outcomes), 99) or 0.0, 0.0)

    def warnings(self) -> list[str]:
        """Say what makes the figures doubtful."""
        found = []
        if self.late_p99 > LATE_LIMIT_S:
            found.append(
                f"this client could not keep up: it sent 1 % of the requests {self.late_p99:.2f} s "
                "late or more (latencies count from when they should have been sent); ask for "
                "less, or use more clients"
            )
        if self.stall > STALL_LIMIT_S:
            found.append(
                f"this client was held up for as long as {self.stall:.2f} s: pauses of that "
                "length may be its own; measure where nothing else runs"
            )
        if self.busy > BUSY_LIMIT:
            found.append(
                f"this client took {self.busy:.0%} of a processor: at 100 % it is what is "
                "measured; use more clients"
            )
        if self.cut:
            found.append(
                f"{self.cut} requests were cut to what the model holds; --scale makes all shorter"
            )
        if self.short:
            found.append(f"{self.short} answers ended before the length asked for")
        if self.uncounted:
            found.append(
                f"{self.uncounted} answers told no usage: each event is counted as a token"
            )
        return found


async def play(
    endpoint: Endpoint,
    schedule: Schedule,
    *,
    salt: str = "",
    timeout_s: float = TIMEOUT_S,
    tally: RunProgress | None = None,
    stop: asyncio.Event | None = None,
) -> PlayedRun:
    """Play it to its end, or until `stop` is set; a failed request is an outcome, no exception.

    The schedule fixes lengths and times, `salt` the words: under another one, a server's prefix
    cache has nothing left of an earlier run.
    """
    _allow_many_connections()
    texts = Texts(f"{schedule.seed}/{salt}")
    player = _Player(
        endpoint, schedule, texts, timeout_s, tally or RunProgress(), stop or asyncio.Event()
    )
    with ahead_of_others():
        return await player.run()


class _Player:
    def __init__(
        self,
        endpoint: Endpoint,
        schedule: Schedule,
        texts: Texts,
        timeout_s: float,
        tally: RunProgress,
        stop: asyncio.Event,
    ) -> None:
        self._endpoint = endpoint
        self._schedule = schedule
        self._timeout_s = timeout_s
        self._tally = tally
        self._stop = stop
        self._texts = texts
        self._outcomes: list[Outcome] = []
        self._cut = self._uncounted = 0

    async def run(self) -> PlayedRun:
        wire = self._endpoint.wire()
        stall = _Stall()
        watch = asyncio.create_task(stall.watch())
        first = self._numbered()
        head = next(first, None)  # made before the clock starts
        cpu, self._start = time.process_time(), time.perf_counter()
        self._tally.began = self._start
        closed = self._schedule.concurrency is not None
        sending = asyncio.create_task(
            self._closed(wire, _chained(head, first))
            if closed
            else self._open(wire, _chained(head, first))
        )
        stopped = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({sending, stopped}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, stopped, watch):
                task.cancel()
            with suppress(asyncio.CancelledError):
                await sending
            wire.close()
        duration = self._now()
        return PlayedRun(
            outcomes=tuple(self._outcomes),
            duration=duration,
            busy=(time.process_time() - cpu) / duration if duration else 0.0,
            stall=stall.longest,
            interrupted=self._stop.is_set(),
            cut=self._cut,
            short=sum(
                each.good and self._endpoint.ignore_eos and each.completed < each.output_tokens
                for each in self._outcomes
            ),
            uncounted=self._uncounted,
        )

    async def _open(self, wire: Wire, jobs: Iterator[tuple[Request, bytes]]) -> None:
        """Send each at its time, whatever became of those before."""
        async with asyncio.TaskGroup() as group:
            for request, body in jobs:
                if (early := request.at - self._now()) > 0:
                    await asyncio.sleep(early)
                group.create_task(self._one(wire, request, request.at, body))
                # Behind its time it would never pause, and none of the answers be read.
                await asyncio.sleep(0)

    async def _closed(self, wire: Wire, jobs: Iterator[tuple[Request, bytes]]) -> None:
        """Keep so many under way; the next begins when one ends, or a pause after it failed."""
        end = self._schedule.ends_after_s

        async def lane() -> None:
            pause_s = 0.0
            while end is None or self._now() + pause_s < end:
                job = next(jobs, None)
                if job is None:
                    return
                if pause_s:
                    await asyncio.sleep(pause_s)
                retry_after_s = await self._one(wire, job[0], self._now(), job[1])
                pause_s = 0.0 if retry_after_s is None else max(retry_after_s, AGAIN_S)

        async with asyncio.TaskGroup() as group:
            for _ in range(self._schedule.concurrency or 1):
                group.create_task(lane())

    async def _one(self, wire: Wire, request: Request, at: float, body: bytes) -> float | None:
        """Play one; if it failed, return the seconds that the answer asked to wait (or 0)."""
        outcome = Outcome(
            at, request.klass, request.prompt_tokens, request.output_tokens, request.tenant
        )
        self._outcomes.append(outcome)
        outcome.sent = self._now()
        self._tally.sent += 1
        stream = EventStream(outcome)
        headers = _Headers(outcome)
        try:
            await wire.stream(
                self._endpoint.path,
                body,
                headers.take,
                lambda piece: stream.feed(piece, self._now()),
                self._timeout_s,
            )
            if not outcome.error and not (stream.done and outcome.ticks):
                outcome.error = f"the stream ended early, after {len(outcome.ticks)} tokens"
        except WireError as error:
            outcome.error = outcome.error or str(error)
        except asyncio.CancelledError:
            outcome.interrupted = True
            raise
        counted, outcome.completed = outcome.completed, outcome.completed or len(outcome.ticks)
        if outcome.error:
            self._tally.failed += 1
            return headers.retry_after_s
        self._uncounted += not counted
        self._tally.done += 1
        self._tally.tokens += outcome.completed
        return None

    def _numbered(self) -> Iterator[tuple[Request, bytes]]:
        limit = self._endpoint.max_model_len
        for number, request in enumerate(self._schedule):
            fitted = request if limit is None else request.fitted(limit - _slack(limit))
            self._cut += fitted is not request
            yield fitted, self._endpoint.request_body(self._texts, number, fitted)

    def _now(self) -> float:
        return time.perf_counter() - self._start


class _Stall:
    """Notices when this process got no processor, which would pass for a slow server."""

    def __init__(self) -> None:
        self.longest = 0.0

    async def watch(self) -> None:
        while True:
            asleep = time.perf_counter()
            await asyncio.sleep(WATCH_S)
            self.longest = max(self.longest, time.perf_counter() - asleep - WATCH_S)


def _slack(limit: int) -> int:
    """Leave room for what the length of a text is uncertain by."""
    return limit // 50 + 4


class _Headers:
    """What of an answer's headers is of use."""

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome
        self.retry_after_s = 0.0

    def take(self, name: bytes, value: bytes) -> None:
        if name == b"x-route":
            self._outcome.worker = value.partition(b";")[0].decode("latin-1").strip()
        elif name == b"retry-after" and value.isdigit():  # else it is a date, and seldom
            self.retry_after_s = float(value)


def _chained(
    head: tuple[Request, bytes] | None, rest: Iterator[tuple[Request, bytes]]
) -> Iterator[tuple[Request, bytes]]:
    if head is not None:
        yield head
        yield from rest


def _allow_many_connections() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
