"""Measure what steps of a worker take, from outside, through its OpenAI API.

- decode alone: streams that run together; a gap between two tokens is a step.
- both: a prompt is sent to a worker that decodes; the gap that ends when the prompt's first token
  comes is the step that prefilled it. One of many steps leaves as many gaps, each of them a chunk
  after more and more context: up to the longest prompt that the worker takes.
- prefill alone: prompts that come while another one, the plug, is being prefilled. They have the
  next step to themselves, which lasts from the plug's token to theirs.
- whole prompts, each on its own, from request to first token: what is not steps, the front, and
  whether the steps of a long prompt add up to what it takes.

Every point is the median of a few. Not the quickest: a token that is handed on late makes one gap
longer and the next one shorter. Prompts that are timed are random, so that no prefix of theirs is
cached.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, Self

from vllm_sched.bench.calibrate.token_times import MeasureError, TimedStream, TokenApi, session
from vllm_sched.cost.calibration import Measured
from vllm_sched.cost.step_time import StepShape

# Tokens streamed, of which the first few and the last are not of full batches.
STREAMED, WINDOW = 44, 8
REPEATS: Final = 5
BATCH_PROMPTS: Final = (1, 4)
# Of long prompts, each of which takes long.
LONG_REPEATS: Final = 3
LONG: Final = 4096
# Of a prompt, whose time is mostly that of its attention.
LEAST_PART: Final = 16
# Of whole prompts, and what the worker rests before each.
LONE_REPEATS, IDLE_S = 15, 0.15
# A step between two chunks, or before the first, is so much shorter than a chunk.
SHORTER: Final = 0.7
# Steps that streams may take from one prompt to the next.
BETWEEN: Final = 40
# Prompts follow the plug so much later; tokens that come further apart are of different steps.
FOLLOW_S: Final = 0.002
TOGETHER: Final = 0.3


@dataclass(frozen=True)
class CalibrationPlan:
    """What is measured."""

    batches: tuple[int, ...]
    contexts: tuple[int, ...]  # of decodes; together they have no more than the longest of them
    prompts: tuple[int, ...]  # of one step
    budget: int
    seed: int = 0

    @classmethod
    def of(cls, *, budget: int, max_batch: int, max_model_len: int, seed: int = 0) -> Self:
        """Spread what is measured over what the worker takes."""
        batches = [1]
        while batches[-1] * 2 <= max_batch:
            batches.append(batches[-1] * 2)
        most = max_model_len - 2 * STREAMED - 4
        longest = min(budget - max_batch, most)
        if longest < 64:
            raise MeasureError(
                f"a step of {budget} tokens leaves a prompt {longest} beside {max_batch} decodes, "
                "64 are needed; give a larger --budget or a smaller --max-batch"
            )
        prompts = sorted({round(16 * (longest / 16) ** (n / 9)) for n in range(10)})
        contexts = {16, longest // 4, longest, most}
        while (further := max(each for each in contexts if each < most) * 4) < most:
            contexts.add(further)
        return cls(tuple(batches), tuple(sorted(contexts)), tuple(prompts), budget, seed)

    def contexts_of(self, batch: int) -> list[int]:
        """Leave out what so many together may find no room for, but for those of one step."""
        most = self.contexts[-1]
        return [each for each in self.contexts if batch * each <= most or each <= self.prompts[-1]]


@dataclass(frozen=True)
class LonePrompt:
    """A whole prompt that had the worker to itself, from the request to its token."""

    tokens: int
    seconds: float


@dataclass(frozen=True)
class MeasuredSteps:
    """What was measured."""

    steps: list[Measured]
    lone: list[LonePrompt]


class StepMeter(TokenApi):
    """A worker, and the requests that measure it."""

    async def measure(self, plan: CalibrationPlan, tell: Callable[[str], None]) -> MeasuredSteps:
        """Measure everything, after a warm-up that is thrown away."""
        tell("warming up")
        await self._decode(plan.batches[-1], plan.contexts[0], plan.budget)
        await self._prefill(1, plan.prompts[-1], plan.prompts[-1])
        found: list[Measured] = []
        for batch in plan.batches:
            for context in plan.contexts_of(batch):
                tell(f"decoding: {batch} at a time, context {context}")
                found += await self._decode(batch, context, plan.budget)
        for count in BATCH_PROMPTS:
            for tokens in plan.prompts:
                if count * tokens <= plan.prompts[-1]:
                    tell(f"prefill alone: {count} of {tokens} tokens")
                    found += await self._prefill(count, tokens, plan.prompts[-1])
        for batch in plan.batches:
            tell(f"both: prompts beside {batch} decoding")
            found += await self._mixed(batch, plan)
        # The whole of what the worker takes, and a quarter of it beside many.
        for batch, part in ((1, 1.0), (plan.batches[-1], 0.25)):
            tell(f"both: a long prompt beside {batch} decoding")
            found += await self._chunks(batch, plan, part)
        tell("both: the ends of long prompts beside 1 decoding")
        found += await self._ends(plan)
        tell("whole prompts")
        return MeasuredSteps(found, [await self._lone(tokens) for tokens in self._alone(plan)])

    # One kind of step each

    async def _decode(self, batch: int, context: int, budget: int) -> list[Measured]:
        # Those that came first write on while the others' prompts are computed.
        length = 2 * STREAMED + 4 * batch + batch * context // budget
        length = min(length, self.max_model_len - context - 1)
        async with self.streams(batch, context, length) as streams:
            for stream in streams:
                await stream.reached(1)
            latest = max(streams, key=lambda stream: stream.ticks[0])
            await latest.reached(STREAMED)
        gaps = [
            (gap, latest.tokens[at])
            for at in range(2, len(latest.ticks))
            if latest.tokens[at] <= STREAMED and (gap := latest.gap(at)) is not None
        ]
        found = []
        for start in range(0, len(gaps) - WINDOW + 1, WINDOW):
            window = gaps[start : start + WINDOW]
            seconds = statistics.median(gap for gap, _ in window)
            each = context + round(statistics.fmean(token for _, token in window)) - 1
            found.append(Measured(StepShape(decodes=batch, context_tokens=batch * each), seconds))
        return found

    async def _mixed(self, batch: int, plan: CalibrationPlan) -> list[Measured]:
        rounds = [tokens for tokens in plan.prompts for _ in range(REPEATS)]
        found: list[Measured] = []
        gaps: dict[int, list[float]] = {tokens: [] for tokens in plan.prompts}
        contexts: list[int] = []
        # Long enough for all prompts with some steps between; they are cut off at the end.
        steps = min(len(rounds) * BETWEEN, self.max_model_len - plan.contexts[0] - 1)
        async with self.streams(batch, plan.contexts[0], steps) as streams:
            for stream in streams:
                await stream.reached(1)
            for tokens in rounds:
                if any(stream.count + BETWEEN > steps for stream in streams):
                    break
                if (step := await self._beside(streams, tokens)) is not None:
                    gaps[tokens].append(step[0])
                    contexts.append(step[1])
        for tokens, seen in gaps.items():
            if len(seen) > REPEATS // 2:
                context = round(statistics.median(contexts))
                shape = StepShape(tokens, tokens * tokens / 2, batch, context, prompts=1)
                found.append(Measured(shape, statistics.median(seen)))
        return found

    async def _beside(
        self, streams: Sequence[TimedStream], tokens: int
    ) -> tuple[float, int] | None:
        """Time the step that prefills one prompt beside running streams."""
        newcomer = await self.stream(self.prompt(tokens), 1)
        (found,) = await _before(streams, newcomer.ticks[0], 1)
        return found

    async def _prefill(self, prompts: int, tokens: int, plug: int) -> list[Measured]:
        """Time a step that prefills so many prompts of so many tokens and does nothing else."""
        times: list[float] = []
        for _ in range(2 * REPEATS):
            if (seconds := await self._behind(prompts, tokens, plug)) is not None:
                times.append(seconds)
            if len(times) == REPEATS:
                break
        if len(times) <= REPEATS // 2:
            return []
        shape = StepShape(prompts * tokens, prompts * tokens * tokens / 2, prompts=prompts)
        return [Measured(shape, statistics.median(times))]

    async def _behind(self, prompts: int, tokens: int, plug: int) -> float | None:
        """Time the step behind a plug; None if the prompts were not all in it, alone."""
        batch = [self.prompt(tokens) for _ in range(prompts)]
        first, then = await asyncio.gather(
            self.stream(self.prompt(plug), 1), self.stream(batch, 1, after_s=FOLLOW_S)
        )
        seconds = then.ticks[0] - first.ticks[0]
        return seconds if then.ticks[-1] - then.ticks[0] < TOGETHER * seconds else None

    def _most_chunks(self, batch: int, plan: CalibrationPlan, prompts: int) -> int:
        """Count the steps of the longest prompt for which streams leave room, so many times."""
        room = min(self.max_model_len, self.kv_tokens or self.max_model_len) - 2 - plan.budget
        # Streams write on for as long as the prompts last.
        spare = batch * (plan.contexts[0] + prompts * BETWEEN)
        return (room - spare) // (plan.budget - batch + prompts * batch)

    async def _ends(self, plan: CalibrationPlan) -> list[Measured]:
        """Time small parts of prompts that have a long context: their last steps."""
        chunk, own = plan.budget - 1, plan.contexts[0]
        parts = [part for part in (chunk // 16, chunk // 4, chunk // 2) if part >= LEAST_PART]
        prompts = 2 * LONG_REPEATS * len(parts)
        most = self._most_chunks(1, plan, prompts)
        if most < 2:
            return []
        found: list[Measured] = []
        async with self.streams(1, own, prompts * (most + BETWEEN)) as streams:
            await streams[0].reached(2)
            for count in (most // 2, most):
                for part in parts:
                    tokens = count * chunk + part
                    seen = [await self._beside(streams, tokens) for _ in range(LONG_REPEATS)]
                    if good := [each for each in seen if each is not None]:
                        pairs = part * (count * chunk + part / 2)
                        context = round(statistics.median(each[1] for each in good))
                        seconds = statistics.median(each[0] for each in good)
                        shape = StepShape(part, pairs, 1, context, 1, count * chunk)
                        found.append(Measured(shape, seconds))
        return found

    async def _chunks(self, batch: int, plan: CalibrationPlan, part: float) -> list[Measured]:
        """Time the steps of one long prompt, each of which has all that streams leave it."""
        chunk, own = plan.budget - batch, plan.contexts[0]
        count = int(part * self._most_chunks(batch, plan, LONG_REPEATS))
        if count < 2:
            return []
        steps = LONG_REPEATS * (count + BETWEEN)
        seen: list[list[tuple[float, int]]] = [[] for _ in range(count + 1)]
        async with self.streams(batch, own, steps) as streams:
            for stream in streams:
                await stream.reached(2)
            for _ in range(LONG_REPEATS):
                if any(stream.count + count + BETWEEN // 2 > steps for stream in streams):
                    break
                newcomer = await self.stream(self.prompt(count * chunk), 1)
                for index, found in enumerate(await _before(streams, newcomer.ticks[0], count + 1)):
                    if found is not None:
                        seen[index].append(found)
        times = [statistics.median(gap for gap, _ in each) if each else None for each in seen]
        firsts = [each for each in times[1 : 2 + count // 4] if each is not None]
        if times[0] and firsts and times[0] > SHORTER * statistics.median(firsts):
            raise MeasureError(
                f"a prompt of {count * chunk} tokens beside {batch} decoding was not computed in "
                f"{count} steps: --budget {plan.budget} must be the worker's "
                "max_num_batched_tokens, and no policy of its own may size its chunks"
            )
        return [
            Measured(
                StepShape(
                    chunk,
                    chunk * (index * chunk + chunk / 2),
                    batch,
                    round(statistics.median(context for _, context in each)),
                    prompts=1,
                    read_tokens=index * chunk,
                ),
                seconds,
            )
            for index, (each, seconds) in enumerate(zip(seen[1:], times[1:], strict=True))
            if seconds is not None
        ]

    def _alone(self, plan: CalibrationPlan) -> list[int]:
        """Choose whole prompts: of one step, and two of many."""
        most = self.max_model_len - 2
        longs = [each for each in (most // 4, most) if each > plan.budget]
        return [*plan.prompts[::3], *longs]

    async def _lone(self, tokens: int) -> LonePrompt:
        """Time a prompt that has the worker to itself, from the request to its token."""
        times = []
        for _ in range(LONG_REPEATS if tokens > LONG else LONE_REPEATS):
            await asyncio.sleep(IDLE_S)  # a worker that has just done the like is quicker
            began = time.perf_counter()
            times.append((await self.stream(self.prompt(tokens), 1)).ticks[0] - began)
        return LonePrompt(tokens, statistics.median(times))


async def _before(
    streams: Sequence[TimedStream], moment: float, steps: int
) -> list[tuple[float, int] | None]:
    """Give the last steps until a moment: how long each took, and the context that it read."""
    # Its tokens come with the newcomer's, a little before or after.
    for stream in streams:
        await stream.moved(3)
        # One that was slow to begin a newcomer leaves streams that have ended before it did.
        if stream.ended and moment - stream.ticks[-1] > stream.ticks[-1] - stream.ticks[-2]:
            return [None] * steps
    ends = [stream.nearest(moment) for stream in streams]
    found: list[tuple[float, int] | None] = []
    for back in range(steps - 1, -1, -1):
        at = [(stream, end - back) for stream, end in zip(streams, ends, strict=True)]
        gaps = [gap for stream, n in at if (gap := stream.gap(n)) is not None]
        context = sum(stream.prompt_tokens + stream.tokens[n] - 1 for stream, n in at if n >= 0)
        found.append((statistics.median(gaps), context) if gaps else None)
    return found


@asynccontextmanager
async def meter(url: str, seed: int = 0) -> AsyncIterator[StepMeter]:
    """Meet a worker."""
    async with session() as found:
        worker = StepMeter(found, url, seed)
        await worker.meet()
        await worker.read_cache()
        yield worker
