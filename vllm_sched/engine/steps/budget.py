"""The token budget of a step, and the part that prefills may take."""

from __future__ import annotations

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from vllm_sched.engine.steps.admission import Admission
from vllm_sched.engine.steps.block_chunks import BlockChunks
from vllm_sched.engine.steps.hooks import PolicyHooks
from vllm_sched.engine.steps.plan import StepLimit, StepPlan
from vllm_sched.engine.steps.prefix_lookups import PrefixCacheLookups
from vllm_sched.policies.types import Step


class StepBudget:
    def __init__(
        self,
        scheduler: Scheduler,
        hooks: PolicyHooks,
        admission: Admission,
        prefixes: PrefixCacheLookups,
        blocks: BlockChunks | None,
    ) -> None:
        self._scheduler = scheduler
        self._budgets = hooks.budget
        self._admission = admission
        self._prefixes = prefixes
        self._blocks = blocks  # None unless chunks end at block boundaries
        self._tokens_per_decode = 1 + int(scheduler.num_spec_tokens)
        self._whole_images = bool(scheduler.scheduler_config.disable_chunked_mm_input)

    def decode_tokens(self, prefills: list[Request], decoding: list[Request]) -> int:
        """Return the tokens that decodes take: one each, and what was drafted.

        To reserve the largest possible drafts would starve prompts.
        """
        scheduler = self._scheduler
        prompts = prefills or scheduler.kv_holding_waiting or len(scheduler.waiting)
        if not (scheduler.num_spec_tokens and prompts):
            return len(decoding)
        return sum(
            max(r.num_tokens_with_spec + r.num_output_placeholders - r.num_computed_tokens, 1)
            for r in decoding
        )

    def limit_step(self, step: Step) -> StepLimit:
        """Lower `step.budget` to the policies' least budget; return the limit for vLLM."""
        full_budget = step.budget
        if not self._budgets:
            return StepLimit(full_budget)
        # Requests with KV blocks always get their tokens, also with a prefill of one token.
        needed = step.num_holding_kv * self._tokens_per_decode + step.decode_tokens
        needed += bool(step.num_holding_kv and step.prefills)
        limit = StepLimit(min(budget(step) for budget in self._budgets))
        if self._whole_images and limit.tokens < full_budget:
            limit = self._limit_with_image(step, limit.tokens)
        step.budget = tokens = min(max(limit.tokens, needed, 1), full_budget)
        if self._blocks is not None and step.budget < full_budget:
            with_chunk = self._least_with_chunk(step, needed, self._blocks)
            tokens = min(max(step.budget, with_chunk), full_budget)
        return StepLimit(tokens, limit.kept_for_image)

    def prefill_room(self, plan: StepPlan, limit: StepLimit) -> int | None:
        """Return the tokens that running prefills may take, None for no cap.

        A cap leaves tokens to waiting requests with KV blocks, decodes behind prefills, or a
        prompt at an image, which vLLM serves later.
        """
        step = plan.step
        asleep = int(self._scheduler.num_waiting_for_streaming_input)
        holders = min(max(step.num_holding_kv - asleep, 0), step.free_slots)
        # A request with remote KV is a decode.
        holding = holders * self._tokens_per_decode
        if not (holding or plan.decode_is_last or limit.kept_for_image):
            return None
        tokens = limit.tokens - limit.kept_for_image
        # vLLM serves the decodes in front first.
        room = max(tokens - step.decode_tokens, 0 if plan.decode_is_last else 1)
        # Some KV may not have arrived: prefills get at least half.
        for_running = room - min(holding, room // 2)
        if self._blocks is None:
            return for_running
        return max(for_running, min(self._blocks.block_tokens, room))

    def _least_with_chunk(self, step: Step, needed: int, blocks: BlockChunks) -> int:
        """Return the least budget in which the first prompt gets a chunk."""
        chunks = [
            blocks.tokens_to_boundary(request, request.num_computed_tokens)
            for request in (*step.prefills, *self._scheduler.kv_holding_waiting)
        ]
        if (head := self._admission.next_to_enter()) is not None:
            chunks.append(blocks.tokens_to_boundary(head, self._prefixes.cached_tokens(head)))
        elif step.num_waiting:  # a request behind may enter
            chunks.append(blocks.block_tokens)
        # With less than a block, vLLM lets chunks end anywhere.
        return max(needed + max(chunks, default=0), blocks.block_tokens)

    def _limit_with_image(self, step: Step, limit: int) -> StepLimit:
        """Return at least this limit, so that the next image fits.

        vLLM leaves an image that does not fit to a larger step. Without one it would read the
        image in parts or, with drafts, never.
        """
        for_prompts = left = max(limit - step.decode_tokens, 1)
        prompts: list[Request] = [*step.prefills]
        if (head := self._admission.next_to_enter()) is not None:
            prompts.append(head)
        for request in prompts:
            # Earlier prompts may take less, so this prompt may already be at an image.
            ahead = max(left, self._tokens_per_decode)
            if request.has_encoder_inputs and (image := self._tokens_to_image_end(request, ahead)):
                if request is prompts[0]:
                    return StepLimit(max(limit, step.decode_tokens + image))
                return StepLimit(max(limit, step.decode_tokens + for_prompts) + image, image)
            left -= request.num_tokens - request.num_computed_tokens
        return StepLimit(limit)

    def _tokens_to_image_end(self, request: Request, max_ahead: int) -> int:
        """Return the tokens up to the next image's end; 0 if none begins within `max_ahead`."""
        computed = request.num_computed_tokens
        if request.status is not RequestStatus.RUNNING and not computed:
            computed = self._prefixes.cached_tokens(request)
        for feature in request.mm_features:
            image = feature.mm_position
            if image.offset >= computed:
                ahead = image.offset - computed
                return int(ahead + image.length) if ahead < max_ahead else 0
        return 0
