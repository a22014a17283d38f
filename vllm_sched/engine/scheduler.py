"""vLLM's schedulers, asking policies. With none configured they are upstream, line for line.

`PolicySteps` holds everything that is ours and is put in front of either of vLLM's classes. It
works through small overrides around `super()`: an own waiting queue, the order of `running`, the
step's token budget, who decodes in it, the size of a chunk. `start` makes the policies, `in_flight`
says what they learn of a step, and `watched` shows what all of this does.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Final

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from vllm_sched.engine import policy_setup, vllm_compat
from vllm_sched.engine.block_chunks import BlockChunks
from vllm_sched.engine.in_flight import InFlight, StepDone, StepStarted, chunks_of
from vllm_sched.engine.parallel.dp_group import DpGroup, group_of
from vllm_sched.engine.telemetry import SchedulerStats, SchedulerTelemetry
from vllm_sched.engine.waiting.held import LaneKey
from vllm_sched.engine.waiting.lora_slots import LoraSlots
from vllm_sched.engine.waiting.queue import LaneQueue
from vllm_sched.policies.types import Gate, Policy, Step, StepResult, one_class

# What stands behind `PolicySteps` is either of vLLM's classes; both have what it uses.
if TYPE_CHECKING:

    class Upstream(Scheduler):
        """Either class, to the type checker."""

        max_num_scheduled_tokens: int
else:
    Upstream = object

RUNNING: Final = RequestStatus.RUNNING
COMPILES: Final = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
# To look up an enum's member takes as long as a gate may.
OPEN, CLOSED = Gate.OPEN, Gate.CLOSED
computed = attrgetter("num_computed_tokens")


def overrides(policies: Sequence[Policy], name: str) -> list[tuple[int, Callable[..., Any]]]:
    """Return this method of the policies that have their own: the others need not be asked."""
    base = getattr(Policy, name)
    return [
        (number, getattr(policy, name))
        for number, policy in enumerate(policies)
        if getattr(type(policy), name) is not base
    ]


class PolicySteps(Upstream):
    """What the policies decide, around the steps of the scheduler behind this class."""

    default_policies: ClassVar[Mapping[str, Mapping[str, object]]] = {}
    _policies: Sequence[Policy] = ()
    _seen: SchedulerStats | None = None
    _tell_result: Sequence[Callable[[StepResult], None]] = ()
    _lora_slots: LoraSlots | None = None
    _dp_group: DpGroup | None = None
    _step: Step  # the last one

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Found once: to look it up takes longer than what it does.
        self._upstream_lookahead: Callable[..., int] = super(
            PolicySteps, type(self)
        )._reserve_prefill_lookahead
        self._looks_ahead = vllm_compat.looks_ahead(self, self._upstream_lookahead)
        self._policies = policy_setup.configured(self, self.default_policies)
        self._in_flight = InFlight()
        self._cuts_prefills = False  # in this step
        self._decode_last = False  # in this step: behind prefills, which leave it its tokens
        self._room: int | None = None  # in this step: what prefills that run may have
        self._kept_for_image = 0  # in this step: what they may not have, for one who stands at one
        self._blocks: BlockChunks | None = None  # where chunks end at block boundaries
        self._given = 0  # prefill tokens, in this step
        self._granted = 0  # and how many of these and others the policies count as given
        self._looked_up: dict[str, int] = {}  # cached tokens of who waits, in one state of things
        self._looked_up_in = (-1, -1, -1)
        self._lanes_known: dict[str, LaneKey] | None = None  # of fronts, in a step
        self._looked = False  # whether somebody's lane is by what is cached
        self._blocks_read = 0  # of cached prefixes, by the look-ups of this step
        self._idle = False  # nothing runs, none awake holds blocks: every gate is open
        self._lenient = False  # the last step came out empty: none is cut short or paused in this
        self._paused_decodes = False  # in this step
        self._paused_since: float | None = None  # the step in which they were paused first
        self._paused_steps = 0  # since then
        self._departed = 0  # since the last step
        self._counted = 0  # how many of `running` the policies know of
        policy_setup.announce(self, self._policies)
        if not self._policies:
            return
        policy_setup.refuse_unsupported(self.vllm_config, type(self), self._policies)
        policy_setup.warn_of_idle_device(self)
        self._dp_group = group_of(self.vllm_config)
        self._in_flight = InFlight(self._dp_group)
        # Without chunked prefill a prompt can't be cut, only held.
        self._may_cut = bool(self.scheduler_config.enable_chunked_prefill)
        # For models that attend to all of an image at once.
        self._whole_images = bool(self.scheduler_config.disable_chunked_mm_input)
        if self.need_mamba_block_aligned_split:
            block = self.cache_config.block_size
            self._blocks = BlockChunks(block, self._mamba_block_aligned_split)
        self._arranges = any(policy.arranges for policy in self._policies)
        self._prefills_lead = any(policy.prefills_lead for policy in self._policies)
        self._ask_lane = overrides(self._policies, "lane")
        self._ask_gate = overrides(self._policies, "gate")
        self._ask_stays = overrides(self._policies, "stays")
        self._ask_urgency = overrides(self._policies, "urgency")
        self._ask_budget = [ask for _, ask in overrides(self._policies, "budget")]
        self._ask_pause = [ask for _, ask in overrides(self._policies, "pauses_decodes")]
        self._ask_chunk = [
            (ask, self._policies[number].taken_back)
            for number, ask in overrides(self._policies, "chunk")
        ]
        self._ask_rank = [ask for _, ask in overrides(self._policies, "rank")]
        self._classing = next((p for p in self._policies if p.classes), None)
        self._class_of = one_class if self._classing is None else self._classing.service_class
        self._classes: dict[Request, float] = {}  # of those who decode
        self._classes_as_of: int | None = None
        # By priority upstream chooses for itself whom to preempt.
        self._by_class = (
            self._class_of is not one_class and self.policy != SchedulingPolicy.PRIORITY
        )
        self._kv_cache = policy_setup.kv_cache_of(self)
        self._tell_arrived = [tell for _, tell in overrides(self._policies, "arrived")]
        self._tell_admitted = [tell for _, tell in overrides(self._policies, "admitted")]
        self._tell_departed = [tell for _, tell in overrides(self._policies, "departed")]
        self._tell_result = [tell for _, tell in overrides(self._policies, "observe")]
        if self.lora_config is not None:
            self._lora_slots = LoraSlots(self.lora_config.max_loras)
        self.waiting = LaneQueue(
            by_priority=self.policy == SchedulingPolicy.PRIORITY,
            lanes_of=self._lanes_of,
            gate_of=self._gate_of,
            urgency_of=self._urgency_of,
            blocks_read=lambda: self._blocks_read,
            clock=self.clock,
            num_policies=len(self._policies),
            closed_adapter=self._closed_adapter,
            open_adapters=self._open_adapters,
            compiles_grammar=_compiles_grammar,
        )

    def clock(self) -> float:
        """Tell the time that waits and steps are measured by."""
        return time.monotonic()

    def wall_clock(self) -> float:
        """Tell the time that requests' arrivals are in."""
        return time.time()

    # Overrides

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Tell the policies what the step looks like, let upstream schedule, take notes."""
        if not self._policies:
            return super().schedule(*args, **kwargs)
        budget = self.max_num_scheduled_tokens
        self._step = step = self._begin_step()
        self._given = self._granted = 0
        num_running = len(self.running)
        try:
            self._constrain(step)
            self._room = self._room_of_prefills(step)
            output = super().schedule(*args, **kwargs)
        finally:
            self.max_num_scheduled_tokens = budget
            self._cuts_prefills = False
            self._lanes_known = None
            self.waiting.end_step()
        self._note_step(output, step, num_running)
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any
    ) -> Any:
        """Tell the policies how long the step took."""
        # Where nobody learns, nothing was noted.
        if (self._policies or self._seen is not None) and (
            done := self._in_flight.end(scheduler_output, self.clock)
        ) is not None:
            self._learn(done)
        return super().update_from_output(scheduler_output, *args, **kwargs)

    def add_request(self, request: Request) -> None:
        """Tell the policies of a new request, and what its client wished."""
        if self._policies and self._tell_arrived and request.request_id not in self.requests:
            wishes = request.sampling_params and request.sampling_params.extra_args
            for tell in self._tell_arrived:
                tell(request, wishes or {})
        super().add_request(request)

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        ready = super()._handle_blocked_waiting_request(request)
        if not ready or (slots := self._lora_slots) is None:
            return bool(ready)
        # A request that holds KV blocks does not pass the lanes, so its adapter is checked here.
        if closed := self._closed_adapter(request):
            slots.skipped(request)
        return not closed

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        if self._policies:
            self._departed += request.num_computed_tokens > 0
            self._classes.pop(request, None)
            if self._lora_slots is not None:
                self._lora_slots.departed(request)
            if self._blocks is not None:
                self._blocks.forget(request)
            now = self.clock()
            for tell in self._tell_departed:
                tell(request, now)
        return super()._free_request(request, *args, **kwargs)

    def shutdown(self) -> None:
        """Remove the file that data-parallel ranks share."""
        if self._dp_group is not None:
            self._dp_group.remove()
        super().shutdown()

    def _reserve_prefill_lookahead(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        # Asked for everybody who runs, in each step: most of what policies cost is here.
        if self._cuts_prefills and (request.is_prefill_chunk or request.status is not RUNNING):
            num_new_tokens = self._cut(request, num_computed_tokens, num_new_tokens)
        if self._looks_ahead:
            return self._upstream_lookahead(self, request, num_computed_tokens, num_new_tokens)
        return num_new_tokens if num_new_tokens > 0 else 0  # noqa: FURB136 - a call takes longer

    # Before the step

    def _begin_step(self) -> Step:
        now = self.clock()
        running = self.running
        prefills, decoding = self._prefills_and_decodes()
        self._decode_last = False
        self._blocks_read = 0
        self._lanes_known = {}
        kv_free = 1.0 - self.kv_cache_manager.usage
        kv_short = self._by_class and self._may_preempt(kv_free, prefills)
        if kv_short or (prefills and self._arranges):
            self._arrange(prefills, decoding, by_class=kv_short)
        self._counted = len(running)
        if self._lora_slots is not None:
            self._lora_slots.begin_step(running, now)
        self.waiting.begin_step(now)
        # Sessions that wait for their client's next input keep theirs, for who knows how long.
        asleep = self.num_waiting_for_streaming_input
        self._idle = not running and len(self.kv_holding_waiting) <= asleep
        refused = self.waiting.refused
        if refused is not None and self._has_room(refused, kv_free):
            refused = None  # it was left for something else, or there is room by now
        step = Step(
            index=self.current_step + 1,
            now=now,
            budget=self.max_num_scheduled_tokens,
            decodes=self._tokens_of(decoding, prefills),
            prefills=prefills,
            free_slots=self.max_num_active_reqs - self._slots_taken(),
            refused=None if refused is None else refused.request_id,
            running=len(running),
            decoding=decoding,
            context_tokens=sum(map(computed, decoding)),
            waiting=len(self.waiting),
            holding_kv=len(self.kv_holding_waiting),
            kv_free=kv_free,
            departed=self._departed,
            clock_offset=now - self.wall_clock(),
            paused_s=0.0 if self._paused_since is None else now - self._paused_since,
            paused_steps=self._paused_steps,
            may_enter=self._may_enter,
            ask_gates=self._ask_gates,
            class_of=self._class_of,
        )
        self._departed = 0
        for policy, counts in zip(self._policies, self.waiting.counts, strict=True):
            policy.begin_step(step, counts)
        return step

    def _may_preempt(self, kv_free: float, prefills: Sequence[Request]) -> bool:
        """Whether the KV cache may be too small for the step; told by the most that it can take."""
        tokens = self.max_num_scheduled_tokens if prefills else 0
        cache = self._kv_cache
        blocks = 2 * len(self.running) * len(cache.groups) + cache.blocks_at_most(tokens)
        return bool(kv_free * cache.blocks < blocks)

    def _arrange(self, prefills: list[Request], decoding: list[Request], *, by_class: bool) -> None:
        """Put decodes before prefills; the last is whom upstream preempts.

        By class the worst are, decodes or not, and the newest of these the very last.
        """
        running = self.running
        prefills.sort(key=self._rank)
        if by_class:
            classes = self._classes_of(decoding)
            decoding.sort(key=classes.__getitem__)
        running[:] = prefills + decoding if self._prefills_lead else decoding + prefills
        if self._prefills_lead or not (prefills and decoding):
            return
        newest = decoding[-1]
        if by_class and classes[newest] > self._class_of(prefills[0]):
            running.sort(key=(classes | {r: self._class_of(r) for r in prefills}).__getitem__)
            self._decode_last = True
        if self._spares(prefills[-1], newest):
            running.remove(newest)
            running.append(newest)
            self._decode_last = True

    def _classes_of(self, decoding: list[Request]) -> dict[Request, float]:
        """Tell the classes of these, who decode.

        To ask about hundreds takes a good part of a step, and while the cache is full it would be
        in each: only newcomers are asked about, unless the policy says that others have changed.
        """
        classes = self._classes
        reclassed = None if self._classing is None else self._classing.reclassed
        if reclassed is None or reclassed != self._classes_as_of:
            classes.clear()
            self._classes_as_of = reclassed
        for request in decoding:
            if request not in classes:
                classes[request] = self._class_of(request)
        return classes

    def _spares(self, last: Request, newest: Request) -> bool:
        """Whether an answer that came back from a preemption is spared the next.

        It would be the last, and go again and again, until it is a decode. The newest decode is
        the victim instead, as it would be in upstream's order.
        """
        # By priority upstream chooses for itself; and nobody goes for one of a lesser class.
        if not last.num_output_tokens or self.policy == SchedulingPolicy.PRIORITY:
            return False
        return self._class_of(last) <= self._class_of(newest)

    def _prefills_and_decodes(self) -> tuple[list[Request], list[Request]]:
        running = self.running
        # Kept by upstream for its own needs: empty means that nobody runs in prefill.
        count = len(self._inflight_prefills)
        if not count:
            return [], running.copy()
        # As arranged in the step before: decodes, then prefills. Newcomers come last.
        tail = running[-count:]
        if all(r.is_prefill_chunk and r in self._inflight_prefills for r in tail):
            return tail, running[:-count]
        return (
            [request for request in running if request.is_prefill_chunk],
            [request for request in running if not request.is_prefill_chunk],
        )

    def _tokens_of(self, decoding: Sequence[Request], prefills: Sequence[Request]) -> int:
        """Count what these take of the step at the most: a token each, and what was drafted.

        That is often nothing. Room kept for all that might be would be what prompts starve for.
        Where there is no prompt nobody divides the step.
        """
        prompts_about = prefills or self.kv_holding_waiting or len(self.waiting)
        if not (self.num_spec_tokens and prompts_about):
            return len(decoding)
        return sum(
            max(r.num_tokens_with_spec + r.num_output_placeholders - r.num_computed_tokens, 1)
            for r in decoding
        )

    def _slots_taken(self) -> int:
        # A streaming session that waits for input runs no more, but keeps its slot.
        return len(self.running) + int(self.num_waiting_for_streaming_input)

    def _has_room(self, request: Request, kv_free: float) -> bool:
        """Whether the KV cache could hold the whole of it."""
        blocks = int(kv_free * self._kv_cache.blocks)
        blocks -= self.kv_cache_manager.watermark_blocks + 1
        return bool(self._kv_cache.blocks_of(request.num_tokens + 1) <= blocks)

    def _rank(self, request: Request) -> tuple[float, ...]:
        return tuple(rank(request) for rank in self._ask_rank)

    def _constrain(self, step: Step) -> None:
        """Set what this step may compute, as the policies want it."""
        prefills_about = bool(step.prefills or step.waiting or step.holding_kv)
        self._paused_decodes = False
        self._kept_for_image = 0
        # Whatever the policies had in mind, the step after an empty one goes without it.
        self._cuts_prefills = self._may_cut and prefills_about and not self._lenient
        if not prefills_about or self._lenient:
            return
        if step.decoding and any(pauses(step) for pauses in self._ask_pause):
            self._paused_decodes = True
            if self._paused_since is None:
                self._paused_since = step.now
            self._paused_steps += 1
            step.decodes = 0
            for request in self.running:
                if request.is_prefill_chunk:
                    continue
                # Upstream counts its step before it compares: this one alone is left out.
                request.next_decode_eligible_step = max(
                    request.next_decode_eligible_step, step.index + 1
                )
        if self._ask_budget:
            # What holds KV blocks already is never kept waiting for tokens.
            needed = step.holding_kv * (1 + self.num_spec_tokens) + step.decodes
            wanted = min(budget(step) for budget in self._ask_budget)
            if self._whole_images and wanted < step.budget:
                wanted = self._with_image(step, wanted)
            most = step.budget
            step.budget = self.max_num_scheduled_tokens = min(max(wanted, needed, 1), most)
            if self._blocks is not None and step.budget < most:
                enough = self._with_block(step, needed, self._blocks)
                self.max_num_scheduled_tokens = min(max(step.budget, enough), most)

    def _with_block(self, step: Step, needed: int, blocks: BlockChunks) -> int:
        """Return the least budget in which the prompt that is served first gets a chunk."""
        least = [
            blocks.least(request, request.num_computed_tokens)
            for request in (*step.prefills, *self.kv_holding_waiting)
        ]
        if (head := self._may_enter()) is not None:
            least.append(blocks.least(head, self._cached_tokens(head)))
        elif step.waiting:  # requests behind a blocked request may enter
            least.append(blocks.block)
        # Below a block upstream would let chunks end anywhere.
        return max(needed + max(least, default=0), blocks.block)

    def _with_image(self, step: Step, wanted: int) -> int:
        """Have the image that this step comes to fit into it, beside what others get of it.

        Upstream ends a chunk before one that does not, so that the next step, with more tokens,
        takes all of it. One as small would read it in parts or, with drafts, never.
        """
        tokens = left = max(wanted - step.decodes, 1)
        about: list[Request] = [*step.prefills]
        if (head := self._may_enter()) is not None:
            about.append(head)
        for request in about:
            # Others may get less of the step than they could use: it may stand at one already.
            near = max(left, 1 + int(self.num_spec_tokens))
            if request.has_encoder_inputs and (least := self._to_image_end(request, near)):
                if request is about[0]:
                    return max(wanted, step.decodes + least)
                self._kept_for_image = least
                return max(wanted, step.decodes + tokens) + least
            left -= request.num_tokens - request.num_computed_tokens
        return wanted

    def _to_image_end(self, request: Request, near: int) -> int:
        """Count what a prompt has to read to the end of its next image; 0 if none is so near."""
        done = request.num_computed_tokens
        if request.status is not RUNNING and not done:
            done = self._cached_tokens(request)
        for feature in request.mm_features:
            place = feature.mm_position
            if place.offset >= done:
                ahead = place.offset - done
                return int(ahead + place.length) if ahead < near else 0
        return 0

    def _room_of_prefills(self, step: Step) -> int | None:
        """Tell what those that run may have, if upstream serves somebody after them who needs some.

        Whose KV came from elsewhere is one token short of its answer, and waits for that alone.
        """
        asleep = int(self.num_waiting_for_streaming_input)
        # Who has no slot can't enter, whatever is left.
        holders = min(max(step.holding_kv - asleep, 0), step.free_slots)
        holding = holders * (1 + int(self.num_spec_tokens))
        if not (holding or self._decode_last or self._kept_for_image):
            return None
        # Before a prefill decodes have had what they take, and upstream gives it no more than is
        # left.
        least = 0 if self._decode_last else 1
        budget = self.max_num_scheduled_tokens - self._kept_for_image
        room = budget if self._prefills_lead else max(budget - step.decodes, least)
        # For some of them it is not here yet: a prompt goes on whatever their number.
        left = room - min(holding, room // 2)
        return left if self._blocks is None else max(left, min(self._blocks.block, room))

    # During the step

    def _lanes_of(self, request: Request) -> LaneKey:
        # Fronts are asked about whenever somebody asks who enters. What was found without a look at
        # the cache, which changes as blocks are taken, stays so for a step.
        known = self._lanes_known
        if known is not None and (lanes := known.get(request.request_id)) is not None:
            return lanes
        self._looked = False
        cached = partial(self._cached_tokens, request)
        names = [""] * len(self._policies)
        for number, lane in self._ask_lane:
            names[number] = lane(request, cached)
        lanes = tuple(names)
        if known is not None and not self._looked:
            known[request.request_id] = lanes
        return lanes

    def _cached_tokens(self, request: Request) -> int:
        """How much of a waiting prompt need not be computed: local hits, and KV on its way."""
        self._looked = True
        # Any client can say so; without a connector nothing comes, and it is computed here.
        remote = request.kv_transfer_params if self.connector is not None else None
        if isinstance(remote, dict) and remote.get("do_remote_prefill"):
            return int(request.num_tokens)
        manager = self.kv_cache_manager
        if not manager.prefix_cache_lookup_enabled(request):
            return 0
        # What is cached changes as blocks are taken, and between steps: asked again before that,
        # which a held front is several times in a step, the answer is the same. And while nobody
        # may enter, whose prompt was long in the cache need not be read through in every step.
        free = manager.block_pool.get_num_free_blocks()
        state = self.current_step, len(self.running), free
        if self._looked_up_in != state and self._admits():
            self._looked_up_in = state
            self._looked_up.clear()
        if (known := self._looked_up.get(request.request_id)) is None:
            # The look-up alone: `get_computed_blocks` would publish cache events besides.
            hit = manager.coordinator.find_longest_cache_hit(
                request.block_hashes, request.num_tokens - 1
            )
            known = self._looked_up[request.request_id] = int(hit[1])
            self._blocks_read += self._kv_cache.blocks_at_most(known)
        return known

    def _may_enter(self) -> Request | None:
        if not self._admits():
            return None
        choice: Request | None = self.waiting.first_choice()
        if choice is None or self._closed_adapter(choice):
            return None
        return choice if self.waiting.could_begin(choice) else None

    def _closed_adapter(self, request: Request) -> int:
        """Return the request's LoRA adapter if no request may enter with it now, else 0."""
        if (slots := self._lora_slots) is None:
            return 0
        self._note_admissions()
        return slots.closed_adapter(request)

    def _open_adapters(self) -> Collection[int] | None:
        """Return the LoRA adapters that requests may enter with; None if it may be any."""
        if (slots := self._lora_slots) is None:
            return None
        self._note_admissions()
        return slots.open_adapters()

    def _ask_gates(self) -> None:
        # Where upstream had tokens left for those who wait, what was found then will do: this step
        # has some too. And where one policy alone has gates nobody is held by another.
        if len(self._ask_gate) > 1 and not self.waiting.offered and self._admits():
            self.waiting.ask_gates()

    def _admits(self) -> bool:
        full = self._slots_taken() >= self.max_num_active_reqs
        return not full and self.pause_state == PauseState.UNPAUSED

    def _gate_of(self, lanes: LaneKey, head: Request, waited: float) -> Gate:
        running = self.running
        if len(running) != self._counted:
            self._note_admissions()
        strictest, closed_by = OPEN, None
        if not self._idle or running:
            for number, gate in self._ask_gate:
                if (said := gate(lanes[number], head, waited)) is CLOSED:
                    # Who comes after holds nobody, and need not be told of one that it lets in.
                    strictest, closed_by = CLOSED, number
                    break
                if said is not OPEN:
                    strictest = said
            if strictest is not CLOSED and not all(
                stays(lanes[number], head) for number, stays in self._ask_stays
            ):
                strictest = CLOSED  # held by nobody: it is to move
        self.waiting.held(lanes, closed_by)
        if self._seen is not None:
            self._seen.gate(lanes, closed_by)
        return strictest

    def _urgency_of(self, lanes: LaneKey, head: Request, waited: float) -> tuple[float, ...]:
        return tuple(urgency(lanes[number], head, waited) for number, urgency in self._ask_urgency)

    def _note_admissions(self) -> None:
        if len(self.running) == self._counted:
            return
        for request in self.running[self._counted :]:
            for tell in self._tell_admitted:
                tell(request)
            if self._lora_slots is not None:
                self._lora_slots.admitted(request)
        self._counted = len(self.running)

    def _cut(self, request: Request, computed: int, tokens: int) -> int:
        # An encoder's inputs were chosen for the whole chunk: such a prompt is counted, not cut.
        if tokens <= 0 or request.has_encoder_inputs:
            self._given += max(tokens, 0)
            return tokens
        runs = request.status == RUNNING
        granted = tokens
        # One token short of its next is a decode, whatever upstream pads it to for drafts.
        if is_prompt := request.num_tokens - computed > 1:
            granted = self._least_chunk(request, computed, tokens)
        if self._blocks is not None and is_prompt:
            granted = self._block_chunk(request, computed, tokens, granted, self._blocks)
        if self._room is not None and runs:
            granted = min(granted, self._room)
            self._room -= granted
        if request.num_computed_tokens and not runs:
            # It waits and holds blocks: stopping it could stop those who wait for its blocks.
            granted = max(granted, 1)
        if granted <= 0:
            self.waiting.excuse()
        self._given += granted
        return granted

    def _block_chunk(
        self, request: Request, computed: int, tokens: int, granted: int, blocks: BlockChunks
    ) -> int:
        """Return a chunk of about the granted size that ends at a block boundary."""
        step, runs = self._step, request.status == RUNNING
        # It waits and holds blocks: stopping it could stop the requests that wait for its blocks.
        holds = not runs and request.num_computed_tokens > 0
        room = self._room if runs and self._room is not None else tokens
        if step.budget < self.max_num_scheduled_tokens:
            granted = min(granted, step.budget - step.decodes - self._granted)
        wanted = max(min(granted, room), int(holds))
        if wanted <= 0:
            return 0
        if self._prefills_lead:  # a chunk that a policy cut leaves decodes their tokens
            room = min(room, step.budget - step.decodes - self._given)
        chunk, unused = blocks.chunk(
            request,
            computed,
            wanted,
            most=tokens,
            room=tokens if holds else room,
            may_skip=lambda: not holds and self._has_other_work(step),
        )
        self._granted += wanted - unused
        self._take_back(request, unused)
        return chunk

    def _take_back(self, request: Request, tokens: int) -> None:
        if tokens:
            for _, taken_back in self._ask_chunk:
                taken_back(request, tokens)

    def _has_other_work(self, step: Step) -> bool:
        """Return whether the step is not empty without the prefill that is asked about."""
        if self._given or step.decodes:
            return True
        if step.refused is not None or (head := self._may_enter()) is None:
            return False
        granted = self._least_chunk(head, 0, min(head.num_tokens, step.budget))
        self._take_back(head, granted)
        return granted > 0

    def _least_chunk(self, request: Request, computed: int, tokens: int) -> int:
        granted, said = tokens, []
        for chunk, _ in self._ask_chunk:
            granted = min(granted, chunk(request, computed, granted))
            said.append(granted)
        for (_, taken_back), own in zip(self._ask_chunk, said, strict=True):
            if own > granted:
                taken_back(request, own - granted)
        return granted

    # After the step

    def _note_step(self, output: SchedulerOutput, step: Step, num_running: int) -> None:
        self._note_admissions()
        if not self._paused_decodes:
            self._paused_since, self._paused_steps = None, 0
        empty = not output.total_num_scheduled_tokens
        could = step.prefills or step.waiting or step.holding_kv or self._paused_decodes
        self._lenient = empty and bool(could) and self.pause_state == PauseState.UNPAUSED
        if empty:
            return
        chunks = chunks_of(
            itertools.chain(step.prefills, self.running[num_running:]), output.num_scheduled_tokens
        )
        decodes = len(output.num_scheduled_tokens) - len(chunks)
        context = step.context_tokens * decodes // max(len(step.decoding), 1)
        running, waiting = len(self.running), len(self.waiting)
        begun = StepStarted(
            output, step.index, step.now, step.budget, chunks, context, running, waiting
        )
        self._in_flight.begin(begun)

    def _learn(self, done: StepDone) -> None:
        for tell in self._tell_result:
            tell(done.result)


def _compiles_grammar(request: Request) -> bool:
    """Whether the request's grammar is being compiled."""
    grammar = request.structured_output_request
    return request.status is COMPILES and grammar is not None and not grammar.is_grammar_ready


class PolicyScheduler(SchedulerTelemetry, PolicySteps, AsyncScheduler):
    """Policies on vLLM's asynchronous scheduler, which is vLLM's default."""


class SyncPolicyScheduler(SchedulerTelemetry, PolicySteps, Scheduler):
    """Policies on vLLM's synchronous scheduler, for `--no-async-scheduling` and for CPUs."""


class LongPromptScheduler(PolicyScheduler):
    """`PolicyScheduler` with `long_prompt` on unless configured otherwise."""

    default_policies: ClassVar[Mapping[str, Mapping[str, object]]] = {"long_prompt": {}}


class SyncLongPromptScheduler(SyncPolicyScheduler):
    """`SyncPolicyScheduler` with `long_prompt` on unless configured otherwise."""

    default_policies: ClassVar[Mapping[str, Mapping[str, object]]] = {"long_prompt": {}}
