"""The token budget of a step: how much it may compute, and how much of that prefills may take."""

from __future__ import annotations

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from vllm_sched.engine.block_chunks import BlockChunks
from vllm_sched.engine.steps.admission import Admission
from vllm_sched.engine.steps.hooks import PolicyHooks
from vllm_sched.engine.steps.plan import StepLimit, StepPlan
from vllm_sched.engine.steps.prefixes import CachedPrefixes
from vllm_sched.policies.types import Step


class StepBudget:
    """Turns the policies' budgets into the limits of a step."""

    def __init__(
        self,
        scheduler: Scheduler,
        hooks: PolicyHooks,
        admission: Admission,
        prefixes: CachedPrefixes,
        blocks: BlockChunks | None,
        *,
        prefills_lead: bool,
    ) -> None:
        self._scheduler = scheduler
        self._budgets = hooks.budget
        self._admission = admission
        self._prefixes = prefixes
        self._blocks = blocks  # None unless chunks end at block boundaries
        self._prefills_lead = prefills_lead
        self._tokens_per_decode = 1 + int(scheduler.num_spec_tokens)
        # Some models attend to a whole image at once.
        self._whole_images = bool(scheduler.scheduler_config.disable_chunked_mm_input)

    def decode_tokens(self, prefills: list[Request], decoding: list[Request]) -> int:
        """Return the tokens that decodes take at most: one each, and their drafts.

        Often few tokens are drafted. To reserve all that could be drafted would starve prompts.
        """
        scheduler = self._scheduler
        prompts = prefills or scheduler.kv_holding_waiting or len(scheduler.waiting)
        # Without prompts nothing divides the step.
        if not (scheduler.num_spec_tokens and prompts):
            return len(decoding)
        return sum(
            max(r.num_tokens_with_spec + r.num_output_placeholders - r.num_computed_tokens, 1)
            for r in decoding
        )

    def limit(self, step: Step) -> StepLimit:
        """Set the step's budget to the least that a policy wants; return the limit for vLLM."""
        most = step.budget
        if not self._budgets:
            return StepLimit(most)
        # Requests that hold KV blocks always get their tokens.
        needed = step.holding_kv * self._tokens_per_decode + step.decodes
        limit = StepLimit(min(budget(step) for budget in self._budgets))
        if self._whole_images and limit.tokens < most:
            limit = self._with_image(step, limit.tokens)
        step.budget = tokens = min(max(limit.tokens, needed, 1), most)
        if self._blocks is not None and step.budget < most:
            enough = self._with_block(step, needed, self._blocks)
            tokens = min(max(step.budget, enough), most)
        return StepLimit(tokens, limit.kept_for_image)

    def prefill_room(self, plan: StepPlan, limit: StepLimit) -> int | None:
        """Return the tokens that running prefills may take, None for no cap.

        There is a cap if vLLM serves other requests after them: requests that wait with KV blocks,
        decodes behind prefills, or a prompt that is about to read an image.
        """
        step = plan.step
        asleep = int(self._scheduler.num_waiting_for_streaming_input)
        # Requests without a slot cannot enter.
        holders = min(max(step.holding_kv - asleep, 0), step.free_slots)
        # A request with remote KV needs only the tokens of a decode.
        holding = holders * self._tokens_per_decode
        if not (holding or plan.decode_is_last or limit.kept_for_image):
            return None
        tokens = limit.tokens - limit.kept_for_image
        if self._prefills_lead:
            room = tokens
        else:
            # Decodes in front have had their tokens, so vLLM itself keeps prefills to the rest.
            room = max(tokens - step.decodes, 0 if plan.decode_is_last else 1)
        # KV of some holders may not have arrived yet: prefills get at least half of the room.
        left = room - min(holding, room // 2)
        return left if self._blocks is None else max(left, min(self._blocks.block, room))

    def _with_block(self, step: Step, needed: int, blocks: BlockChunks) -> int:
        """Return the least budget in which the prompt that is served first gets a chunk."""
        least = [
            blocks.least(request, request.num_computed_tokens)
            for request in (*step.prefills, *self._scheduler.kv_holding_waiting)
        ]
        if (head := self._admission.may_enter()) is not None:
            least.append(blocks.least(head, self._prefixes.tokens(head)))
        elif step.waiting:  # requests behind a blocked request may enter
            least.append(blocks.block)
        # With less than a block vLLM would let chunks end anywhere.
        return max(needed + max(least, default=0), blocks.block)

    def _with_image(self, step: Step, wanted: int) -> StepLimit:
        """Return a limit in which the next image fits, besides the tokens of other requests.

        vLLM ends a chunk before an image that does not fit, and reads the image in a later, larger
        step. If all steps were too small, the image would be read in parts or, with drafts, never.
        """
        tokens = left = max(wanted - step.decodes, 1)
        prompts: list[Request] = [*step.prefills]
        if (head := self._admission.may_enter()) is not None:
            prompts.append(head)
        for request in prompts:
            # Other prompts may take less than they could, so this prompt may be at an image.
            near = max(left, self._tokens_per_decode)
            if request.has_encoder_inputs and (least := self._to_image_end(request, near)):
                if request is prompts[0]:
                    return StepLimit(max(wanted, step.decodes + least))
                return StepLimit(max(wanted, step.decodes + tokens) + least, least)
            left -= request.num_tokens - request.num_computed_tokens
        return StepLimit(wanted)

    def _to_image_end(self, request: Request, near: int) -> int:
        """Return the tokens to the end of the prompt's next image; 0 if no image is near."""
        done = request.num_computed_tokens
        if request.status is not RequestStatus.RUNNING and not done:
            done = self._prefixes.tokens(request)
        for feature in request.mm_features:
            place = feature.mm_position
            if place.offset >= done:
                ahead = place.offset - done
                return int(ahead + place.length) if ahead < near else 0
        return 0
