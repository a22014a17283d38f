"""The sizes of the prefill chunks in one step."""

from __future__ import annotations

from typing import Final

from vllm.v1.request import Request, RequestStatus

from vllm_sched.engine.steps.admission import Admission
from vllm_sched.engine.steps.block_chunks import BlockChunks
from vllm_sched.engine.steps.hooks import PolicyHooks
from vllm_sched.policies.types import Step

RUNNING: Final = RequestStatus.RUNNING


class StepChunks:
    def __init__(
        self,
        step: Step,
        hooks: PolicyHooks,
        admission: Admission,
        blocks: BlockChunks | None,
        *,
        token_limit: int,
        room: int | None,
    ) -> None:
        self._step = step
        self._hooks = hooks
        self._admission = admission
        self._blocks = blocks  # None unless chunks end at block boundaries
        self._token_limit = token_limit  # of vLLM; may exceed the step's budget
        self._room = room  # tokens left for running prefills, None for no cap
        self._chunk_tokens = 0  # of the chunks so far
        self._policy_tokens = 0  # that policies count; only with `blocks`

    def grant(self, request: Request, computed: int, tokens: int) -> int:
        """Return how many of `tokens` a prefill gets in this step."""
        # vLLM chose encoder inputs for the whole chunk, so it is not cut.
        if tokens <= 0 or request.has_encoder_inputs:
            self._chunk_tokens += max(tokens, 0)
            return tokens
        granted = tokens
        # With one token to compute it is a decode, though vLLM may pad it for drafts.
        if request.num_tokens - computed > 1:
            granted = self._least_grant(request, computed, tokens)
            if self._blocks is not None:
                granted = self._block_chunk(request, computed, tokens, granted, self._blocks)
        if request.status is RUNNING:
            if self._room is not None:
                granted = min(granted, self._room)
                self._room -= granted
        elif request.num_computed_tokens:
            granted = max(granted, 1)  # other requests may wait for its blocks
        if granted <= 0:
            self._admission.queue.stop_scan()
        self._chunk_tokens += granted
        return granted

    def _least_grant(self, request: Request, computed: int, tokens: int) -> int:
        """Return the least grant, and take the rest back from other policies."""
        granted, grants = tokens, []
        for chunk in self._hooks.chunk:
            granted = min(granted, chunk(request, computed, granted))
            grants.append(granted)
        for taken_back, grant in zip(self._hooks.taken_back, grants, strict=True):
            if grant > granted:
                taken_back(request, grant - granted)
        return granted

    def _block_chunk(
        self, request: Request, computed: int, tokens: int, granted: int, blocks: BlockChunks
    ) -> int:
        step, runs = self._step, request.status is RUNNING
        holds_blocks = not runs and request.num_computed_tokens > 0
        room = self._room if runs and self._room is not None else tokens
        if step.budget < self._token_limit:
            granted = min(granted, step.budget - step.decode_tokens - self._policy_tokens)
        wanted = max(min(granted, room), int(holds_blocks))
        if wanted <= 0:
            return 0
        chunk, unused = blocks.chunk(
            request,
            computed,
            wanted,
            max_tokens=tokens,
            room=tokens if holds_blocks else room,
            may_skip=lambda: not holds_blocks and self._has_other_work(),
        )
        self._policy_tokens += wanted - unused
        self._take_back(request, unused)
        return chunk

    def _take_back(self, request: Request, tokens: int) -> None:
        if tokens:
            for taken_back in self._hooks.taken_back:
                taken_back(request, tokens)

    def _has_other_work(self) -> bool:
        step = self._step
        if self._chunk_tokens or step.decode_tokens:
            return True
        if step.kv_blocked is not None or (head := self._admission.next_to_enter()) is None:
            return False
        granted = self._least_grant(head, 0, min(head.num_tokens, step.budget))
        self._take_back(head, granted)
        return granted > 0
