"""Limits on long prompts, with a fast lane for short ones.

Idea: vLLM V0's concurrent partial prefills (`max_num_partial_prefills` and companions, gone in
V1), where a prompt is long while more than a threshold of its tokens is left to compute, and a
second long prompt waits while shorts pass it. By default no prompt that fits a step whole is long,
and steps without a long prompt are vLLM's own. What V0 lacked is here too: decodes come first,
held prompts cost nothing, cached prefixes do not count, a bound on every wait, shorts pass a long
prompt that does not fit into the KV cache, and a chunk that sizes itself.

The chunk: a short prompt that arrives now waits for the step in progress and, with asynchronous
scheduling, for the one queued behind it. Their length is the long prompt's chunk. So while others
are about, a chunk may stretch a step to `long_step_stretch` times a step without prefill, as
measured; alone it gets the whole budget. A step that serves shorts goes without a long chunk, four
times in a row at most: such steps are brief, so under a steady stream of shorts the long prompt
still has about half of the time. Once no short has come for 0.25 s, they may be three
times longer.

Beside a policy with classes of service the limit is for each: nobody waits for a long prompt of a
lesser class, which may be kept from moving for the sake of his.

Cost per step: O(running prefills). How it fails: with a stretch too small for the model the base
cost of many steps slows long prompts; with M > 1 longs share one allowance and finish together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from vllm_sched.cost.pace import StepPace, cut_chunk
from vllm_sched.errors import UsageError
from vllm_sched.policies.prefix_lookups import LOOK_AGAIN_S, PrefixLookups
from vllm_sched.policies.types import (
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

SHORT, LONG = "short", "long"

# Shorter steps than this are not worth dividing further.
SHORTEST_STEP_S = 0.010
# After so many slow steps, and so long, one is made without prefill, to measure what it takes.
PROBE_EVERY, PROBE_S = 4, 0.5
# With no short arriving for so long, a step may be stretched so many times further.
QUIET_S, QUIET_STRETCH = 0.25, 3.0
# In so many steps in a row at most a long prompt has nothing because shorts are served.
STAND_BACK = 4
V0_THRESHOLD_SHARE = 0.04
# Prompts that share a step with a long one, unless configured.
DEFAULT_SHARING = 4
EMPTY = LaneCount()


def default_threshold(max_model_len: int, max_num_batched_tokens: int) -> int:
    """Return V0's threshold, but at least a step's budget: a prompt that fits a step is short."""
    return max(int(max_model_len * V0_THRESHOLD_SHARE), max_num_batched_tokens)


class LongPromptSettings(Settings):
    """The names V0's users know, and what came on top."""

    max_num_partial_prefills: int | None = Field(
        None,
        ge=1,
        description="prompts that share each step's budget, as in V0; None = 4 share steps with a"
        " long prompt, and other steps are vLLM's own; 1 turns the limits off",
    )
    max_long_partial_prefills: int = Field(
        1, ge=1, description="how many of them may be long; shorts are never held"
    )
    long_prefill_token_threshold: int = Field(
        0,
        ge=0,
        description="tokens left to compute above which a prompt is long; 0 = 4 % of max_model_len,"
        " at least max_num_batched_tokens",
    )
    long_prefill_share: float | Literal["auto"] = Field(
        "auto",
        description="share of a step's budget for long prompts while others are about;"
        " auto = sized by measured step times",
    )
    long_step_stretch: float = Field(
        12.0,
        ge=2.0,
        le=1000.0,
        description="with share auto: time of a step with a long chunk over one without prefill",
    )
    max_wait_s: float = Field(
        60.0,
        gt=0,
        description="a long prompt held so long is admitted beyond the limit on long ones",
    )

    @property
    def sharing(self) -> int:
        """Return the number of prompts that share a step."""
        return self.max_num_partial_prefills or DEFAULT_SHARING

    @model_validator(mode="after")
    def _consistent(self) -> LongPromptSettings:
        if self.max_long_partial_prefills > self.sharing:
            raise ValueError(
                f"max_long_partial_prefills={self.max_long_partial_prefills} must not exceed "
                f"max_num_partial_prefills={self.sharing}"
            )
        share = self.long_prefill_share
        if share != "auto" and not 0 < share <= 1:
            raise ValueError(
                f"long_prefill_share={share} is out of range: give 'auto' or 0 < share <= 1"
            )
        return self


