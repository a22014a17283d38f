"""Play a workload against one worker and record when every token arrives.

The client shares the machine with the worker, so it does little work: request bodies are made
before the clock starts, and a few bytes identify a token event.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass

from vllm_sched.bench.client.events import EventStream
from vllm_sched.bench.client.priority import StallWatch, realtime_priority
from vllm_sched.bench.client.wire import COMPLETIONS, Address, Wire, WireError
from vllm_sched.bench.compare.workloads import PlannedRequest, Workload
from vllm_sched.bench.results.outcome import Outcome
from vllm_sched.workers.launch import WorkerError

REQUEST_TIMEOUT_S = 600.0
# A worker closes idle connections after some seconds.
NO_REUSE = {"Connection": "close"}


@dataclass(frozen=True)
class Round:
    number: int
    records: tuple[Outcome, ...]
    lone: tuple[Outcome, ...] = ()
    stall: float = 0.0  # longest time that this client had no CPU
    began: float = 0.0  # the start on the machine's monotonic clock

    @property
    def failed(self) -> list[Outcome]:
        return [record for record in (*self.records, *self.lone) if record.error]


def request_body(model: str, prompt: Sequence[int], output_tokens: int, lane: str = "") -> bytes:
    """Return a completion request that generates exactly `output_tokens`."""
    arguments = {"vllm_xargs": {"lane": lane}} if lane else {}
    return json.dumps(
        {
            **arguments,
            "model": model,
            "prompt": list(prompt),
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            # The worker's own count, to check the ticks.
            "stream_options": {"include_usage": True},
        }
    ).encode()


async def play(
    url: str,
    model: str,
    workload: Workload,
    number: int,
    *,
    lone_samples: int = 0,
    on_done: Callable[[Outcome], None] = lambda _: None,
) -> Round:
    """Play round `number`; a failed request is a record with an error, unless it fills the cache.

    The clock starts when every background request has streamed a token. At the end, `lone_samples`
    requests run one by one on the idle worker.
    """
    planned = list(zip(workload.prompts(number), workload.arrivals, strict=True))
    bodies = [
        request_body(model, prompt, arrival.output_tokens, arrival.lane)
        for prompt, arrival in planned
    ]
    cached = [
        prompt[: arrival.cached_tokens] for prompt, arrival in planned if arrival.cached_tokens
    ]
    lone_bodies = [
        request_body(model, prompt, 1) for prompt in workload.lone_prompts(number, lone_samples)
    ]
    wire = Wire(Address.parse(url), NO_REUSE)
    warming, client = _Client(wire, lambda _: None), _Client(wire, on_done)
    with realtime_priority(), closing(wire):
        for prefix in cached:
            body, record = request_body(model, prefix, 1), Outcome(0.0, "", len(prefix), 1)
            if error := (await warming.send(body, record)).error:
                raise WorkerError(f"a prefix of {len(prefix)} tokens could not be cached: {error}")
        async with StallWatch() as stalls:
            records = await client.play(workload.arrivals, bodies, number)
            lone = [
                await client.send(body, Outcome(0.0, "lone", workload.lone_prompt_tokens, 1))
                for body in lone_bodies
            ]
    return Round(number, tuple(records), tuple(lone), stalls.longest_s, client.began)


class _Client:
    def __init__(self, wire: Wire, on_done: Callable[[Outcome], None]) -> None:
        self._wire = wire
        self._on_done = on_done
        self.began = time.perf_counter()

    async def play(
        self, arrivals: Sequence[PlannedRequest], bodies: Sequence[bytes], number: int
    ) -> list[Outcome]:
        records = [
            Outcome(a.at, a.klass, a.prompt_tokens, a.output_tokens, name=f"round{number}-{index}")
            for index, a in enumerate(arrivals)
        ]
        jobs = list(zip(arrivals, bodies, records, strict=True))
        async with asyncio.TaskGroup() as group:
            started = []
            for arrival, body, record in jobs:
                if arrival.before_start:
                    running = asyncio.Event()
                    group.create_task(self.send(body, record, running))
                    started.append(running.wait())
            await asyncio.gather(*started)
            before, self.began = self.began, time.perf_counter()
            for arrival, _, record in jobs:
                if arrival.before_start:  # its ticks so far used the earlier clock
                    record.at = record.sent = record.sent - (self.began - before)
                    record.ticks[:] = [tick - (self.began - before) for tick in record.ticks]
            for arrival, body, record in jobs:
                if not arrival.before_start:
                    group.create_task(self._send_at(arrival.at, body, record))
        return records

    async def send(
        self, body: bytes, record: Outcome, running: asyncio.Event | None = None
    ) -> Outcome:
        """Send a request now; set `running` at its first token or its end."""
        record.at = record.sent = self._now()  # no wait of the client counts
        stream = EventStream(record)

        def take(piece: bytes) -> None:
            stream.feed(piece, self._now())
            if running and record.ticks:
                running.set()

        try:
            headers = {"X-Request-Id": record.name}
            await self._wire.stream(COMPLETIONS, body, take, REQUEST_TIMEOUT_S, headers=headers)
        except WireError as error:
            record.error = str(error)
        if not record.error and not (stream.done and record.completed == record.output_tokens):
            got = record.completed or len(record.ticks)
            record.error = f"the stream ended after {got} of {record.output_tokens} tokens"
        if running:
            running.set()
        self._on_done(record)
        return record

    async def _send_at(self, at: float, body: bytes, record: Outcome) -> None:
        await asyncio.sleep(at - self._now())
        await self.send(body, record)

    def _now(self) -> float:
        return time.perf_counter() - self.began
