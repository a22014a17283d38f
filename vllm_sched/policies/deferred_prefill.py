"""Once the engine is full, hold admissions until K requests have departed.

Idea: a step that prefills costs something fixed, however many prompts it prefills; let several
share it. Source: deferred prefill for throughput maximisation, where prefill and decode steps are
apart (`exclusive`). In vLLM V1 prefills ride along with decodes, and what can be shared is the
extra fixed time of such a mixed step: often nothing, and then waiting only leaves slots idle. So
`departures: auto` fits the times of steps while it runs, and holds nobody unless the model says,
several times in a row, that it pays; it runs half of the best K, which keeps nearly all of the
gain. Now and then nobody is held for a moment, to see whether what it says of batches is still so.

Full is: no slot was left after a step's admissions, or somebody found no room in the KV cache. In
the first case free slots are counted; in the second departures, and the room they leave: what K
typical requests held is enough, whoever left it. A hold ends at once when nothing runs and when
fewer wait than would fill the batch. K falls in the second half of the longest hold, so every hold
ends, and nobody is held for longer than that in all. Never held: requests that are mostly cached or
whose KV comes from elsewhere, preempted ones, and where a policy has classes of service those of
the first, who would wait for the sake of lesser ones.

Gaps between tokens grow with K, since a batch of prompts is one long step. `itl_ms` caps K so that
a batch of prompts of mean length keeps within it, and each batch by what its own prompts are
predicted to take: whom there is no time for enters with the next step. One may enter in any case.

Cost per step: O(1), and as much for each prefill. How it fails: one prompt can take longer than
`itl_ms` by itself, which is the business of `chunk_budget`; nothing is learnt of decoding where
every step prefills, so at times a step goes without admissions; with requests that come as fast as
they depart and none waiting there is no batch to fill, and nothing is held.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from statistics import fmean, stdev
from typing import ClassVar, Final, Literal

from pydantic import Field

from vllm_sched.cost.fit import OUTLIER, OnlineFit
from vllm_sched.cost.regime import Regime
from vllm_sched.cost.step_time import Chunk, StepShape, StepTime
from vllm_sched.cost.threshold import asymptotic, to_run, within_itl
from vllm_sched.errors import UsageError
from vllm_sched.policies.prefix_lookups import PrefixLookups
from vllm_sched.policies.types import (
    FIRST_CLASS,
    EngineFacts,
    Gate,
    LaneCount,
    Policy,
    RequestView,
    Settings,
    Step,
    StepResult,
    one_class,
)

DEFERRABLE, DIRECT = "deferrable", "direct"

# With so much of it cached a request's prefill is not worth waiting for others.
CACHED_SHARE: Final = 0.5
# So many steps may pass before it is seen that one in front has been cached meanwhile.
LOOK_UP_EVERY: Final = 8
# K is reckoned anew after so many steps, at least so many prompts and answers into the run.
RECKON_EVERY, ENOUGH_REQUESTS = 64, 8
# It is the least that so many reckonings in a row came to: until they agree that waiting pays
# nobody waits, and one that says that it doesn't is enough.
AGREEING: Final = 4
# With batches all of one size what each costs and what its prompts cost can't be told apart, and
# what was wrong once, while the engine began, stays so. So at times, ever more seldom, nobody is
# held until so many batches were seen, or for so many steps: after so many reckonings that said
# that waiting pays, at first and at most.
CHECK_BATCHES, CHECK_STEPS = 24, 256
# Fewer do where it is clear by then, give or take two standard errors, that they take no less than
# predicted by this part of what a batch costs.
FEW_BATCHES, LESS = 6, 0.3
FIRST_CHECK, RAREST_CHECK = 4, 32
# Where single prompts say that it is worth less than this part of K, what was learnt of batches
# counts for so much, and all begins anew.
STANDS, OUTLIVES = 0.6, 0.1
# After so many steps in a row with prefill one goes without, to see what decoding alone takes.
PROBE_EVERY: Final = 64
# The share of what was seen of lengths that outlives one more request.
MEMORY: Final = 0.98
# The share of the longest hold for which K stands; then it falls.
K_STANDS: Final = 0.5
NOBODY = LaneCount()
RELEASED: Final = -math.inf  # held for as long as anybody may be
ENDS: Final = ("departures", "room", "few", "idle", "overdue")
End = Literal["departures", "room", "few", "idle", "overdue"]


class DeferredPrefillSettings(Settings):
    """How many departures to wait for, and for how long at most."""

    departures: int | Literal["auto"] = Field(
        "auto", description="requests that depart before others enter; auto = as measured costs say"
    )
    itl_ms: float | None = Field(
        None, gt=0, description="gap between tokens that a batch of prefills may cause"
    )
    max_delay_ms: float = Field(
        1000.0, gt=0, description="longest time that a request is held for the sake of others"
    )
    max_delay_steps: int = Field(512, ge=1, description="longest time of a hold in steps")
    exclusive: bool = Field(
        False, description="decodes pause while prompts are in prefill, as in the paper"
    )


class Lengths:
    """Mean output and mean prompt, cached parts aside, of what comes and goes here."""

    def __init__(self) -> None:
        self._outputs = self._departed = 0.0
        self._prefilled = self._admitted = 0.0

    def departed(self, outputs: int) -> None:
        """Count an answer."""
        self._outputs = MEMORY * self._outputs + outputs
        self._departed = MEMORY * self._departed + 1

    def admitted(self) -> None:
        """Count a prompt; what it takes is seen in the steps."""
        self._prefilled *= MEMORY
        self._admitted = MEMORY * self._admitted + 1

    def prefilled(self, tokens: int) -> None:
        """Add the prefill of a step."""
        self._prefilled += tokens

    @property
    def known(self) -> bool:
        """Whether enough was seen."""
        return min(self._departed, self._admitted) >= ENOUGH_REQUESTS and self._prefilled > 0

    @property
    def output(self) -> float:
        """Decode steps of a request: its first token comes with the prefill."""
        return max(self._outputs / self._departed - 1, 1.0)

    @property
    def prompt(self) -> float:
        """Tokens to prefill of a request."""
        return max(self._prefilled / self._admitted, 1.0)


class DeferredPrefill(Policy):
    """See the module's text."""

    name: ClassVar[str] = "deferred_prefill"
    settings_type: ClassVar[type[Settings]] = DeferredPrefillSettings
    held_reasons = ("departures", "probe", "itl")
    settings: DeferredPrefillSettings

    def __init__(self, facts: EngineFacts, settings: DeferredPrefillSettings) -> None:
        super().__init__(facts, settings)
        asked = settings.departures
        out_of_range = f"deferred_prefill.departures={asked} is out of range"
        if asked != "auto" and asked < 1:  # before it starts nobody may know how many slots it has
            raise UsageError(f"{out_of_range}: at least 1 departs; give 1 or more, or auto")
        if asked != "auto" and asked > facts.max_num_seqs:
            raise UsageError(
                f"{out_of_range}: no more than max_num_seqs={facts.max_num_seqs} can depart; "
                f"give 1 to {facts.max_num_seqs}, or auto"
            )
        self._auto = asked == "auto"
        self._asked_for = self.threshold = 1 if asked == "auto" else asked
        self.best = float(self.threshold)
        self.fit = OnlineFit()
        self._itl_s = None if settings.itl_ms is None else settings.itl_ms / 1000
        self.learns = self._auto or self._itl_s is not None
        self.lengths = Lengths()
        self._longest_s = max(settings.max_delay_ms / 1000, sys.float_info.min)
        self._step = Step(index=0, now=0.0, budget=0, decodes=0, prefills=())
        self._running_full = facts.max_num_seqs  # how many run when the engine is full
        self._free_left = facts.max_num_seqs  # slots, after the admissions of the last step
        self._reckons_at = RECKON_EVERY  # the step in which K is reckoned next
        # What of the model a batch costs, however many are in it.
        self._batch_fixed = "prefill_fixed_s" if settings.exclusive else "mixed_s"
        self._checking = False  # until then nobody is held, to see what single prompts cost
        self._errors_s: list[float] = []  # of those steps, by which they are longer than predicted
        self._check_after = FIRST_CHECK
        self._unchecked = 0  # reckonings since
        self._reckonings: deque[int] = deque([1] * AGREEING, AGREEING)  # what it came to

        # The hold, while there is one.
        self.holding = False
        self._since = 0.0
        self._steps = 0
        self._departed = 0
        self._room_then = 0.0  # share of the KV cache
        self._room_left = 0.0  # of that, by those who were let in meanwhile
        self._refused: str | None = None  # for whom that was too little
        self._slots_full = True
        # Since when those in front, a lane of other policies each, are held; over several holds.
        self._heads: dict[str, float] = {}
        self._asked: set[str] = set()  # those in front in the step before
        # Found to have little cached; asked anew when the running prefills have changed, and now
        # and then.
        self._deferrable = PrefixLookups()
        # Found to have much. Others may hold it, and then it would be looked up in each step.
        self._direct = PrefixLookups()

        # Of the current step: how many entered, and each prefill with the seconds it takes.
        self._entered = 0
        self._given: dict[str, tuple[Chunk, float]] = {}
        self._given_s = 0.0

        self._probing = False
        self._mixed_in_a_row = 0
        self._ended: dict[End, int] = dict.fromkeys(ENDS, 0)
        self._held_s = 0.0

    # Who waits where

    def lane(self, request: RequestView, cached: Callable[[], int]) -> str:
        """Never hold who has little to compute, or was admitted before."""
        if request.num_preemptions:
            return DIRECT
        if not self.learns and self.threshold == 1:
            return DEFERRABLE  # which is never held: the look-up would be in vain
        name, now = request.request_id, self._step.now
        if self._deferrable.holds(name, now):
            return DEFERRABLE
        if self._direct.holds(name, now):
            return DIRECT
        known = cached()
        much = known >= CACHED_SHARE * request.num_tokens
        (self._direct if much else self._deferrable).add(name, known, now)
        return DIRECT if much else DEFERRABLE

    def gate(self, lane: str, head: RequestView, waited: float) -> Gate:
        """Close it while a hold lasts, to those who may be held."""
        if lane != DEFERRABLE:
            return Gate.OPEN
        self._asked.add(head.request_id)
        held = self._probing or (self.holding and not self._is_urgent(head))
        if (not held or self._fits(head)) and self._in_time(head):
            return Gate.OPEN
        self._heads.setdefault(head.request_id, self._step.now)
        return Gate.CLOSED

    def _is_urgent(self, head: RequestView) -> bool:
        """Whether it is of the first of several classes of service; a probe's step is not long."""
        class_of = self._step.class_of
        return class_of is not one_class and class_of(head) <= FIRST_CLASS

    def _fits(self, head: RequestView) -> bool:
        """Whether the cache was full for another, of another policy's lane, and not for this."""
        if not self.holding or self._slots_full or self.facts.kv_cache is None:
            return False
        return head.request_id != self._refused and self.facts.kv_share(head) < self._room_left

    def _in_time(self, head: RequestView) -> bool:
        """Whether with its prefill those who decode still get their tokens within `itl_ms`."""
        step, model = self._step, self.fit.model
        decodes = step.running - len(step.prefills)
        if self._itl_s is None or model is None or not decodes:
            return True
        # The first of a step, or of a pause. Nobody is held for long for the sake of gaps either.
        since = self._heads.get(head.request_id, step.now)
        if not (self._entered or self._pausing) or step.now - since >= self._longest_s:
            return True
        left = self._itl_s / (1 + self.fit.spread) - self._given_s
        if self.settings.exclusive:
            # They have waited since they were paused, and decode after that.
            shape = StepShape(decodes=decodes, context_tokens=step.context_tokens)
            left -= step.paused_s + model.seconds(shape)
            decodes = 0
        budget = self.facts.max_num_batched_tokens
        fitting = model.prefill_within(left, decodes, step.context_tokens, 0)
        return fitting >= min(head.num_tokens, budget)

    @property
    def _pausing(self) -> bool:
        return self.settings.exclusive and self._step.paused_s > 0

    def chunk(self, request: RequestView, computed: int, tokens: int) -> int:
        """Note what a prefill takes of the step's time."""
        self._give(request.request_id, Chunk(tokens, computed))
        return tokens

    def taken_back(self, request: RequestView, tokens: int) -> None:
        """Note that it takes less."""
        if (given := self._given.get(request.request_id)) is not None:
            chunk, _ = given
            self._give(request.request_id, chunk._replace(tokens=chunk.tokens - tokens))

    def _give(self, name: str, chunk: Chunk) -> None:
        model = self.fit.model
        if self._itl_s is None or model is None:
            return
        seconds = model.chunk_seconds(chunk) if chunk.tokens else 0.0
        before = self._given.get(name)
        self._given_s += seconds - (before[1] if before is not None else 0.0)
        self._given[name] = chunk, seconds

    def admitted(self, request: RequestView) -> None:
        """Count a slot taken."""
        self._entered += 1
        if request.request_id not in self._given:  # in an engine that does not cut prompts
            rest = request.num_tokens - request.num_computed_tokens
            self._give(request.request_id, Chunk(rest, request.num_computed_tokens))
        self._room_left -= self.facts.kv_share(request)
        self._free_left -= 1
        self.lengths.admitted()
        self._heads.pop(request.request_id, None)

    def departed(self, request: RequestView, now: float) -> None:
        """Learn how long answers are; a client that left is in front of nobody."""
        self._heads.pop(request.request_id, None)
        if request.num_output_tokens > 0:
            self.lengths.departed(request.num_output_tokens)

    def held_reason(self, lane: str) -> str:
        """Say why nobody enters."""
        if self.holding:
            return "departures"
        return "probe" if self._probing else "itl"

    # The step

    def begin_step(self, step: Step, lanes: Mapping[str, LaneCount]) -> None:
        """Begin a hold, or end it."""
        waiting = lanes.get(DEFERRABLE, NOBODY).asking
        free_before, self._free_left = self._free_left, step.free_slots
        before, self._step = self._step, step
        self._entered, self._given_s = 0, 0.0
        self._given.clear()
        here, then = ([r.request_id for r in each.prefills] for each in (step, before))
        if here != then or step.index % LOOK_UP_EVERY == 0:
            self._deferrable.changed(step.now)
            self._direct.changed(step.now)
        slots_full = free_before <= 0 or step.free_slots <= 0
        if slots_full or step.refused is not None:
            self._running_full = max(step.running + step.departed, 1)
        if self.learns and (step.index >= self._reckons_at or self._checked):
            self._reckon()
            self._checking = not self._checking and self._check_due()
            self._reckons_at = step.index + (CHECK_STEPS if self._checking else RECKON_EVERY)
        self._probing = self._probe_due(step, full=slots_full)
        if self._asked:
            # Others stand in front of those who were not asked about: it is not for us they wait.
            self._heads = {name: at for name, at in self._heads.items() if name in self._asked}
            self._asked.clear()
        if self.holding:
            self._steps += 1
            self._departed += step.departed
            self._held_s += max(step.now - before.now, 0.0)
        elif self._holds and waiting and self._may_hold(step, full=slots_full):
            self.holding = True
            self._since, self._steps = step.now, 0
            self._departed = step.departed
            self._room_then = self._room_left = step.kv_free
            self._refused = step.refused
            self._slots_full = slots_full
        if self.holding and (end := self._end(step, waiting)):
            self.holding = False
            self._ended[end] += 1

    def pauses_decodes(self, step: Step) -> bool:
        """Keep prefill and decode apart if so asked, but not for longer than anybody is held."""
        if not self.settings.exclusive:
            return False
        # One that found no room is not waited for: room comes from decodes that end.
        if not (step.prefills or (step.refused is None and step.may_enter())):
            return False
        return step.paused_s < self._longest_s

    def observe(self, result: StepResult) -> None:
        """Learn what steps take and how long prompts are."""
        tokens = sum(chunk.tokens for chunk in result.chunks)
        self.lengths.prefilled(tokens)
        if not self.learns:
            return
        if tokens and result.decodes:
            self._mixed_in_a_row += 1
        elif result.decodes:
            self._mixed_in_a_row = 0
        shape = self.fit.slowest(result.shape, result.others)
        if tokens and self._checking and (model := self.fit.model) is not None:
            predicted = model.seconds(shape)
            longer = result.seconds - predicted
            self._errors_s.append(min(longer, OUTLIER * self.fit.spread * predicted))  # no stalls
        self.fit.observe(shape, result.seconds)

    def gauges(self) -> Mapping[str, float]:
        """Show K, what it is made from, and the fitted coefficients."""
        shown = {"k": float(self.threshold), "k_best": self.best, "holding": float(self.holding)}
        if self.lengths.known:
            shown |= {
                "mean_output_tokens": self.lengths.output,
                "mean_prompt_tokens": self.lengths.prompt,
            }
        if self.fit.model is not None:
            shown |= {f"fit_{name}": value for name, value in self.fit.model.to_json().items()}
        return shown

    def counters(self) -> Mapping[str, float]:
        """Count holds by how they ended, and the time spent in them."""
        return {
            **{f"holds_ended_{end}": float(count) for end, count in self._ended.items()},
            "starvation_releases": float(self._ended["overdue"]),
            "held_seconds": self._held_s,
        }

    # Inside

    def _end(self, step: Step, waiting: int) -> End | None:
        """Say why the hold ends now, if it does."""
        if not step.running:
            return "idle"
        # The longest that this hold, or one in front over all its holds, has lasted.
        lasted = step.now - self._since
        lasted = max(lasted, step.now - min(self._heads.values(), default=step.now))
        progress = max(lasted / self._longest_s, self._steps / self.settings.max_delay_steps)
        if progress >= 1:
            for name, since in self._heads.items():
                if step.now - since >= self._longest_s:
                    self._heads[name] = RELEASED
            return "overdue"
        wanted = math.ceil(self.threshold * min((1 - progress) / (1 - K_STANDS), 1.0))
        if waiting < wanted:
            return "few"
        if (step.free_slots if self._slots_full else self._departed) >= wanted:
            return "departures"
        if not self._slots_full:
            typical = (1 - self._room_then) / self._running_full
            if step.kv_free - self._room_then >= wanted * typical:
                return "room"
        return None

    def _may_hold(self, step: Step, *, full: bool) -> bool:
        """Whether the engine is full, and nobody in front was let go for having waited."""
        return (full or step.refused is not None) and RELEASED not in self._heads.values()

    def _probe_due(self, step: Step, *, full: bool) -> bool:
        """Whether to go without admissions once, to see what decoding alone takes."""
        if self._mixed_in_a_row < PROBE_EVERY or step.prefills or not full:
            return False
        self._mixed_in_a_row = 0
        return True

    @property
    def _holds(self) -> bool:
        return self.threshold > 1 and not self._checking

    @property
    def _checked(self) -> bool:
        """Whether enough batches were seen to tell whether what is known of them is so."""
        errors, model = self._errors_s, self.fit.model
        if not self._checking or len(errors) < FEW_BATCHES or model is None:
            return False
        if len(errors) >= CHECK_BATCHES:
            return True
        at_least = fmean(errors) - 2 * stdev(errors) / math.sqrt(len(errors))
        fixed: float = getattr(model, self._batch_fixed)
        return at_least > -LESS * fixed

    def _check_due(self) -> bool:
        if self.threshold == 1 or not self._auto:
            self._check_after, self._unchecked = FIRST_CHECK, 0
            return False
        self._unchecked += 1
        if self._unchecked < self._check_after:
            return False
        self._check_after, self._unchecked = min(2 * self._check_after, RAREST_CHECK), 0
        self._errors_s.clear()
        return True

    def _reckon(self) -> None:
        model = self.fit.model
        if model is None or not self.lengths.known:
            return
        if not self._auto:
            if self._itl_s is not None:
                most = within_itl(self._regime(model), self._itl_s)
                self.threshold = max(min(self._asked_for, most), 1)
            return
        if self._checking and self._to_run(self._as_checked(model)) < STANDS * self.threshold:
            self.fit.forget("prefill" if self.settings.exclusive else "mixed", OUTLIVES)
            self._reckonings.extend([1] * AGREEING)
        else:
            self._reckonings.append(self._to_run(model))
        self.best = asymptotic(self._regime(model))
        self.threshold = min(self._reckonings)

    def _to_run(self, model: StepTime) -> int:
        most_s = K_STANDS * self._longest_s
        return to_run(self._regime(model), itl_s=self._itl_s, max_delay_s=most_s)

    def _regime(self, model: StepTime) -> Regime:
        return Regime.of(
            model,
            slots=self._running_full,
            mean_output=self.lengths.output,
            mean_prompt=self.lengths.prompt,
            exclusive=self.settings.exclusive,
            budget=self.facts.max_num_batched_tokens,
        )

    def _as_checked(self, model: StepTime) -> StepTime:
        """Take off the fixed part of a batch what those of the check took less."""
        if len(self._errors_s) < FEW_BATCHES:
            return model
        less = min(fmean(self._errors_s), 0.0)
        fixed: float = getattr(model, self._batch_fixed)
        return replace(model, **{self._batch_fixed: max(fixed + less, 0.0)})