class LongPrompt(Policy):
    """See the module's text."""

    name: ClassVar[str] = "long_prompt"
    settings_type: ClassVar[type[Settings]] = LongPromptSettings
    held_reasons = ("long_limit", "shorts_first")
    settings: LongPromptSettings

    def __init__(self, facts: EngineFacts, settings: LongPromptSettings) -> None:
        super().__init__(facts, settings)
        asked = settings.long_prefill_token_threshold
        if asked > facts.max_model_len:
            raise UsageError(
                f"long_prompt.long_prefill_token_threshold={asked} exceeds max_model_len="
                f"{facts.max_model_len}, so no prompt would be long; "
                f"give 0 to {facts.max_model_len}"
            )
        self.threshold = asked or default_threshold(
            facts.max_model_len, facts.max_num_batched_tokens
        )
        self.arranges = self.active = settings.sharing > 1
        # In V0 short prompts share every step. By default they do so beside a long prompt only.
        self._shorts_share = settings.max_num_partial_prefills is not None
        self._places = settings.max_long_partial_prefills
        # An overdue prompt waits for no place of a long one, but for one of all prefills.
        self._places_overdue = max(settings.sharing, self._places + 1)
        self.pace = StepPace()
        self._slow_steps = 0  # since one without prefill was last seen
        self._probed_at = -math.inf
        self._last_arrival = -math.inf  # when a short was last seen waiting
        self._releases = 0
        self._stood_back = 0  # steps in a row in which the longs had nothing, for the shorts' sake
        self._stands_back = False  # and whether they have nothing in this one
        self._probes = False  # and whether that is to see how long a step takes without them

        # What follows is of the current step alone.
        self._step = Step(index=0, now=0.0, budget=0, decodes=0, prefills=())
        self._classes: list[float] = []  # of service, theirs
        self._shorts = EMPTY  # that wait
        self._awaited = False  # whether some of them are held by no other policy
        self._held = EMPTY  # longs that wait
        self._free_places = 0  # for them
        self._longs_coming = 0
        self._sure = True  # that it is so many: none waits, or it was asked whom others hold
        self._decodes = 0  # that go before; none any more where another policy pauses them
        self._budget = facts.max_num_batched_tokens  # tokens that were divided
        self._sharing = 1  # among so many prefills
        self._num_shorts = 0  # of them, and of those who come
        self._slot = facts.max_num_batched_tokens  # tokens for one prefill
        self._long_left = self._slot  # for all long prefills together
        self._kept_of_longs = 0  # of that, for one who could not begin and may by now
        self._longs_due = 1  # how many of them are still to get their part
        self._overdue: set[str] = set()  # who is let in for a long wait, in front of each lane
        self._short_left = self._slot
        self._due = 0  # tokens that longs in prefill can use and may have
        # Where a class of service has but a share of the step:
        self._shorts_took: dict[float, int] = {}  # of each class
        self._longs_behind: list[float] = []  # classes of longs that are yet to get their part
        self._gave_long = False  # whether the last chunk was a long one's
        self._beside = 0  # tokens of decodes, and of chunks that were sized
        self._fit_s: float | None = None  # the length of a step that one prefill may cause
        self._cuts = False  # whether prefills are cut to `_slot` and `_fit_s`
        # Found long beyond what is cached; asked anew when the running prefills have changed, but
        # not so soon again of whom much is cached.
        self._seen_long = PrefixLookups()
        # Found short for what is cached: until when that stands, and what looks again. Others may
        # hold them; those whom this lets in are looked up first, for blocks can be evicted.
        self._seen_short: dict[str, tuple[float, Callable[[], int]]] = {}
        self._entered_long: set[str] = set()  # prompts in prefill that were long when they entered
        self._no_longer_short: set[str] = set()  # in this step
        self._prefilling: list[str] = []  # when the step began

    def resolved(self) -> dict[str, object]:
        """Show the threshold that the engine's context length gave."""
        return super().resolved() | {"long_prefill_token_threshold": self.threshold}

    @property
    def _longs(self) -> int:
        """Count the longs in prefill, those admitted in this step included."""
        return len(self._classes)

    # Who waits where

    def lane(self, request: RequestView, cached: Callable[[], int]) -> str:
        """Short unless the part that is not cached is long; looked up only for long prompts.

        An answer that was preempted is no long prompt: it keeps its place before all others, as it
        has with upstream, or every short that comes would take the room that it waits for.
        """
        if not self.active or request.num_output_tokens or request.num_tokens <= self.threshold:
            return SHORT
        name, now = request.request_id, self._step.now
        if self._seen_long.holds(name, now):
            return LONG
        if (seen := self._seen_short.get(name)) is not None and now < seen[0]:
            return SHORT
        known = cached()
        if not self._is_long(request.num_tokens - known):
            self._seen_long.discard(name)
            self._seen_short[name] = now + LOOK_AGAIN_S * known, cached
            return SHORT
        self._seen_short.pop(name, None)
        self._seen_long.add(name, known, now)
        return LONG

    def gate(self, lane: str, head: RequestView, waited: float) -> Gate:
        """Hold a long prompt while enough others prefill, but not beyond its wait."""
        if lane != LONG:
            return Gate.OPEN
        overdue = waited >= self.settings.max_wait_s
        places = self._places_overdue if overdue else self._places
        taken = self._taken_before(head)
        if taken >= places or self._long_left <= 0:
            return Gate.CLOSED
        # One that found no room in the KV cache need not keep shorts waiting behind it.
        if overdue and taken >= self._places:
            self._overdue.add(head.request_id)
        stuck = self._step.refused == head.request_id and not overdue
        return Gate.LAST if stuck else Gate.OPEN

    def stays(self, lane: str, head: RequestView) -> bool:
        """Look again at what is cached, where that made it short; if it is long it moves first."""
        name = head.request_id
        if name in self._no_longer_short:
            return False
        seen = self._seen_short.get(name)
        if lane == LONG or seen is None or not self._is_long(head.num_tokens - seen[1]()):
            return True
        self._no_longer_short.add(name)
        del self._seen_short[name]
        return False

    def _taken_before(self, head: RequestView) -> int:
        """Count the longs that this one waits for: of its class or a better one."""
        if len(self._classes) < self._places:
            return len(self._classes)
        own = self._step.class_of(head)
        return sum(each <= own for each in self._classes)

    def admitted(self, request: RequestView) -> None:
        """Count a long prompt at once: the next must not slip in within the same step."""
        self._seen_short.pop(request.request_id, None)
        if self._in_long(request):
            self._entered_long.add(request.request_id)
            self._classes.append(self._step.class_of(request))
        self._releases += request.request_id in self._overdue

    def departed(self, request: RequestView, now: float) -> None:
        """Forget what was found of it: where each long is read in one step nothing else would."""
        self._seen_long.discard(request.request_id)
        self._seen_short.pop(request.request_id, None)

    # Who gets how much

    def begin_step(self, step: Step, lanes: Mapping[str, LaneCount]) -> None:
        """Divide the budget between long and short prefills."""
        if not self.active:
            return
        if self._awaited:
            self._last_arrival = self._step.now
        self._stood_back = self._stood_back + 1 if self._stands_back else 0
        if self._probes:
            self._slow_steps, self._probed_at = 0, self._step.now
        # The cache grows as prefills come and go: only then is a long prompt looked up again.
        prefilling = [request.request_id for request in step.prefills]
        if prefilling != self._prefilling:
            self._seen_long.changed(step.now)
            self._prefilling = prefilling
        self._entered_long.intersection_update(prefilling)
        self._step = step
        self._overdue.clear()
        self._no_longer_short.clear()
        longs = [r for r in step.prefills if self._in_long(r)]
        self._classes = [step.class_of(r) for r in longs]

        self._held, self._shorts = lanes.get(LONG, EMPTY), lanes.get(SHORT, EMPTY)
        overdue = self._held.waited >= self.settings.max_wait_s
        places = self._places_overdue if overdue else self._places
        self._free_places = max(min(places - self._longs, step.free_slots), 0)
        self._longs_coming = min(self._held.asking, self._free_places)
        awaited = self._shorts.requests or self._longs_coming or self._one_may_pass()
        self._sure = step.free_slots <= 0 or not awaited
        self._divide(step, longs)

    def _make_sure(self) -> None:
        """Divide anew where other policies hold others than they did, or pause the decodes."""
        self._sure = True
        before = self._shorts.asking, self._longs_coming, self._decodes
        self._step.ask_gates()
        self._longs_coming = min(self._held.asking, self._free_places) or self._one_passes()
        if (self._shorts.asking, self._longs_coming, self._step.decodes) != before:
            self._divide(self._step, [r for r in self._step.prefills if self._in_long(r)])

    def _one_may_pass(self) -> bool:
        """Whether a long that waits may be of a better class than one in prefill."""
        return bool(self._held.asking and self._classes) and self._step.class_of is not one_class

    def _one_passes(self) -> int:
        """Count one that enters past longs of lesser classes, which have taken all places.

        It needs no place but some tokens. One that finds no room in the KV cache needs neither.
        """
        head = self._step.may_enter() if self._one_may_pass() else None
        if head is None or head.request_id == self._step.refused:
            return 0
        return int(head.request_id in self._seen_long)

    def _divide(self, step: Step, longs: Sequence[RequestView]) -> None:
        settings = self.settings
        self._decodes = self._beside = step.decodes
        asking = self._shorts.asking
        self._awaited = asking > 0
        best = min(self._classes, default=math.inf)
        # Shorts of a lesser class than the longs come after them, if they are given anything.
        num_shorts = sum(step.class_of(r) <= best for r in step.prefills if not self._in_long(r))
        num_shorts += min(asking, max(step.free_slots, 0))
        num_longs = self._longs + self._longs_coming
        sharing = max(min(num_shorts + num_longs, settings.sharing), 1)
        self._sharing = sharing
        self._longs_due = num_longs
        self._shorts_took.clear()
        self._longs_behind = self._classes.copy()
        self._slot = max(step.budget // sharing, 1)
        self._fit_s = None
        self._cuts = self._shorts_share or num_longs > 0 or bool(self._entered_long)
        self._stands_back = self._probes = False
        if num_shorts + num_longs <= 1 and not step.decodes:
            self._long_left = step.budget  # nobody else is about
        elif settings.long_prefill_share != "auto":
            share = int(step.budget * settings.long_prefill_share)
            self._long_left = max(share, num_longs, 1)  # a token each, the overdue one too
        else:
            self._long_left = self._size_by_time(step, num_shorts, sharing)
        self._num_shorts = num_shorts
        self._keep_room(longs)

    def _keep_room(self, longs: Sequence[RequestView]) -> None:
        """Keep shorts their part of the tokens, and longs what they are due."""
        step = self._step
        self._budget = step.budget
        # Decodes are served first, so it is the rest that is divided.
        room = max(step.budget - step.decodes, 0)
        if self._num_shorts:
            kept = max(room // self._sharing, min(room, 1))
            self._long_left = min(self._long_left, room - kept)
        else:
            # A token, so that the engine sees when one of them may begin after all.
            kept = int(self._shorts.barred > 0 and step.free_slots > 0)
            self._long_left = min(self._long_left, max(room - kept, 1))
        has_place = self._free_places > self._longs_coming
        self._kept_of_longs = int(self._held.barred > 0 and has_place)
        # Shorts stand before longs in `running`: what the longs are due is kept from them here.
        due = sum(self._fit(r, r.num_computed_tokens, step.budget) for r in longs)
        self._due = min(due, self._long_left)
        self._short_left = max(room - self._due, 1)

    def _size_by_time(self, step: Step, num_shorts: int, sharing: int) -> int:
        """Divide a step's time among those in prefill, like the budget's tokens."""
        stands_back = bool(self._longs and num_shorts) and self._is_slow(step)
        self._stands_back = stands_back = stands_back and self._stood_back < STAND_BACK
        if stands_back:
            self._sharing = sharing = min(num_shorts, sharing)
            self._slot = max(step.budget // sharing, 1)
        if (base := self.pace.base) is not None:
            stretch = self.settings.long_step_stretch
            if not self._awaited and step.now - self._last_arrival > QUIET_S:
                stretch *= QUIET_STRETCH
            longest = max(stretch * base, SHORTEST_STEP_S)
            self._fit_s = base + (longest - base) / sharing
        alone = bool(self._longs and not num_shorts and step.decodes)
        self._probes = alone and self._probe_due(step.now)
        return 0 if stands_back or self._probes else step.budget

    def _is_slow(self, step: Step) -> bool:
        """Whether an uncut chunk of the prompt furthest on would be felt."""
        context = max([request.num_computed_tokens for request in step.prefills], default=0)
        fitting = self.pace.chunk_within(SHORTEST_STEP_S, context)
        return fitting is not None and fitting < self._slot

    def _probe_due(self, now: float) -> bool:
        """Whether to leave the chunk out once, to see how long a step takes without it.

        What steps took while others kept the machine busy would size chunks for long after.
        """
        return self._slow_steps >= PROBE_EVERY and now - self._probed_at >= PROBE_S

    def chunk(self, request: RequestView, computed: int, tokens: int) -> int:
        """One slot of the budget and of the step's time each; longs have one limit besides."""
        if not self.active:
            return tokens
        if not self._sure or self._step.decodes != self._decodes:
            self._make_sure()
        if self._step.budget < self._budget:  # another policy's doing, since the step began
            self._slot = max(self._step.budget // self._sharing, 1)
            self._keep_room([r for r in self._step.prefills if self._in_long(r)])
        granted = self._fit(request, computed, tokens)
        # Who was let in as a short one has a short one's part, or it would stop those behind it:
        # one whose KV should have come from elsewhere may have to be computed here.
        name = request.request_id
        entered_long = name in self._seen_long or name in self._prefilling
        self._gave_long = entered_long and self._counts_as_long(request, computed)
        if self._step.class_of is not one_class:
            granted = min(granted, self._part_of_share(request, computed, tokens))
        if self._gave_long:
            left = max(self._long_left - self._kept_of_longs, min(self._long_left, 1))
            granted = min(granted, math.ceil(left / max(self._longs_due, 1)))
            if self._fit_s is not None and granted < request.num_tokens - computed:
                granted = cut_chunk(granted, self._beside, computed)
            self._long_left -= granted
            self._longs_due -= 1
        else:
            granted = min(granted, self._short_left)
            self._short_left -= granted
            self._count_short(request, granted)
        self._beside += granted
        return granted

    def taken_back(self, request: RequestView, tokens: int) -> None:
        """Leave it to others of its kind."""
        if not self.active:
            return
        self._beside -= tokens
        if self._gave_long:
            self._long_left += tokens
        else:
            self._short_left += tokens
            self._count_short(request, -tokens)

    def _count_short(self, request: RequestView, tokens: int) -> None:
        if (class_of := self._step.class_of) is not one_class:
            own = class_of(request)
            self._shorts_took[own] = self._shorts_took.get(own, 0) + tokens

    def _part_of_share(self, request: RequestView, computed: int, tokens: int) -> int:
        """Divide a share of the step, where its class has no more, as a whole one is divided.

        That there is one is seen where it is too small for what the prompt could use. A short one
        that it is enough for is done in this step, and need leave longs nothing.
        """
        own = self._step.class_of(request)
        if self._gave_long and own in self._longs_behind:
            self._longs_behind.remove(own)
        if tokens >= min(request.num_tokens - computed, self._step.budget - self._beside):
            return tokens
        slot = (tokens + self._shorts_took.get(own, 0)) // self._sharing
        if self._gave_long:
            return max(slot, 1) if self._num_shorts else tokens
        longs = min(self._longs_behind.count(own), self._sharing - 1)
        return max(tokens - min(longs * slot, self._due), 0)

    def _fit(self, request: RequestView, computed: int, tokens: int) -> int:
        """Cut a chunk to the slot, and to the time that it takes at its place in the prompt."""
        tokens = min(tokens, request.num_tokens - computed)
        if not self._cuts:
            return tokens
        tokens = min(tokens, self._slot)
        if self._fit_s is None:
            return tokens
        fitting = self.pace.chunk_within(self._fit_s, computed)
        return tokens if fitting is None else min(tokens, max(fitting, 1))

    def rank(self, request: RequestView) -> float:
        """Order shorts before longs, so that a long prefill is the first to be preempted.

        Unless it was preempted before: then it keeps its place and gets done, and an answer that
        somebody was reading goes before everybody.
        """
        if request.num_output_tokens:
            return -1.0
        return 1.0 if self._in_long(request) and not request.num_preemptions else 0.0

    def observe(self, result: StepResult) -> None:
        """Learn the pace of steps with and without prefill."""
        self.pace.observe(result.seconds, result.chunks)
        if not result.chunks:
            self._slow_steps = 0
        elif result.seconds > SHORTEST_STEP_S:
            self._slow_steps += 1

    # What it does

    def gauges(self) -> Mapping[str, float]:
        """Show how many longs prefill, and how long a step one chunk may cause."""
        shown = {"long_prefills": float(self._longs)}
        return shown if self._fit_s is None else shown | {"step_limit_seconds": self._fit_s}

    def counters(self) -> Mapping[str, float]:
        """Count longs admitted beyond the limit for their long wait."""
        return {"starvation_releases": float(self._releases)}

    def held_reason(self, lane: str) -> str:
        """Say whether the places for longs are taken, or this step is for the shorts alone."""
        return "long_limit" if self._longs >= self._places else "shorts_first"

    def _in_long(self, request: RequestView) -> bool:
        return self._counts_as_long(request, request.num_computed_tokens)

    def _counts_as_long(self, request: RequestView, computed: int) -> bool:
        return self._is_long(request.num_tokens - computed) and not request.num_output_tokens

    def _is_long(self, tokens_left: int) -> bool:
        return tokens_left > self.threshold
