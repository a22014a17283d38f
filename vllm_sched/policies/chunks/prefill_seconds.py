"""The time that one step has for prefill."""

from __future__ import annotations

from vllm_sched.cost.step_time import Chunk, StepTime
from vllm_sched.policies.types import RequestView, Step


class PrefillSeconds:
    """The seconds left in one step; each granted chunk reduces them."""

    def __init__(
        self, model: StepTime, seconds: float, *, min_tokens: int, decodes: int, context_tokens: int
    ) -> None:
        self.seconds = seconds
        self.min_tokens = min_tokens  # granted even if there is no time
        self._model = model
        self._decodes = decodes
        self._context_tokens = context_tokens
        self._reserved_for: RequestView | None = None
        self._reserved_class = 0.0
        self._reserved_s = 0.0

    def count_tokens(self, step: Step, newcomer: RequestView | None) -> int:
        """Return the tokens that fit, in the order of service; reserve the newcomer's time."""
        model, seconds, tokens = self._model, self.seconds, 0
        for request in step.prefills:
            if newcomer is not None and step.class_of(request) > step.class_of(newcomer):
                break
            computed = request.num_computed_tokens
            rest = request.num_tokens - computed
            fitting = self._fitting(seconds, computed)
            if fitting < rest:
                return tokens + fitting
            tokens += rest
            seconds -= model.chunk_seconds(Chunk(rest, computed))
        fitting = self._fitting(seconds, 0)
        if newcomer is not None and fitting and (left := step.tokens_left(newcomer)):
            chunk = Chunk(min(fitting, left), newcomer.num_tokens - left)
            self._reserved_s = model.chunk_seconds(chunk)
            self._reserved_for, self._reserved_class = newcomer, step.class_of(newcomer)
        return tokens + fitting

    def grant(self, step: Step, request: RequestView, computed: int, tokens: int) -> int:
        left = self.seconds
        if (newcomer := self._reserved_for) is request:
            self._reserved_for = None
        elif newcomer is not None and step.class_of(request) > self._reserved_class:
            left -= self._reserved_s
        granted = min(tokens, max(self._fitting(left, computed), self.min_tokens, 0))
        if granted <= 0:
            return 0  # an empty chunk takes no time to read its context
        self.min_tokens -= granted
        self.seconds -= self._model.chunk_seconds(Chunk(granted, computed))
        return granted

    def _fitting(self, seconds: float, computed: int) -> int:
        return self._model.prefill_within(seconds, self._decodes, self._context_tokens, computed)
