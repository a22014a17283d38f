"""The size of a long prompt's chunk, found by comparing step times.

Now and then one step has half the chunk of the steps around it. The line through both shows the
fixed time of a step, and so what a smaller chunk loses (see `cost.chunk_loss`), on this machine,
with this context and under this load: both sides are equally slow on a busy machine. The size
halves when the mean loss is surely within the accepted one. It doubles when this size probably
loses too much against the double, because too large a chunk loses no time. The more often nothing
changes, the rarer the comparisons.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final, NamedTuple

from vllm_sched.cost.chunk_loss import accepted_loss, least_chunk, loss_against_double
from vllm_sched.policies.types import StepResult

# The first size is this share of the budget.
FIRST_SHARE: Final = 1 / 4
# Steps between two comparisons.
MIN_INTERVAL, MAX_INTERVAL = 2, 32
# Comparisons without a result after which they become rarer; some results are still under way.
MAX_IN_VAIN: Final = 3
# After this many comparisons without a decision, either size will do.
UNDECIDED: Final = 16
# Comparisons before the size may halve: steps with short prompts in them can mislead.
MIN_TO_HALVE: Final = 4
# The steps around the smaller one have at least this many times its tokens, and as many as planned
# within a factor of two.
MIN_RATIO: Final = 4 / 3
# One stalled step says nothing about the chunk.
MIN_LOSS, MAX_LOSS = -0.5, 1.0
# Weight of the newest step.
GAIN: Final = 0.1


class LongChunk(NamedTuple):
    """The limit of all long prompts' tokens in one step."""

    tokens: int
    min_tokens: int  # with the tokens of short prompts taken from it


class LongStep(NamedTuple):
    tokens: int  # of all prefills
    seconds: float
    end: int  # tokens computed of the long prompt


class MeanLoss:
    """The mean of the losses, and how uncertain it is."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self._squares = 0.0  # of the differences from the mean

    def add(self, loss: float) -> None:
        self.count += 1
        difference = loss - self.mean
        self.mean += difference / self.count
        self._squares += difference * (loss - self.mean)

    @property
    def error(self) -> float:
        """Return the 95 % limit of the mean's error; infinite for a single loss."""
        if (degrees := self.count - 1) < 1:  # of freedom
            return math.inf
        return (2 + 12 / degrees**2) * math.sqrt(self._squares / degrees / self.count)


class ChunkSize:
    """The present size, and the losses of half of it since it last changed."""

    def __init__(self, max_tokens: int, block_tokens: int, itl_s: float) -> None:
        self._max_tokens = max_tokens
        self._min_tokens = least_chunk(max_tokens, block_tokens)
        self._block_tokens = block_tokens
        self._itl_s = itl_s
        self.tokens = self._in_blocks(max(int(max_tokens * FIRST_SHARE), self._min_tokens))
        self.token_s = 0.0  # seconds per token of a long prompt
        self._recent: deque[LongStep] = deque(maxlen=3)
        self._loss = MeanLoss()
        self._interval = MIN_INTERVAL  # steps from one comparison to the next
        self._steps_since_comparison = 0
        self._comparisons_in_vain = 0  # no result, because other prompts filled the steps

    @property
    def usual_chunk(self) -> LongChunk:
        return LongChunk(self.tokens, min_tokens=-(-self.tokens // 2))

    def next_chunk(self) -> LongChunk:
        """Return the chunk of the next step of a long prompt, which may be a comparison."""
        self._steps_since_comparison += 1
        if self._steps_since_comparison < self._interval:
            return self.usual_chunk
        self._steps_since_comparison = 0
        self._comparisons_in_vain += 1
        if self._comparisons_in_vain > MAX_IN_VAIN:
            self._compare_less_often()
        return LongChunk(max(self.tokens // 2, 1), min_tokens=1)

    def observe(self, result: StepResult) -> None:
        """Compare a step with its neighbours of the same prompt."""
        recent = self._recent
        if (step := self._long_step(result)) is None:
            recent.clear()
            return
        recent.append(step)
        if len(recent) == 3:
            self._compare(*recent)

    def _long_step(self, result: StepResult) -> LongStep | None:
        """Return the step of the long prompt; None if it says nothing about the chunk."""
        recent, tokens = self._recent, result.shape.prefill_tokens
        # With data parallelism a step lasts as long as the slowest rank's.
        others = max((other.prefill_tokens for other in result.others), default=0)
        if not tokens or not result.seconds > 0 or others > tokens:
            return None
        ends = {chunk.context: chunk.context + chunk.tokens for chunk in result.chunks}
        end = ends.get(recent[-1].end) if recent else None
        if end is None:
            # Another long prompt: the prompt computed furthest.
            recent.clear()
            end = max(ends.values())
        return LongStep(tokens, result.seconds, end)

    def _compare(self, before: LongStep, tried: LongStep, after: LongStep) -> None:
        tokens, seconds = (before.tokens + after.tokens) / 2, (before.seconds + after.seconds) / 2
        gain = GAIN if self.token_s else 1.0
        self.token_s += gain * (seconds / tokens - self.token_s)
        planned = self.tokens / 2 <= tokens <= 2 * self.tokens
        if not planned or tokens < MIN_RATIO * tried.tokens:
            return
        # The line through both steps: its time without tokens, and at the present size.
        fixed_s = (tried.seconds * tokens - seconds * tried.tokens) / (tokens - tried.tokens)
        step_s = fixed_s + (seconds - fixed_s) / tokens * self.tokens
        if step_s > 0:
            self._comparisons_in_vain = 0
            self._loss.add(max(min(fixed_s / step_s, MAX_LOSS), MIN_LOSS))
            self._change_if_sure(step_s)

    def _change_if_sure(self, step_s: float) -> None:
        loss, error = self._loss.mean, self._loss.error
        accepted = accepted_loss(step_s, self._itl_s)
        accepted_of_double = accepted_loss(2 * step_s, self._itl_s)
        double = min(2 * self.tokens, self._max_tokens)
        if loss + error < accepted and self._loss.count < MIN_TO_HALVE:
            return
        if loss + error < accepted and self.tokens // 2 >= self._min_tokens:
            self._set_tokens(self.tokens // 2)
        elif loss_against_double(loss - error / 2) > accepted_of_double and double > self.tokens:
            self._set_tokens(double)
        elif abs(loss - accepted) > error:
            self._loss = MeanLoss()
            self._compare_less_often()
        elif self._loss.count % UNDECIDED == 0:
            self._compare_less_often()

    def _compare_less_often(self) -> None:
        self._interval = min(2 * self._interval, MAX_INTERVAL)

    def _in_blocks(self, tokens: int) -> int:
        """Return a size of whole blocks, or the whole budget."""
        return tokens - tokens % self._block_tokens if tokens < self._max_tokens else tokens

    def _set_tokens(self, tokens: int) -> None:
        self.tokens = self._in_blocks(tokens)
        self._recent.clear()
        self._loss = MeanLoss()
        self._interval = MIN_INTERVAL
