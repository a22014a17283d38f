"""The chunk that sizes itself: as much prefill in a step as keeps decodes within their gap.

Idea: stall-free chunks (Sarathi) whose size comes from deadlines (FairBatching), since no chunk
fits every mix of decodes, contexts and prompts. With decodes about, a step's budget is the largest
whose predicted time stays within `itl_ms`; without them it is the engine's whole one. `chunk` sets
the size by hand instead.

The prediction is a model of step times fitted while running, asked for less than the target by a
margin that follows its errors, so that about one step in a hundred is longer. Until the model knows
enough, and beside it always, a chunk is at most half as long again as one that was seen to fit.

With `ttft_ms` a prompt that would miss it may spend what decodes are ahead of their deadlines
(arrival + ttft_ms + j·itl_ms for the j-th token), up to `MOST_GAP` gaps in one step.

Cost per step: O(running prefills), and O(decodes) in steps that spend. How it fails: where decodes
alone take longer than `itl_ms` prefill goes on at `min_chunk` tokens a step and the target is
missed; a target below what a small chunk costs makes prompts wait long; a step that stalls for
other reasons counts like one with too much prefill, until the next ones were shorter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final

from pydantic import Field

from vllm_sched.cost.fit import OnlineFit
from vllm_sched.cost.pace import Chunk
from vllm_sched.cost.step_time import StepShape
from vllm_sched.policies.types import (
    EngineFacts,
    LaneCount,
    Policy,
    RequestView,
    Settings,
    Step,
    StepResult,
)

# The first chunk beside decodes, and by how much one may exceed those that fitted.
FIRST_CHUNK: Final = 256
GROWTH, SHRINK = 1.5, 0.5
# Below so many tokens a step's time says nothing about its chunk.
ENOUGH_TOKENS: Final = 16
# The margin rises by the first where a step was longer than it allowed for, else falls by the
# second: it settles where one step in a hundred is.
MARGIN_UP, MARGIN_DOWN = 0.05, 0.0005
LEAST_MARGIN, FIRST_MARGIN, MOST_MARGIN = 1.05, 1.15, 2.0
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

    def __init__(self, facts: EngineFacts, settings: ChunkBudgetSettings) -> None:
        super().__init__(facts, settings)
        self.fit = OnlineFit()
        self.learns = settings.chunk is None
        self.margin = FIRST_MARGIN
        self._itl_s = settings.itl_ms / 1000
        self._bound = float(FIRST_CHUNK)
        self._tokens = facts.max_num_batched_tokens  # of prefill, as last decided
        self._predicted_s = 0.0
        self._allowed_s = self._itl_s  # as last decided
        self._spent_steps = 0
        self._long_steps = 0

        # What follows is of the current step alone.
        self._seconds: float | None = None  # left for prefill; None = no limit but the budget
        self._moves = 0  # tokens still owed to `min_chunk`
        self._decodes = self._context_tokens = 0

    def begin_step(self, step: Step, lanes: Mapping[str, LaneCount]) -> None:
        """Start without a limit: `budget` is not asked where nobody could prefill."""
        self._seconds = None

    def budget(self, step: Step) -> int:
        """Return the largest budget that keeps decodes on time."""
        if not step.decodes:
            self._tokens = step.budget
            return step.budget
        settings = self.settings
        if settings.chunk is not None:
            self._tokens = settings.chunk
            return step.decodes + settings.chunk
        tokens = int(self._bound)
        allowed = self._allowed_s = self._allowed(step)
        if (model := self.fit.model) is not None:
            self._seconds = allowed / self.margin
            self._decodes, self._context_tokens = len(step.decoding), step.context_tokens
            self._moves = settings.min_chunk
            context = step.prefills[0].num_computed_tokens if step.prefills else 0
            fitting = model.prefill_within(
                self._seconds, self._decodes, self._context_tokens, context
            )
            tokens = min(int(GROWTH * self._bound * allowed / self._itl_s), fitting)
        self._tokens = max(tokens, settings.min_chunk)
        return step.decodes + self._tokens

    def chunk(self, request: RequestView, computed: int, tokens: int) -> int:
        """Cut to the time that is left: a token costs more the further on its prompt is."""
        model = self.fit.model
        if self._seconds is None or model is None:
            return tokens
        fitting = model.prefill_within(self._seconds, self._decodes, self._context_tokens, computed)
        granted = min(tokens, max(fitting, self._moves, 0))
        self._moves -= granted
        work = model.prefill_s * granted + model.pair_s * Chunk(granted, computed).attention
        self._seconds -= work
        return granted

    def _allowed(self, step: Step) -> float:
        """Return how long the step may be."""
        ttft_ms = self.settings.ttft_ms
        if ttft_ms is None or not self._is_at_risk(step, ttft_ms / 1000):
            return self._itl_s
        # Every deadline less what all have in common: ttft_ms and the clock's offset.
        first = min(r.arrival_time + self._itl_s * r.num_output_tokens for r in step.decoding)
        ahead = first + step.clock_offset + ttft_ms / 1000 - step.now
        allowed = min(max(ahead, self._itl_s), MOST_GAP * self._itl_s)
        self._spent_steps += allowed > self._itl_s
        return allowed

    def _is_at_risk(self, step: Step, ttft_s: float) -> bool:
        """Whether somebody in prefill would be late at the pace of full gaps."""
        pace = max(min(self._tokens, self._bound), 1.0) / self._itl_s
        before = 0
        for request in step.prefills:
            before += request.num_tokens - request.num_computed_tokens
            due = request.arrival_time + step.clock_offset + ttft_s
            if step.now + before / pace > due:
                return True
        return False

    def observe(self, result: StepResult) -> None:
        """Learn from the step, and from how far off the prediction was."""
        if not self.learns:
            return
        tokens = sum(chunk.tokens for chunk in result.chunks)
        pairs = sum(chunk.attention for chunk in result.chunks)
        shape = StepShape(tokens, pairs, result.decodes, result.context_tokens)
        if tokens >= ENOUGH_TOKENS and result.decodes:
            self._compare(tokens, shape, result.seconds)
        self.fit.observe(shape, result.seconds)

    def _compare(self, tokens: int, shape: StepShape, seconds: float) -> None:
        if (model := self.fit.model) is not None:
            self._predicted_s = model.seconds(shape)
            longer = seconds > self.margin * self._predicted_s
            margin = self.margin + (MARGIN_UP if longer else -MARGIN_DOWN)
            self.margin = min(max(margin, LEAST_MARGIN), MOST_MARGIN)
        self._long_steps += seconds > self._allowed_s
        # In proportion, as if nothing of a step were fixed: that errs to the short side.
        fitted = tokens * self._itl_s / (self.margin * seconds)
        if tokens < SHRINK * self._bound and seconds <= self._itl_s:
            return  # the rest of a prompt: it says nothing of full chunks
        if fitted < self._bound:
            self._bound = max(fitted, SHRINK * self._bound, self.settings.min_chunk)
        else:
            most = max(min(GROWTH * tokens, fitted), self._bound)
            self._bound = min(most, self.facts.max_num_batched_tokens)

    def gauges(self) -> Mapping[str, float]:
        """Show the chunk, and what it is made from."""
        shown = {
            "chunk_budget_tokens": float(self._tokens),
            "margin": self.margin,
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
