"""Play a schedule against an endpoint and check that this client keeps up."""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, islice
from math import inf
from typing import Final
from uuid import NAMESPACE_OID, uuid5

from vllm_sched.bench.client.endpoint import Endpoint
from vllm_sched.bench.client.events import EventStream
from vllm_sched.bench.client.priority import StallWatch, realtime_priority
from vllm_sched.bench.client.session_player import SessionPlayer
from vllm_sched.bench.client.text import Texts
from vllm_sched.bench.client.wire import WireError
from vllm_sched.bench.results.outcome import Outcome
from vllm_sched.bench.results.sessions import PlayedSession, cut_warning, unfinished_warning
from vllm_sched.bench.results.stats import percentile
from vllm_sched.bench.traffic.schedule import MIN_RETRY_PAUSE_S, Schedule
from vllm_sched.bench.traffic.types import Request

TIMEOUT_S: Final = 600.0
# Beyond these limits the client affects the figures.
LATE_LIMIT_S: Final = 0.05
STALL_LIMIT_S: Final = 0.1
BUSY_LIMIT: Final = 0.8


@dataclass
class RunProgress:
    began: float = field(default_factory=time.perf_counter)
    sent: int = 0
    done: int = 0
    failed: int = 0
    tokens: int = 0

    @property
    def in_flight(self) -> int:
        return self.sent - self.ended

    @property
    def ended(self) -> int:
        return self.done + self.failed


@dataclass(frozen=True)
class PlayedRun:
    """A finished run, or the finished part of an interrupted run."""

    outcomes: tuple[Outcome, ...]
    duration: float  # until the last response ended
    busy: float  # share of one CPU that this client took
    stall: float  # longest time without CPU
    interrupted: bool = False
    cut: int = 0  # requests shortened to the model's context
    short: int = 0  # responses that ended too early
    uncounted: int = 0  # responses without a token count
    sessions: tuple[PlayedSession, ...] = ()

    @property
    def late_p99(self) -> float:
        """The 99th percentile of the client's delay; at least 0, as timers may fire early."""
        return max(percentile((outcome.late for outcome in self.outcomes), 99) or 0.0, 0.0)

    def warnings(self) -> list[str]:
        warnings = []
        if self.late_p99 > LATE_LIMIT_S:
            warnings.append(
                f"this client could not keep up: it sent 1 % of the requests {self.late_p99:.2f} s "
                "late or more (latencies count from the planned time); reduce the load, or use "
                "more clients"
            )
        if self.stall > STALL_LIMIT_S:
            warnings.append(
                f"this client had no CPU for up to {self.stall:.2f} s: pauses of that "
                "length may be its own; measure on an idle machine"
            )
        if self.busy > BUSY_LIMIT:
            warnings.append(
                f"this client took {self.busy:.0%} of a CPU: near 100 % it limits the result; "
                "use more clients"
            )
        if self.cut:
            warnings.append(cut_warning(self.cut, "model", sessions=bool(self.sessions)))
        warnings += unfinished_warning(self.sessions)
        if self.short:
            warnings.append(f"{self.short} responses ended before the requested length")
        if self.uncounted:
            warnings.append(
                f"{self.uncounted} responses had no usage: each event counts as a token"
            )
        return warnings


async def play(
    endpoint: Endpoint,
    schedule: Schedule,
    *,
    salt: str = "",
    timeout_s: float = TIMEOUT_S,
    progress: RunProgress | None = None,
    stop: asyncio.Event | None = None,
) -> PlayedRun:
    """Play the schedule until its end or `stop`; a failed request is an outcome, not an exception.

    The schedule fixes lengths and times; `salt` fixes the words. A new salt prevents hits in a
    server's prefix cache.
    """
    _allow_many_connections()
    texts = Texts(f"{schedule.seed}/{salt}")
    player = _Player(
        endpoint, schedule, texts, timeout_s, progress or RunProgress(), stop or asyncio.Event()
    )
    with realtime_priority():
        return await player.run()


class _HeaderReader:
    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome
        self.retry_after_s = 0.0

    def take(self, name: bytes, value: bytes) -> None:
        if name == b"x-route":
            self._outcome.worker = value.partition(b";")[0].decode("latin-1").strip()
        elif name == b"retry-after" and value.isdigit():  # dates are rare and ignored
            self.retry_after_s = float(value)


