"""Measure a worker's step times from outside, through its OpenAI API.

- decode alone: streams run together; the gap between two tokens is one step.
- both: a prompt arrives at a decoding worker. The gap before the prompt's first token is the step
  that prefilled it; a long prompt gives one gap per chunk.
- prefill alone: prompts arrive while another prompt, the plug, is prefilled. They share the next
  step, which lasts from the plug's token to theirs.
- whole prompts, one at a time, from request to first token: the time outside the steps (the front).
  Their rounds alternate with the steps, so that other load on the machine is in both.

Each point is a median, because a late token makes one gap longer and the next one shorter. Timed
prompts are random, so that none of their prefixes is cached.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Final, NamedTuple, Self

from vllm_sched.bench.calibrate.token_times import MeasureError, TimedStream, TokenApi, wire_to
from vllm_sched.cost.step_time import StepShape, TimedStep

# Streamed tokens; the first and last are not from full batches.
STREAM_TOKENS, WINDOW_TOKENS = 44, 8
REPEATS: Final = 5
BATCH_PROMPTS: Final = (1, 4)
# Repeats of long prompts.
LONG_REPEATS: Final = 3
CHUNK_TRIES: Final = 3
LONG_PROMPT_TOKENS: Final = 4096
# A prompt's last part below this is mostly attention time.
MIN_PART_TOKENS: Final = 16
# Repeats of whole prompts in each round, and idle time before each.
LONE_REPEATS, IDLE_S = 3, 0.15
# A step without a chunk takes at most this share of a step with a chunk.
MAX_SHORT_STEP_RATIO: Final = 0.7
# Most steps of a stream between two prompts.
MAX_STEPS_BETWEEN: Final = 40
# Delay after the plug; tokens further apart are from different steps.
PLUG_LEAD_S: Final = 0.002
MAX_TOKEN_SPREAD: Final = 0.3


@dataclass(frozen=True)
class CalibrationPlan:
    batches: tuple[int, ...]
    contexts: tuple[int, ...]  # of decodes; the sum in a batch is at most the longest
    prompts: tuple[int, ...]  # prompts of one step
    budget: int
    seed: int = 0

    @classmethod
    def from_limits(cls, *, budget: int, max_batch: int, max_model_len: int, seed: int = 0) -> Self:
        batches = [1]
        while batches[-1] * 2 <= max_batch:
            batches.append(batches[-1] * 2)
        max_context = max_model_len - 2 * STREAM_TOKENS - 4
        longest = min(budget - max_batch, max_context)
        if longest < 64:
            raise MeasureError(
                f"a step of {budget} tokens leaves a prompt {longest} next to {max_batch} decodes, "
                "and 64 are needed; give a larger --budget or a smaller --max-batch"
            )
        prompts = sorted({round(16 * (longest / 16) ** (n / 9)) for n in range(10)})
        contexts = {16, longest // 4, longest, max_context}
        while (
            further := max(context for context in contexts if context < max_context) * 4
        ) < max_context:
            contexts.add(further)
        return cls(tuple(batches), tuple(sorted(contexts)), tuple(prompts), budget, seed)

    def contexts_of(self, batch: int) -> list[int]:
        max_context = self.contexts[-1]
        return [
            context
            for context in self.contexts
            if batch * context <= max_context or context <= self.prompts[-1]
        ]


@dataclass(frozen=True)
class LonePrompt:
    """A whole prompt that ran alone, from the request to its token."""

    tokens: int
    seconds: float


class SeenStep(NamedTuple):
    """A step as the gap between two tokens of streams."""

    seconds: float
    context: int  # of the streams


def median_seconds(seen: Iterable[SeenStep]) -> float:
    return statistics.median(step.seconds for step in seen)


def median_context(seen: Iterable[SeenStep]) -> int:
    return round(statistics.median(step.context for step in seen))


@dataclass(frozen=True)
class MeasuredSteps:
    steps: list[TimedStep]
    lone: list[LonePrompt]


class StepMeter(TokenApi):
    async def measure(self, plan: CalibrationPlan, tell: Callable[[str], None]) -> MeasuredSteps:
        """Measure all steps of a plan; an error names the part that failed."""
        part = ""

        def begin(text: str) -> None:
            nonlocal part
            part = text
            tell(text)

        try:
            return await self._measure_all(plan, begin)
        except MeasureError as error:
            raise MeasureError(f'{error} (during "{part}")') from None

    async def _measure_all(
        self, plan: CalibrationPlan, tell: Callable[[str], None]
    ) -> MeasuredSteps:
        tell("warming up")
        await self._measure_decode(plan.batches[-1], plan.contexts[0], plan.budget)
        await self._measure_prefill(1, plan.prompts[-1], plan.prompts[-1])
        steps: list[TimedStep] = []
        lone: dict[int, list[float]] = {tokens: [] for tokens in self._prompt_lengths(plan)}
        # Long prompts come first, because they show whether steps have another budget.
        for measure_part in (
            self._measure_long_prompts,
            self._measure_decodes,
            self._measure_prefills,
            self._measure_mixes,
            self._measure_ends,
        ):
            steps += await measure_part(plan, tell)
            # After each part, because the machine's load may change during the measurement.
            await self._measure_alone(lone, tell)
        return MeasuredSteps(
            steps, [LonePrompt(tokens, statistics.median(times)) for tokens, times in lone.items()]
        )

    # The parts of a measurement

    async def _measure_long_prompts(
        self, plan: CalibrationPlan, tell: Callable[[str], None]
    ) -> list[TimedStep]:
        """Time the longest prompt next to one stream, and a quarter of it next to many."""
        steps: list[TimedStep] = []
        for batch, part in ((1, 1.0), (plan.batches[-1], 0.25)):
            tell(f"both: a long prompt next to {batch} decoding")
            steps += await self._measure_chunks(batch, plan, part)
        return steps

    async def _measure_decodes(
        self, plan: CalibrationPlan, tell: Callable[[str], None]
    ) -> list[TimedStep]:
        steps: list[TimedStep] = []
        for batch in plan.batches:
            for context in plan.contexts_of(batch):
                tell(f"decoding: {batch} at a time, context {context}")
                steps += await self._measure_decode(batch, context, plan.budget)
        return steps

    async def _measure_prefills(
        self, plan: CalibrationPlan, tell: Callable[[str], None]
    ) -> list[TimedStep]:
        steps: list[TimedStep] = []
        for count in BATCH_PROMPTS:
            for tokens in plan.prompts:
                if count * tokens <= plan.prompts[-1]:
                    tell(f"prefill alone: {count} of {tokens} tokens")
                    steps += await self._measure_prefill(count, tokens, plan.prompts[-1])
        return steps

    async def _measure_mixes(
        self, plan: CalibrationPlan, tell: Callable[[str], None]
    ) -> list[TimedStep]:
        steps: list[TimedStep] = []
        for batch in plan.batches:
            tell(f"both: prompts next to {batch} decoding")
            steps += await self._measure_mixed(batch, plan)
        return steps

    # One kind of step each

    async def _measure_decode(self, batch: int, context: int, budget: int) -> list[TimedStep]:
        # The first streams continue during the others' prompts.
        length = 2 * STREAM_TOKENS + 4 * batch + batch * context // budget
        length = min(length, self.max_model_len - context - 1)
        async with self.streams(batch, context, length) as streams:
            for stream in streams:
                await stream.wait_until(1)
            latest = max(streams, key=lambda stream: stream.ticks[0])
            await latest.wait_until(STREAM_TOKENS)
        gaps = [
            (gap, latest.tokens[at])
            for at in range(2, len(latest.ticks))
            if latest.tokens[at] <= STREAM_TOKENS and (gap := latest.gap(at)) is not None
        ]
        steps = []
        for start in range(0, len(gaps) - WINDOW_TOKENS + 1, WINDOW_TOKENS):
            window = gaps[start : start + WINDOW_TOKENS]
            seconds = statistics.median(gap for gap, _ in window)
            mean_context = context + round(statistics.fmean(token for _, token in window)) - 1
            steps.append(
                TimedStep(StepShape(decodes=batch, context_tokens=batch * mean_context), seconds)
            )
        return steps

    async def _measure_mixed(self, batch: int, plan: CalibrationPlan) -> list[TimedStep]:
        rounds = [tokens for tokens in plan.prompts for _ in range(REPEATS)]
        seen: dict[int, list[SeenStep]] = {tokens: [] for tokens in plan.prompts}
        # Enough for all prompts, with steps between them.
        steps = min(len(rounds) * MAX_STEPS_BETWEEN, self.max_model_len - plan.contexts[0] - 1)
        async with self.streams(batch, plan.contexts[0], steps) as streams:
            for stream in streams:
                await stream.wait_until(1)
            for tokens in rounds:
                if any(stream.count + MAX_STEPS_BETWEEN > steps for stream in streams):
                    break
                if (step := await self._time_beside_streams(streams, tokens)) is not None:
                    seen[tokens].append(step)
        context = median_context(chain.from_iterable(seen.values())) if any(seen.values()) else 0
        return [
            TimedStep(
                StepShape(tokens, tokens * tokens / 2, batch, context, prompts=1),
                median_seconds(steps),
            )
            for tokens, steps in seen.items()
            if len(steps) > REPEATS // 2
        ]

    async def _time_beside_streams(
        self, streams: Sequence[TimedStream], tokens: int
    ) -> SeenStep | None:
        newcomer = await self.stream(self.prompt(tokens), 1)
        (steps,) = await _last_steps(streams, newcomer.ticks[0], 1)
        return steps

    async def _measure_prefill(self, prompts: int, tokens: int, plug: int) -> list[TimedStep]:
        """Time a step that only prefills `prompts` prompts of `tokens` tokens."""
        times: list[float] = []
        for _ in range(2 * REPEATS):
            if (seconds := await self._time_behind_plug(prompts, tokens, plug)) is not None:
                times.append(seconds)
            if len(times) == REPEATS:
                break
        if len(times) <= REPEATS // 2:
            return []
        shape = StepShape(prompts * tokens, prompts * tokens * tokens / 2, prompts=prompts)
        return [TimedStep(shape, statistics.median(times))]

    async def _time_behind_plug(self, prompts: int, tokens: int, plug: int) -> float | None:
        """Return the time of the step after a plug; None if it did not hold all prompts."""
        batch = [self.prompt(tokens) for _ in range(prompts)]
        first, then = await asyncio.gather(
            self.stream(self.prompt(plug), 1), self.stream(batch, 1, after_s=PLUG_LEAD_S)
        )
        seconds = then.ticks[0] - first.ticks[0]
        return seconds if then.ticks[-1] - then.ticks[0] < MAX_TOKEN_SPREAD * seconds else None

    def _most_chunks(self, batch: int, plan: CalibrationPlan, prompts: int) -> int:
        """Return how many steps the longest prompt can have, next to streams, `prompts` times."""
        room = min(self.max_model_len, self.kv_tokens or self.max_model_len) - 2 - plan.budget
        # The streams continue during the prompts.
        spare = batch * (plan.contexts[0] + prompts * MAX_STEPS_BETWEEN)
        return (room - spare) // (plan.budget - batch + prompts * batch)

    async def _measure_ends(
        self, plan: CalibrationPlan, tell: Callable[[str], None]
    ) -> list[TimedStep]:
        """Time the last steps of long prompts: small parts with a long context."""
        tell("both: the ends of long prompts next to 1 decoding")
        chunk, own = plan.budget - 1, plan.contexts[0]
        parts = [part for part in (chunk // 16, chunk // 4, chunk // 2) if part >= MIN_PART_TOKENS]
        prompts = 2 * LONG_REPEATS * len(parts)
        max_chunks = self._most_chunks(1, plan, prompts)
        if max_chunks < 2:
            return []
        steps: list[TimedStep] = []
        async with self.streams(1, own, prompts * (max_chunks + MAX_STEPS_BETWEEN)) as streams:
            await streams[0].wait_until(2)
            for count in (max_chunks // 2, max_chunks):
                for part in parts:
                    tokens = count * chunk + part
                    seen = [
                        await self._time_beside_streams(streams, tokens)
                        for _ in range(LONG_REPEATS)
                    ]
                    if good := [prompt for prompt in seen if prompt is not None]:
                        pairs = part * (count * chunk + part / 2)
                        shape = StepShape(part, pairs, 1, median_context(good), 1, count * chunk)
                        steps.append(TimedStep(shape, median_seconds(good)))
        return steps

    async def _measure_chunks(
        self, batch: int, plan: CalibrationPlan, part: float
    ) -> list[TimedStep]:
        """Time the steps of a long prompt that uses the budget that the streams leave."""
        chunk = plan.budget - batch
        count = int(part * self._most_chunks(batch, plan, LONG_REPEATS))
        if count < 2:
            return []
        for _ in range(CHUNK_TRIES):  # other load on the machine can disturb one try
            before, *chunks = await self._chunk_steps(batch, plan, count)
            if _shows_chunks(before, chunks[: 1 + count // 4]):
                break
        else:
            raise MeasureError(
                f"a prompt of {count * chunk} tokens next to {batch} decoding was not computed in "
                f"{count} steps: --budget {plan.budget} must be the worker's "
                "max_num_batched_tokens, and the worker must have no policy that sizes chunks"
            )
        return [
            TimedStep(
                StepShape(
                    chunk,
                    chunk * (index * chunk + chunk / 2),
                    batch,
                    median_context(seen),
                    prompts=1,
                    read_tokens=index * chunk,
                ),
                median_seconds(seen),
            )
            for index, seen in enumerate(chunks)
            if seen
        ]

    async def _chunk_steps(
        self, batch: int, plan: CalibrationPlan, count: int
    ) -> list[list[SeenStep]]:
        """Return the step before a long prompt and its `count` steps, each as often as seen."""
        steps = LONG_REPEATS * (count + MAX_STEPS_BETWEEN)
        seen: list[list[SeenStep]] = [[] for _ in range(count + 1)]
        async with self.streams(batch, plan.contexts[0], steps) as streams:
            for stream in streams:
                await stream.wait_until(2)
            for _ in range(LONG_REPEATS):
                if any(stream.count + count + MAX_STEPS_BETWEEN // 2 > steps for stream in streams):
                    break
                newcomer = await self.stream(self.prompt(count * (plan.budget - batch)), 1)
                last = await _last_steps(streams, newcomer.ticks[0], count + 1)
                for steps_seen, step in zip(seen, last, strict=True):
                    if step is not None:
                        steps_seen.append(step)
        return seen

    def _prompt_lengths(self, plan: CalibrationPlan) -> list[int]:
        """Return the lengths of whole prompts: several of one step, two of many steps."""
        max_tokens = self.max_model_len - 2
        longs = [length for length in (max_tokens // 4, max_tokens) if length > plan.budget]
        return [*plan.prompts[::3], *longs]

    async def _measure_alone(
        self, times: dict[int, list[float]], tell: Callable[[str], None]
    ) -> None:
        """Add one round of whole prompts of each length."""
        tell("whole prompts")
        for tokens, seconds in times.items():
            for _ in range(1 if tokens > LONG_PROMPT_TOKENS else LONE_REPEATS):
                await asyncio.sleep(IDLE_S)  # a worker is faster directly after a prompt
                began = time.perf_counter()
                token = await self.stream(self.prompt(tokens), 1)
                seconds.append(token.ticks[0] - began)


def _shows_chunks(before: Sequence[SeenStep], chunks: Iterable[Sequence[SeenStep]]) -> bool:
    """Return False if the step before a prompt is as long as the prompt's first steps."""
    firsts = [median_seconds(seen) for seen in chunks if seen]
    if not before or not firsts:
        return True
    return median_seconds(before) <= MAX_SHORT_STEP_RATIO * statistics.median(firsts)


