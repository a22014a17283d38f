"""The chunk that sizes itself: as much prefill in a step as keeps decodes within their gap.

Idea: stall-free chunks (Sarathi) whose size comes from deadlines (FairBatching), since no chunk
fits every mix of decodes, contexts and prompts. With decodes about, a step's budget is the largest
whose predicted time stays within `itl_ms`; without them it is the engine's whole one. `chunk` sets
the size by hand instead.

The prediction is a model of step times fitted while running. It is corrected by how far off it was
of late, and by a guess where no prompt has been yet, since it may have seen short ones alone; and a
step is meant to take less than the target by a margin, the largest error of the last `KEPT` steps
but for a stall or two, so that fewer than one in a hundred are longer. Until the model knows
enough, and beside it always, a chunk is at most half as long again as one that was seen to fit.

With pipeline parallelism several steps are under way and a request decodes in one of them, so its
gap lasts for as many steps as there are stages. Each step then has its part of `itl_ms`.

Data-parallel ranks of an expert model step together, and a step lasts as long as the slowest rank's
part. The policy learns from the part that is predicted to be longest, of all ranks that it sees.

With `ttft_ms` a prompt that would miss it may spend what decodes are ahead of their deadlines
(arrival + ttft_ms + j·itl_ms for the j-th token), up to `MOST_GAP` gaps in one step. Those that
wait count too. Without `ttft_ms` no prompt can be late, so nothing is spent.

The size is for whom the step serves: those in prefill at their places, or one of a better class who
enters (beside `lanes`), whose part of the step they leave alone. Where vLLM keeps images whole (for
models that attend to all of one at once) a step that comes to an image is as large as that needs.

Cost per step: O(running prefills), and O(decodes) in steps that spend. How it fails: where decodes
alone take longer than `itl_ms` prefill goes on at `min_chunk` tokens a step and the target is
missed; a target below what a small chunk costs makes prompts wait long; stalls for other reasons in
more than one step of a hundred make all steps shorter, and where decodes take half of the target by
far.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Mapping
from itertools import pairwise
from statistics import fmean
from typing import ClassVar, Final

from pydantic import Field

from vllm_sched.cost.fit import OnlineFit
from vllm_sched.cost.step_time import Chunk, StepShape, StepTime
from vllm_sched.errors import UsageError
from vllm_sched.policies.types import (
    EngineFacts,
    LaneCount,
    Policy,
    RequestView,
    Settings,
    Step,
    StepResult,
    one_class,
)

# The first chunk beside decodes, and by how much one may exceed those that fitted.
FIRST_CHUNK: Final = 256
GROWTH, SHRINK = 1.5, 0.5
# A step was meant to be full from this share of what was allowed: the rest of a prompt is not.
MEANT_FULL: Final = 0.75
# Below so many tokens a step's time says nothing about its chunk.
ENOUGH_TOKENS: Final = 16
# How quickly the correction follows steps that took longer than it says, two in a row, and shorter;
# and by how much at once.
DRIFT_UP, DRIFT_DOWN, MOST_DRIFT = 1.0, 0.1, 1.5
# So many times longer than predicted may be, at most, what goes further into a prompt than any yet.
NEW_GROUND: Final = 2.0
# The margin is the largest error of so many steps, once enough were seen.
KEPT, ENOUGH_ERRORS = 256, 64
# So few of them that are so many times the next largest were stalls: a margin for these would make
# all other steps short, and without it they are still fewer than one in a hundred.
STALLS, STALL = 2, 1.2
LEAST_MARGIN, FIRST_MARGIN, MOST_MARGIN = 1.03, 1.15, 2.0
# The longest gap that saved time may buy, in gaps.
MOST_GAP: Final = 4.0


class ChunkBudgetSettings(Settings):
    """The target, or a size by hand."""

    itl_ms: float = Field(
        100.0, gt=0, description="gap between two tokens that a step with prefill may cause"
    )
    ttft_ms: float | None = Field(
        None, gt=0, description="time to first token for which decodes give what they are ahead"
    )
    chunk: int | None = Field(
        None, ge=1, description="prefill tokens of a step with decodes, instead of by itl_ms"
    )
    min_chunk: int = Field(
        32, ge=1, description="prefill tokens that a step has in any case, so that prompts move"
    )


class ChunkBudget(Policy):
    """See the module's text."""

    name: ClassVar[str] = "chunk_budget"
    settings_type: ClassVar[type[Settings]] = ChunkBudgetSettings
    settings: ChunkBudgetSettings
    # A prefill that stands before decodes would take their tokens too.
    arranges = True

    def __init__(self, facts: EngineFacts, settings: ChunkBudgetSettings) -> None:
        super().__init__(facts, settings)
        if not facts.cuts_prompts:
            # In a step that is made small a prompt that can't be cut would not fit, ever.
            raise UsageError(
                "chunk_budget sizes the chunks of prompts, and this engine reads them whole "
                "(--no-enable-chunked-prefill, or a model that can't have them in chunks); leave "
                "the policy out or let prompts be cut"
            )
        self.fit = OnlineFit()
        self.learns = settings.chunk is None
        self.drift = 1.0  # what steps took of late over what was predicted
        self._ratio = 1.0  # what the last one took
        self._furthest = 1.0  # tokens into a prompt, of the middles of all chunks so far
        self._errors: deque[float] = deque()  # that is left of it, by age
        self._sorted: list[float] = []  # and by size
        self._gap_s = max(settings.itl_ms / 1000, sys.float_info.min)
        # With pipeline parallelism a request decodes once in as many steps as there are stages.
        self._stages = facts.pipeline_stages
        self._itl_s = max(self._gap_s / self._stages, sys.float_info.min)  # of one step
        # The steps of the last gap, and their seconds.
        self._gap: deque[tuple[StepShape, float]] = deque(maxlen=self._stages)
        self._bound = float(FIRST_CHUNK)
        self._fitting = math.inf  # tokens that would have fitted into the last step with a full one
        self._tokens = facts.max_num_batched_tokens  # of prefill, as last decided
        self._predicted_s = 0.0
        self._limits: deque[tuple[int, float]] = deque(maxlen=KEPT)  # of steps not back yet
        self._spent_steps = 0
        self._long_steps = 0

        # What follows is of the current step alone.
        self._seconds: float | None = None  # left for prefill; None = no limit but the budget
        self._moves = 0  # tokens still owed to `min_chunk`
        self._decodes = self._context_tokens = 0
        self._waiting = False  # whether anybody does
        self._kept_s = 0.0  # of those, for one who enters and is of a better class than others
        self._kept_for: RequestView | None = None
        self._class_of: Callable[[RequestView], float] = one_class

    def begin_step(self, step: Step, lanes: Mapping[str, LaneCount]) -> None:
        """Start without a limit: `budget` is not asked where nobody could prefill."""
        self._seconds = None
        self._kept_for = None
        self._waiting = any(lane.requests for lane in lanes.values())

    def budget(self, step: Step) -> int:
        """Return the largest budget that keeps decodes on time."""
        if not step.decodes:
            self._tokens = step.budget
            return step.budget
        settings = self.settings
        if settings.chunk is not None:
            return self._with_decodes(step, settings.chunk)
        new_ground = self._new_ground(step)
        tokens = int(min(self._bound, self._fitting / new_ground))
        allowed = self._allowed(step)
        self._limits.append((step.index, allowed))
        if (model := self.fit.model) is not None:
            self._seconds = allowed / (self.margin * self.drift * new_ground)
            # About as many decode in each step.
            self._decodes = -(-len(step.decoding) // self._stages)
            self._context_tokens = step.context_tokens // self._stages
            self._moves = settings.min_chunk
            fitting = self._fitting_tokens(step, model, self._seconds)
            tokens = min(int(GROWTH * self._bound * (allowed / self._itl_s)), fitting)
        return self._with_decodes(step, max(tokens, settings.min_chunk))

    def _with_decodes(self, step: Step, tokens: int) -> int:
        """Return the budget for so many tokens of prefill; there may be room for fewer."""
        self._tokens = min(tokens, max(step.budget - step.decodes, 1))
        return step.decodes + self._tokens

    def chunk(self, request: RequestView, computed: int, tokens: int) -> int:
        """Cut to the time that is left: a token costs more the further on its prompt is."""
        model = self.fit.model
        if self._seconds is None or model is None:
            return tokens
        left = self._seconds
        if (head := self._kept_for) is request:
            self._kept_for = None
        elif head is not None and self._class_of(request) > self._class_of(head):
            left -= self._kept_s
        fitting = model.prefill_within(left, self._decodes, self._context_tokens, computed)
        granted = min(tokens, max(fitting, self._moves, 0))
        if granted <= 0:
            return 0  # nothing of it is read either
        self._moves -= granted
        self._seconds -= model.chunk_seconds(Chunk(granted, computed))
        return granted

    def _fitting_tokens(self, step: Step, model: StepTime, seconds: float) -> int:
        """Count the tokens that fit, each prompt's at its place, in the order they are served."""
        decodes, context_tokens = self._decodes, self._context_tokens
        head = self._overtaking(step)
        tokens = 0
        for request in step.prefills:
            if head is not None and step.class_of(request) > step.class_of(head):
                break
            computed = request.num_computed_tokens
            rest = request.num_tokens - computed
            fitting = model.prefill_within(seconds, decodes, context_tokens, computed)
            if fitting < rest:
                return tokens + fitting
            tokens += rest
            seconds -= model.chunk_seconds(Chunk(rest, computed))
        fitting = model.prefill_within(seconds, decodes, context_tokens, 0)
        if head is not None and fitting:
            self._kept_s = model.chunk_seconds(Chunk(min(fitting, head.num_tokens), 0))
            self._kept_for, self._class_of = head, step.class_of
        return tokens + fitting

    def _overtaking(self, step: Step) -> RequestView | None:
        """Return who enters and is of a better class than some in prefill; None if nobody does."""
        if step.class_of is one_class or not (step.prefills and self._waiting):
            return None
        # One that found no room may do so again.
        if step.free_slots <= 0 or step.refused is not None:
            return None
        head = step.may_enter()
        if head is None or step.class_of(head) >= step.class_of(step.prefills[-1]):
            return None
        return head

    def _new_ground(self, step: Step) -> float:
        """Return what a chunk may take over the prediction, should all of it be attention."""
        context = max((r.num_computed_tokens for r in step.prefills), default=0)
        beyond = (context + self._bound / 2) / self._furthest
        return min(max(beyond, 1.0), NEW_GROUND)

    def _allowed(self, step: Step) -> float:
        """Return how long the step may be."""
        ttft_ms = self.settings.ttft_ms
        if ttft_ms is None or not self._is_at_risk(step, ttft_ms / 1000):
            return self._itl_s
        # Every deadline less what all have in common: ttft_ms and the clock's offset.
        first = min(r.arrival_time + self._gap_s * r.num_output_tokens for r in step.decoding)
        ahead = first + step.clock_offset + ttft_ms / 1000 - step.now
        allowed = min(max(ahead / self._stages, self._itl_s), MOST_GAP * self._itl_s)
        self._spent_steps += allowed > self._itl_s
        return allowed

    def _is_at_risk(self, step: Step, ttft_s: float) -> bool:
        """Whether somebody in prefill, or in front, would be late at the pace of full gaps."""
        pace = max(min(self._tokens, self._bound), 1.0) / self._itl_s
        before = 0
        for request in step.prefills:
            before += request.num_tokens - request.num_computed_tokens
            due = request.arrival_time + step.clock_offset + ttft_s
            if step.now + before / pace > due:
                return True
        if not self._waiting or (head := step.may_enter()) is None:
            return False
        due = head.arrival_time + step.clock_offset + ttft_s
        return step.now + (before + head.num_tokens) / pace > due

    def observe(self, result: StepResult) -> None:
        """Learn from the step, and from how far off the prediction was."""
        if not self.learns:
            return
        allowed = self._limit_of(result.index)
        # Where ranks step together the time is the slowest rank's, and so is what it was spent on.
        shape, seconds = self.fit.slowest(result.shape, result.others), result.seconds
        self._gap.append((shape, seconds))
        tokens = shape.prefill_tokens
        for chunk in result.chunks:
            self._furthest = max(self._furthest, chunk.context + chunk.tokens / 2)
        if tokens >= ENOUGH_TOKENS and shape.decodes:
            # With stages, a long step after short ones delays its own result by more than its time.
            self._compare(tokens, fmean([took for _, took in self._gap]), allowed)
        self.fit.observe(shape, seconds)

    def _limit_of(self, index: int) -> float:
        """Return what was allowed to a step; one whose result never came is forgotten."""
        allowed = self._itl_s
        while self._limits and self._limits[0][0] <= index:
            number, limit = self._limits.popleft()
            allowed = limit if number == index else allowed
        return allowed

    def _compare(self, tokens: int, seconds: float, allowed: float) -> None:
        if (model := self.fit.model) is not None:
            self._predicted_s = fmean([model.seconds(each) for each, _ in self._gap])
            # Full in tokens, or in time as it was meant: a correction that leaves room for small
            # chunks alone would never be unlearnt otherwise.
            meant = self._predicted_s * self.margin * self.drift
            full = tokens >= SHRINK * self._bound or meant >= MEANT_FULL * allowed
            if full and self._predicted_s > 0:
                self._learn_error(seconds / self._predicted_s)
        self._long_steps += seconds > allowed
        # In proportion, as if nothing of a step were fixed: that errs to the short side.
        fitted = tokens * self._itl_s / (self.margin * seconds)
        if tokens < SHRINK * self._bound and seconds <= self._itl_s:
            return  # the rest of a prompt: it says nothing of full chunks
        self._fitting = fitted
        if fitted < self._bound:
            self._bound = max(fitted, SHRINK * self._bound, self.settings.min_chunk)
        else:
            most = max(min(GROWTH * tokens, fitted), self._bound)
            self._bound = min(most, self.facts.max_num_batched_tokens)

    @property
    def margin(self) -> float:
        """By how much less than what is allowed a step is meant to take."""
        if len(self._sorted) < ENOUGH_ERRORS:
            return FIRST_MARGIN
        stalls = STALLS * len(self._sorted) // KEPT
        largest = self._sorted[-stalls - 1 :]
        usual = (less for less, more in pairwise(largest) if more > STALL * less)
        return min(max(next(usual, largest[-1]), LEAST_MARGIN), MOST_MARGIN)

    def _learn_error(self, ratio: float) -> None:
        """Take in what a step took over what the model said."""
        if len(self._errors) >= KEPT:
            del self._sorted[bisect_left(self._sorted, self._errors.popleft())]
        error = ratio / self.drift
        self._errors.append(error)
        insort(self._sorted, error)
        before, self._ratio = self._ratio, ratio
        # A stall says nothing of the next step: one that is longer than ever is heeded if that is,
        # once there is a margin from errors besides.
        if len(self._errors) >= ENOUGH_ERRORS:
            ratio = min(ratio, max(before, self.drift))
        ratio = min(ratio, MOST_DRIFT * self.drift, MOST_MARGIN)
        gain = DRIFT_UP if ratio > self.drift else DRIFT_DOWN
        self.drift = max(self.drift + gain * (ratio - self.drift), 1.0)

    def gauges(self) -> Mapping[str, float]:
        """Show the chunk, and what it is made from."""
        shown = {
            "chunk_budget_tokens": float(self._tokens),
            "margin": self.margin,
            "drift": self.drift,
            "predicted_step_seconds": self._predicted_s,
        }
        if self.fit.model is not None:
            shown |= {f"fit_{name}": value for name, value in self.fit.model.to_json().items()}
        return shown

    def counters(self) -> Mapping[str, float]:
        """Count steps with prefill that took longer than the target, and those that spent."""
        return {
            "long_steps": float(self._long_steps),
            "slack_steps": float(self._spent_steps),
        }