class _Player:
    def __init__(
        self,
        endpoint: Endpoint,
        schedule: Schedule,
        texts: Texts,
        timeout_s: float,
        progress: RunProgress,
        stop: asyncio.Event,
    ) -> None:
        self._endpoint = endpoint
        self._schedule = schedule
        self._timeout_s = timeout_s
        self._progress = progress
        self._stop = stop
        self._texts = texts
        self._wire = endpoint.wire()
        self._outcomes: list[Outcome] = []
        self._cut = self._uncounted = 0
        # Less than the context: a text's length is an estimate.
        context = endpoint.max_model_len
        self._limit = context and context - context // 50 - 4
        self._sessions = SessionPlayer(
            endpoint, texts, self._send, self._now,
            limit=self._limit or inf, end=schedule.ends_after_s,
        )  # fmt: skip

    async def run(self) -> PlayedRun:
        wire = self._wire
        jobs = self._jobs()
        jobs = chain([*islice(jobs, 1)], jobs)  # the first is created before the clock starts
        cpu, self._start = time.process_time(), time.perf_counter()
        self._progress.began = self._start
        closed_loop = self._schedule.concurrency is not None
        sending = asyncio.create_task(
            self._play_closed(jobs) if closed_loop else self._play_open(jobs)
        )
        stopped = asyncio.create_task(self._stop.wait())
        try:
            async with StallWatch() as stalls:
                await asyncio.wait({sending, stopped}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, stopped):
                task.cancel()
            with suppress(asyncio.CancelledError):
                await sending
            wire.close()
        duration = self._now()
        return PlayedRun(
            outcomes=tuple(self._outcomes),
            duration=duration,
            busy=(time.process_time() - cpu) / duration if duration else 0.0,
            stall=stalls.longest_s,
            interrupted=self._stop.is_set(),
            cut=self._cut + self._sessions.cut,
            short=sum(
                outcome.good
                and self._endpoint.ignore_eos
                and outcome.completed < outcome.output_tokens
                for outcome in self._outcomes
            ),
            uncounted=self._uncounted,
            sessions=tuple(self._sessions.played),
        )

    async def _play_open(self, jobs: Iterator[tuple[Request, bytes]]) -> None:
        async with asyncio.TaskGroup() as group:
            for request, body in jobs:
                if (pause_s := request.at - self._now()) > 0:
                    await asyncio.sleep(pause_s)
                group.create_task(self._play(request, request.at, body))
                # Late requests leave no sleep, and without one no response would be read.
                await asyncio.sleep(0)

    async def _play_closed(self, jobs: Iterator[tuple[Request, bytes]]) -> None:
        """Keep `concurrency` requests in flight; pause after a failed one."""
        end = self._schedule.ends_after_s

        async def lane() -> None:
            pause_s = 0.0
            while end is None or self._now() + pause_s < end:
                job = next(jobs, None)
                if job is None:
                    return
                if pause_s:
                    await asyncio.sleep(pause_s)
                at = self._now()  # the body or the pause may have taken longer than planned
                if end is not None and at >= end:
                    return
                retry_after_s = await self._play(job[0], at, job[1])
                pause_s = 0.0 if retry_after_s is None else max(retry_after_s, MIN_RETRY_PAUSE_S)

        async with asyncio.TaskGroup() as group:
            for _ in range(self._schedule.concurrency or 1):
                group.create_task(lane())

    async def _play(self, request: Request, at: float, body: bytes) -> float | None:
        """Play a request or a session; return the seconds to wait if it failed, or None."""
        if request.begins is not None:
            return await self._sessions.play(request, at)
        return (await self._send(request, at, body))[1]

    async def _send(
        self, request: Request, at: float, body: bytes, token_events: list[bytes] | None = None
    ) -> tuple[Outcome, float | None]:
        outcome = Outcome.from_request(request, at)
        self._outcomes.append(outcome)
        outcome.sent = self._now()
        self._progress.sent += 1
        stream, headers = EventStream(outcome, token_events), _HeaderReader(outcome)
        try:
            await self._wire.stream(
                self._endpoint.path,
                body,
                lambda piece: stream.feed(piece, self._now()),
                self._timeout_s,
                on_header=headers.take,
                headers={"X-Session-Id": self._session_id(request.session)},
            )
            if not outcome.error and not (stream.done and outcome.ticks):
                outcome.error = f"the stream ended early, after {len(outcome.ticks)} tokens"
        except WireError as error:
            outcome.error = outcome.error or str(error)
        except asyncio.CancelledError:
            outcome.interrupted = True
            raise
        outcome.cached_tokens = stream.cached_tokens
        self._count(outcome)
        return outcome, headers.retry_after_s if outcome.error else None

    def _count(self, outcome: Outcome) -> None:
        outcome.context_tokens = min(outcome.context_tokens, outcome.prompt_tokens)
        counted, outcome.completed = outcome.completed, outcome.completed or len(outcome.ticks)
        if outcome.error:
            self._progress.failed += 1
            return
        self._uncounted += not counted
        self._progress.done += 1
        self._progress.tokens += outcome.completed

    def _jobs(self) -> Iterator[tuple[Request, bytes]]:
        for number, request in enumerate(self._schedule):
            if request.begins is not None:
                yield request, b""
                continue
            fitted = request if self._limit is None else request.fit_to(self._limit)
            self._cut += fitted is not request
            yield fitted, self._endpoint.request_body(self._texts, number, fitted)

    def _session_id(self, name: str) -> str:
        return str(uuid5(NAMESPACE_OID, f"{self._texts.seed}/{name}")) if name else ""

    def _now(self) -> float:
        return time.perf_counter() - self._start


def _allow_many_connections() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
