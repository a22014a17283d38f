"""Medium prompts: not long, but a few of them fill a step. They enter while they leave room in it.

The others wait, and shorter prompts pass them. Steps are as full as without this limit, so mediums
lose only the time of the shorts that pass.
"""

from __future__ import annotations

from collections.abc import Iterable

from vllm_sched.policies.types import BEFORE_FIRST_STEP, Gate, RequestView, Step


class MediumPrompts:
    """The medium prompts in prefill."""

    def __init__(self) -> None:
        self._prefills: dict[str, RequestView] = {}
        self._step = BEFORE_FIRST_STEP

    def begin_step(self, step: Step) -> None:
        self._step = step
        known = self._prefills
        self._prefills = {r.request_id: r for r in step.prefills if r.request_id in known}

    @property
    def room(self) -> int:
        """Return the tokens of the step that no medium prompt uses."""
        return self._room_next_to(self._prefills.values())

    def gate(self, head: RequestView) -> Gate:
        """Hold a medium prompt while those of its class, or a better one, fill the step."""
        class_of = self._step.class_of
        its_class = class_of(head)
        others = [other for other in self._prefills.values() if class_of(other) <= its_class]
        return Gate.OPEN if not others or self._room_next_to(others) > 0 else Gate.CLOSED

    def admitted(self, request: RequestView) -> None:
        self._prefills[request.request_id] = request

    def _room_next_to(self, prefills: Iterable[RequestView]) -> int:
        used = sum(r.num_tokens - r.num_computed_tokens for r in prefills)
        return max(self._step.budget - self._step.decode_tokens - used, 0)
