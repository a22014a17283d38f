"""A trace of the engine's steps for Perfetto: `VLLM_SCHED_TRACE=out.json`.

Steps are kept in memory, and written in Chrome's trace format at the end and on SIGUSR1. The file
has a track for steps, counters, and a track per request. Times are monotonic, in microseconds.

Cost: about 1 us per step, and 40 bytes per request and step.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import signal
import threading
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

logger = logging.getLogger("vllm.vllm_sched")

VARIABLE = "VLLM_SCHED_TRACE"
WRITE_SIGNAL = signal.SIGUSR1
# Requests times steps: 20 MB, written in 1 of the 5 s of vLLM's shutdown.
MAX_ENTRIES = 500_000

ENGINE, REQUESTS = 1, 2  # Perfetto's processes: groups of tracks
MICRO = 1e6


class TracedArrival(NamedTuple):
    at: float
    request_id: str
    prompt_tokens: int


class TracedStep(NamedTuple):
    number: int
    start: float
    end: float
    budget: int
    tokens: Mapping[str, int]  # by request
    contexts: Mapping[str, int]  # of prefills: tokens computed before
    num_running: int
    num_waiting: int
    preempted: Collection[str] = ()  # at its scheduling
    ended: Collection[str] = ()  # ended or aborted before its scheduling

    @property
    def prefill_tokens(self) -> int:
        return sum(self.tokens[request_id] for request_id in self.contexts)

    @property
    def kind(self) -> str:
        return step_kind(len(self.contexts), len(self.tokens) - len(self.contexts))


def step_kind(prefills: int, decodes: int) -> str:
    if prefills:
        return "mixed" if decodes else "prefill"
    return "decode" if decodes else "empty"


class EngineTrace:
    """A log of the latest arrivals and steps."""

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self._max_entries = max_entries
        self._entries = 0
        self._log: deque[TracedArrival | TracedStep] = deque()

    def __len__(self) -> int:
        """Return the entries: 1 per arrival, 1 + requests per step."""
        return self._entries

    def record_arrival(self, at: float, request_id: str, prompt_tokens: int) -> None:
        self._append(TracedArrival(at, request_id, prompt_tokens), 1)

    def record_step(self, step: TracedStep) -> None:
        """Record a finished step; steps come in the order of scheduling."""
        self._append(step, 1 + len(step.tokens))

    def _append(self, entry: TracedArrival | TracedStep, entries: int) -> None:
        self._log.append(entry)
        self._entries += entries
        while self._entries > self._max_entries:
            dropped = self._log.popleft()
            self._entries -= 1 if isinstance(dropped, TracedArrival) else 1 + len(dropped.tokens)

    def copy(self) -> list[TracedArrival | TracedStep]:
        return list(self._log)


@dataclass(slots=True)
class _Track:
    number: int
    idle_since: float | None  # None while it runs
    phase: str = "waiting"
    last: float = 0.0  # end of the last step


class _Replay:
    def __init__(self) -> None:
        self._tracks: dict[str, _Track] = {}
        self._numbers = itertools.count(1)

    def events(
        self, log: Iterable[TracedArrival | TracedStep], now: float, engine: str
    ) -> Iterator[str]:
        yield _track_name("process_name", ENGINE, 0, f"engine {engine}")
        yield _track_name("process_name", REQUESTS, 0, f"requests on engine {engine}")
        yield _track_name("thread_name", ENGINE, 1, "steps")
        for entry in log:
            if isinstance(entry, TracedArrival):
                tokens = f"{entry.prompt_tokens:,} tokens"
                yield self._begin_track(entry.request_id, tokens, entry.at)
            else:
                yield from self._step(entry)
        for track in self._tracks.values():
            yield from _idle_until(track, now)

    def _begin_track(self, request_id: str, remark: str, idle_since: float | None) -> str:
        track = _Track(next(self._numbers), idle_since)
        self._tracks[request_id] = track
        return _track_name("thread_name", REQUESTS, track.number, f"{request_id} ({remark})")

    def _step(self, step: TracedStep) -> Iterator[str]:
        for request_id in step.ended:
            if (track := self._tracks.pop(request_id, None)) is not None:
                yield from _idle_until(track, step.start)
        for request_id in step.preempted:
            if (track := self._tracks.get(request_id)) is not None:
                track.idle_since, track.phase = max(track.last, step.start), "preempted"
        if step.tokens:
            yield from self._engine_events(step)
            for request_id, tokens in step.tokens.items():
                yield from self._request_events(step, request_id, tokens)

    @staticmethod
    def _engine_events(step: TracedStep) -> Iterator[str]:
        prefill = step.prefill_tokens
        total = sum(step.tokens.values())
        prefills = len(step.contexts)
        facts = (
            f'"step":{step.number},"budget":{step.budget},"tokens":{total},'
            f'"prefill_tokens":{prefill},"prefills":{prefills},'
            f'"decodes":{len(step.tokens) - prefills}'
        )
        yield _slice(ENGINE, 1, step.kind, step.start, step.end, facts)
        yield _counter("tokens", step.start, f'"prefill":{prefill},"decode":{total - prefill}')
        yield _counter("budget", step.start, f'"tokens":{step.budget}')
        counts = f'"running":{step.num_running},"waiting":{step.num_waiting}'
        yield _counter("requests", step.start, counts)

    def _request_events(self, step: TracedStep, request_id: str, tokens: int) -> Iterator[str]:
        if request_id not in self._tracks:  # its arrival was dropped
            yield self._begin_track(request_id, "came before", idle_since=None)
        track = self._tracks[request_id]
        yield from _idle_until(track, step.start)
        name, facts = "decode", f'"tokens":{tokens}'
        if (context := step.contexts.get(request_id)) is not None:
            name, facts = "prefill", f'{facts},"computed_before":{context}'
        yield _slice(REQUESTS, track.number, name, step.start, step.end, facts)
        track.last = step.end


def _idle_until(track: _Track, now: float) -> Iterator[str]:
    if track.idle_since is not None:
        yield _slice(REQUESTS, track.number, track.phase, track.idle_since, now)
        track.idle_since = None


def chrome_trace(
    log: Iterable[TracedArrival | TracedStep], now: float, engine: str = "0"
) -> Iterator[str]:
    yield '{"displayTimeUnit":"ms","otherData":{"clock":"monotonic"},"traceEvents":[\n'
    before = ""
    for event in _Replay().events(log, now, engine):
        yield before + event
        before = ",\n"
    yield "\n]}\n"


def _track_name(kind: str, process: int, thread: int, name: str) -> str:
    event = {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}
    return json.dumps(event, separators=(",", ":"))


# Formatted by hand: a serializer takes five times as long.


def _slice(process: int, thread: int, name: str, start: float, end: float, facts: str = "") -> str:
    # Ends are rounded, not durations, so that neighbours do not overlap.
    begin = round(start * MICRO)
    return (
        f'{{"ph":"X","name":"{name}","pid":{process},"tid":{thread},"ts":{begin},'
        f'"dur":{max(round(end * MICRO) - begin, 0)},"args":{{{facts}}}}}'
    )


def _counter(name: str, at: float, values: str) -> str:
    at_us = round(at * MICRO)
    return f'{{"ph":"C","name":"{name}","pid":{ENGINE},"tid":0,"ts":{at_us},"args":{{{values}}}}}'


def path_for(path: Path, engine: int, engines: int) -> Path:
    """Return the file of an engine: several engines have one each."""
    return path if engines == 1 else path.with_name(f"{path.stem}.engine{engine}{path.suffix}")


class TraceFile:
    def __init__(self, path: Path, engine: str = "0") -> None:
        self.path = path
        self.trace = EngineTrace()
        self._engine = engine
        self._writing = threading.Lock()

    def write(self, now: float) -> None:
        """Replace the file atomically."""
        log = self.trace.copy()
        with self._writing:
            partial = self.path.with_name(f"{self.path.name}.part")
            try:
                with partial.open("w", encoding="utf-8") as file:
                    file.writelines(chrome_trace(log, now, self._engine))
                partial.replace(self.path)
            except OSError as error:  # the engine survives a full disk
                logger.error("the trace could not be written to %s: %s", self.path, error)
                return
        logger.info("wrote a trace of %d entries to %s", len(log), self.path)

    def write_in_thread(self, now: float) -> threading.Thread:
        writer = threading.Thread(target=self.write, args=(now,), name="trace", daemon=True)
        writer.start()
        return writer


def from_environment(engine: int, engines: int) -> TraceFile | None:
    """Return the trace that VLLM_SCHED_TRACE asks for, None if it is unset."""
    if not (name := os.environ.get(VARIABLE)):
        return None
    return TraceFile(path_for(Path(name).absolute(), engine, engines), str(engine))