async def _last_steps(
    streams: Sequence[TimedStream], moment: float, steps: int
) -> list[SeenStep | None]:
    """Return the last steps until a moment; None for a step without a clear gap."""
    # The streams' tokens may arrive just before or after the prompt's.
    for stream in streams:
        await stream.wait_for_more(3)
        # The streams may have ended before a late prompt.
        if stream.ended and moment - stream.ticks[-1] > stream.ticks[-1] - stream.ticks[-2]:
            return [None] * steps
    ends = [stream.nearest(moment) for stream in streams]
    last_steps: list[SeenStep | None] = []
    for back in range(steps - 1, -1, -1):
        at = [(stream, end - back) for stream, end in zip(streams, ends, strict=True)]
        gaps = [gap for stream, n in at if (gap := stream.gap(n)) is not None]
        context = sum(stream.prompt_tokens + stream.tokens[n] - 1 for stream, n in at if n >= 0)
        last_steps.append(SeenStep(statistics.median(gaps), context) if gaps else None)
    return last_steps


@asynccontextmanager
async def meter(url: str, seed: int = 0) -> AsyncIterator[StepMeter]:
    with wire_to(url) as wire:
        worker = StepMeter(wire, seed)
        await worker.read_model()
        await worker.read_metrics()
        yield worker
