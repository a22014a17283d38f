"""Lanes for urgent, normal and batch requests inside one engine.

Idea: classes of service (Llumnix, QLM; Borg's batch tier). Urgent requests enter before normal
ones, and batch only while nobody else waits, leaving slots and KV blocks free for those who come
next. Its answers may grow into those blocks: when the cache is full the lowest lane is preempted,
of it the newest. A step's prefill is in the lanes' order, and an urgent prompt that enters finds
half of it: normal ones in prefill leave it that. While others are about, or were a moment
ago, batch prompts share a part of its budget, since whoever arrives waits for the step in progress;
and none of it in a step in which somebody else's prompt is computed.

A request's lane is what its client wrote as `"vllm_xargs": {"lane": "batch"}`, else what its
`priority` says: below 0 urgent, above 0 batch.

Ageing: once the front of a lane has waited for its `max_wait_s` it goes before everybody, reserve
or not, but one at a time: the next is released when that one is done. So an overdue lane always
moves, and a flood of overdue batch can't shut out the urgent. Prompts of better lanes in prefill
leave it half of the step that it enters with. With slots so few that the overdue take them all, an
urgent one that has waited `urgent_max_wait_s` takes turns with them: it goes before the next of
them, and that one before the next urgent one, or urgent ones that come faster than they are served
would shut everybody out. Urgent prompts in prefill leave that one half, too. Once it is in prefill
an overdue prompt is computed first, and leaves others than batch half of each step, or one after
the other would keep an urgent one from its second. A prompt that has been in prefill as long is
computed before the urgent.

Cost per step: O(running prefills). How it fails: a batch request that decodes for long keeps its
slot and its share of each step; only those who enter are chosen. By itself it makes no step
shorter: an urgent prompt waits for the one in progress, which may be a whole budget of a normal
one's. With `long_prompt` or `chunk_budget` beside it that is sized. With `lane` in its hands a
client may call everything urgent: set it in the gateway.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import ClassVar, Final

from pydantic import Field

from vllm_sched.policies.types import (
    FIRST_CLASS,
    EngineFacts,
    Gate,
    LaneCount,
    Policy,
    RequestView,
    Settings,
    Step,
)

URGENT, NORMAL, BATCH = LANES = ("urgent", "normal", "batch")
PLACES: Final = {lane: FIRST_CLASS + place for place, lane in enumerate(LANES)}
OVERDUE: Final = -1.0
FIRST: Final = -2.0
EMPTY: Final = LaneCount()
NO_LIMIT: Final = 1 << 60  # more tokens than any step has
NOBODY: Final = (math.inf, math.inf)  # no rank is between them


class LanesSettings(Settings):
    """What batch leaves to others, and how long one may wait at most."""

    reserve_slots: float = Field(
        0.125, ge=0, le=1, description="share of the slots that batch leaves free"
    )
    reserve_kv: float = Field(
        0.1, ge=0, le=1, description="share of the KV cache that batch leaves free"
    )
    batch_share: float = Field(
        0.125, gt=0, le=1, description="share of a step's budget for batch while others are about"
    )
    recent_s: float = Field(
        5.0, ge=0, description="others count as about for so long after the last of them was seen"
    )
    urgent_max_wait_s: float = Field(
        10.0,
        gt=0,
        description="an urgent request that waited so long takes turns with the overdue",
    )
    normal_max_wait_s: float = Field(
        30.0, gt=0, description="a normal request that waited so long goes before urgent ones"
    )
    batch_max_wait_s: float = Field(
        300.0, gt=0, description="a batch request that waited so long goes before all others"
    )


class Lanes(Policy):
    """See the module's text."""

    name: ClassVar[str] = "lanes"
    settings_type: ClassVar[type[Settings]] = LanesSettings
    held_reasons = ("others_wait", "others_prefill", "reserve")
    settings: LanesSettings
    arranges = True
    classes = True
    reclassed: int = 0

    def __init__(self, facts: EngineFacts, settings: LanesSettings) -> None:
        super().__init__(facts, settings)
        self.max_wait_s = {
            URGENT: math.inf,  # they are first but for one overdue request of each lane
            NORMAL: settings.normal_max_wait_s,
            BATCH: settings.batch_max_wait_s,
        }
        self._reserve = math.ceil(settings.reserve_slots * facts.max_num_seqs)
        self._asked: dict[str, str] = {}
        self._running: dict[str, tuple[str, float]] = {}  # the lane, and since when
        self._counts = dict.fromkeys(LANES, 0)  # of those
        self._released: dict[str, str] = {}  # the overdue request of a lane that is being served
        self._releases = 0
        self._urgents_turn = False  # an overdue one entered since the last urgent one did
        self._unknown = 0

        self._others_at = -math.inf  # when others were seen last

        # What follows is of the current step alone.
        self._now = 0.0
        self._this = Step(index=0, now=0.0, budget=0, decodes=0, prefills=())
        self._step: Step | None = None  # until it is known who else computes a prompt in it
        self._waiting: Mapping[str, LaneCount] = {}
        # Fronts that go before everybody, of which a lane has several where other policies have
        # lanes too; and whether it is for their wait.
        self._due: dict[str, bool] = {}
        self._free_slots = facts.max_num_seqs
        self._kv_free = 1.0
        self._batch_left = facts.max_num_batched_tokens
        self._others_in_prefill = False
        self._one_is_late = False
        self._shares = False  # whether the last chunk was of that
        # Tokens for prompts of the others, beside an urgent or overdue one who enters; None until
        # it is known whether there is one. Those whose ranks are between these have no more.
        self._beside: int | None = None
        self._leave_room = NOBODY
        self._counts_beside = False  # whether the last chunk was of that
        # Tokens for those who were let in for their wait; None until it is known.
        self._for_overdue: int | None = None
        self._counts_overdue = False  # whether the last chunk was of that

    # Who waits where

    def arrived(self, request: RequestView, wishes: Mapping[str, object]) -> None:
        """Keep the lane that the client asked for."""
        asked = wishes.get("lane")
        if isinstance(asked, str) and asked in PLACES:
            self._asked[request.request_id] = asked
        elif asked is not None:
            self._unknown += 1  # it can't be refused here, so it is served by its priority

    def lane(self, request: RequestView, cached: Callable[[], int]) -> str:
        """Name the lane that was asked for, else the one of its priority."""
        return self._lane(request)

    def _lane(self, request: RequestView) -> str:
        lane = self._asked.get(request.request_id)
        if lane is None:
            lane = NORMAL if not request.priority else URGENT if request.priority < 0 else BATCH
        return lane

    def begin_step(self, step: Step, lanes: Mapping[str, LaneCount]) -> None:
        """See what room there is, and whether batch has the engine to itself."""
        self._now = step.now
        self._waiting = lanes
        self._due.clear()
        self._free_slots = step.free_slots
        self._kv_free = step.kv_free
        if len(self._running) > step.running:
            self._forget_preempted(step)
        if self._others_wait() or self._counts[URGENT] or self._counts[NORMAL]:
            self._others_at = step.now
        alone = step.now - self._others_at > self.settings.recent_s
        share = 1.0 if alone else self.settings.batch_share
        self._others_in_prefill = any(self._lane(request) != BATCH for request in step.prefills)
        self._batch_left = max(int(share * step.budget), 1)
        self._beside = self._for_overdue = None
        self._one_is_late = any(
            (count := lanes.get(lane)) is not None and count.waited >= self.max_wait_s[lane]
            for lane in (NORMAL, BATCH)
        )
        self._step = self._this = step

    def _forget_preempted(self, step: Step) -> None:
        here = {r.request_id for each in (step.prefills, step.decoding) for r in each}
        for request_id in self._running.keys() - here:
            self._leave(request_id)

    def _others_wait(self) -> bool:
        waiting = self._waiting
        # A request that cannot begin is not waited for.
        return any(waiting.get(lane, EMPTY).able for lane in (URGENT, NORMAL))

    def gate(self, lane: str, head: RequestView, waited: float) -> Gate:
        """Hold batch while somebody else waits or is in prefill, or there is but the reserve.

        Where a step's share is used up it is not held: others of the lane are to leave it some.
        """
        if lane != BATCH:
            return Gate.OPEN
        if self._is_due(lane, head, waited):
            return Gate.OPEN
        if self._others_in_prefill:
            return Gate.CLOSED
        return Gate.CLOSED if self._others_wait() or not self._has_room(head) else Gate.OPEN

    def _has_room(self, head: RequestView) -> bool:
        return (
            # With no slot nobody comes, and what counts is who would if there were one.
            max(self._free_slots, 1) > self._reserve
            and self._kv_free - self.facts.kv_share(head) >= self.settings.reserve_kv
        )

    def urgency(self, lane: str, head: RequestView, waited: float) -> float:
        """Order lanes, an overdue front first, and urgent ones whom those kept waiting."""
        if lane == URGENT and self._urgents_turn and waited >= self.settings.urgent_max_wait_s:
            return FIRST
        return OVERDUE if self._is_due(lane, head, waited) else PLACES[lane]

    def _is_due(self, lane: str, head: RequestView, waited: float) -> bool:
        name, released = head.request_id, self._released.get(lane)
        self._due.pop(name, None)
        if released in self._running:
            return False
        # It was preempted and is back: it has waited enough, and so must those preempted after it,
        # who stand before it.
        is_back = released is not None and (released == name or head.num_preemptions > 0)
        if is_back or waited >= self.max_wait_s[lane]:
            self._due[name] = not is_back
        return name in self._due

    def admitted(self, request: RequestView) -> None:
        """Note where everybody is, and what room is left."""
        name = request.request_id
        lane = self._lane(request)
        if lane != BATCH and request.num_tokens - request.num_computed_tokens > 1:
            self._others_in_prefill = True  # one whose KV came from elsewhere decodes at once
        if lane == URGENT:
            self._urgents_turn = False
        elif (overdue := self._due.pop(name, None)) is not None:
            self._urgents_turn = True
            if overdue:
                self._released[lane] = name
                self._releases += 1
                self.reclassed += 1
        if name not in self._running:
            self._running[name] = (lane, self._now)
            self._counts[lane] += 1
        self._free_slots -= 1
        self._kv_free -= self.facts.kv_share(request)

    def departed(self, request: RequestView, now: float) -> None:
        """Forget it."""
        name = request.request_id
        lane = self._lane(request)
        if self._released.get(lane) == name:
            del self._released[lane]
            self.reclassed += 1
        self._asked.pop(name, None)
        self._leave(name)

    def _leave(self, name: str) -> None:
        if name in self._running:
            lane, _ = self._running.pop(name)
            self._counts[lane] -= 1

    # Who gets how much

    def service_class(self, request: RequestView) -> float:
        """Return its lane's place, or the first if it is served for its long wait."""
        name = request.request_id
        lane, since = self._running.get(name) or (self._lane(request), self._now)
        if self._is_released(request):
            return PLACES[URGENT]
        if self._now - since < self.max_wait_s[lane]:
            return PLACES[lane]
        # An answer may well be written for as long.
        in_prefill = request.num_tokens - request.num_computed_tokens > 1
        return PLACES[URGENT] if in_prefill else PLACES[lane]

    def rank(self, request: RequestView) -> float:
        """Compute prompts in the lanes' order, but before all one that has been at it too long."""
        place = self.service_class(request)
        return place if place == PLACES[self._lane(request)] else OVERDUE

    def chunk(self, request: RequestView, computed: int, tokens: int) -> int:
        """Give batch prompts, together, their share; if overdue, half of the step or more.

        Of the others those in prefill leave one who enters what it can use, or half: an urgent one,
        or one overdue of a lesser lane.
        """
        self._shares = self._counts_beside = self._counts_overdue = False
        is_released = self._is_released(request)
        if is_released:
            tokens = self._of_overdue(tokens)
        if is_released or self._lane(request) != BATCH:
            return self._of_others(request, tokens)
        if self._due.get(request.request_id) or self.rank(request) < PLACES[BATCH]:
            return tokens
        if (step := self._step) is not None:
            self._step = None
            if self._others_prefill(step):
                self._batch_left = 0
            elif step.decoding and not step.decodes:
                self._batch_left = step.budget  # they pause until it is done
        self._shares = True
        granted = min(tokens, self._batch_left)
        self._batch_left -= granted
        return granted

    def taken_back(self, request: RequestView, tokens: int) -> None:
        """Leave it to others like it."""
        if self._shares:
            self._batch_left += tokens
        if self._counts_beside and self._beside is not None:
            self._beside += tokens
        if self._counts_overdue and self._for_overdue is not None:
            self._for_overdue += tokens

    def _is_released(self, request: RequestView) -> bool:
        return self._released.get(self._lane(request)) == request.request_id

    def _of_overdue(self, tokens: int) -> int:
        if self._for_overdue is None:
            step = self._this
            room = max(step.budget - step.decodes, 1)
            theirs = sum(
                request.num_tokens - request.num_computed_tokens
                for request in step.prefills
                if self._lane(request) != BATCH and self.rank(request) != OVERDUE
            )
            if self._others_wait() and step.refused is None:
                head = step.may_enter()
                if head is not None and self._lane(head) != BATCH:
                    theirs += head.num_tokens
            self._for_overdue = room - min(theirs, room // 2) if theirs else NO_LIMIT
        granted = min(tokens, max(self._for_overdue, 0))
        self._for_overdue -= granted
        self._counts_overdue = True
        return granted

    def _of_others(self, request: RequestView, tokens: int) -> int:
        if request.request_id not in self._running:
            return tokens  # it enters
        if self._beside is None:
            self._beside = self._room_beside_first()
        if self._beside == NO_LIMIT:
            return tokens
        granted = tokens
        better, worse = self._leave_room
        if better < self.rank(request) < worse:
            granted = min(tokens, max(self._beside, 0))
        self._beside -= granted
        self._counts_beside = True
        return granted

    def _room_beside_first(self) -> int:
        """Count what those in prefill may have, where one enters who goes before them.

        They stand before it, and would take the whole step until they are done. It may turn out to
        have no use for its part, so that is half at most.
        """
        step = self._this
        urgent_wait = bool(self._waiting.get(URGENT, EMPTY).requests)
        # One that was refused for want of KV blocks may be so again.
        if step.refused is not None or not (urgent_wait or self._one_is_late):
            return NO_LIMIT
        if (head := step.may_enter()) is None:
            return NO_LIMIT
        lane = self._lane(head)
        if lane == URGENT:
            self._leave_room = OVERDUE if self._takes_turns() else PLACES[URGENT], math.inf
        elif self._due.get(head.request_id):
            self._leave_room = OVERDUE, PLACES[lane]
        else:
            return NO_LIMIT
        room = max(step.budget - step.decodes, 0)
        return room - min(head.num_tokens, room // 2)

    def _takes_turns(self) -> bool:
        """Whether an urgent one goes before the overdue, who wait for it to enter.

        They are not to wait for all that others of its lane have yet to read.
        """
        waited = self._waiting.get(URGENT, EMPTY).waited
        late = self._one_is_late and self._urgents_turn
        return late and waited >= self.settings.urgent_max_wait_s

    def _others_prefill(self, step: Step) -> bool:
        if self._others_in_prefill:
            return True
        # One that was refused for want of KV blocks may be so again, and then nobody would move.
        entering = step.may_enter()
        return (
            entering is not None
            and self._lane(entering) != BATCH
            and entering.request_id != step.refused
        )

    # What it does

    def gauges(self) -> Mapping[str, float]:
        """Show who runs and who waits, by lane."""
        return {f"running_{lane}": float(self._counts[lane]) for lane in LANES} | {
            f"waiting_{lane}": float(self._waiting.get(lane, EMPTY).requests) for lane in LANES
        }

    def counters(self) -> Mapping[str, float]:
        """Count those let in for their long wait, and lanes asked for that there aren't."""
        return {
            "starvation_releases": float(self._releases),
            "unknown_lanes": float(self._unknown),
        }

    def held_reason(self, lane: str) -> str:
        """Say what batch waits for."""
        if self._others_wait():
            return "others_wait"
        return "others_prefill" if self._others_in_prefill else "reserve"
