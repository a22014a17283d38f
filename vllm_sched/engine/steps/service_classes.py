"""The service classes of requests, by the policy that has classes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vllm.v1.request import Request

from vllm_sched.policies.types import Policy, one_class


class ServiceClasses:
    """The classes, cached for decodes."""

    def __init__(self, policies: Sequence[Policy]) -> None:
        self.policy = next((policy for policy in policies if policy.has_classes), None)
        self.class_of = one_class if self.policy is None else self.policy.service_class
        self._decode_classes: dict[Request, float] = {}
        self._class_changes: int | None = None  # the policy's, at the last clear

    def classes_of_decodes(self, decoding: Iterable[Request]) -> dict[Request, float]:
        """Return at least the classes of these decodes.

        To save time, the policy is asked about new decodes only, unless classes changed.
        """
        classes = self._decode_classes
        class_changes = None if self.policy is None else self.policy.class_changes
        if class_changes is None or class_changes != self._class_changes:
            classes.clear()
            self._class_changes = class_changes
        for request in decoding:
            if request not in classes:
                classes[request] = self.class_of(request)
        return classes

    def forget(self, request: Request) -> None:
        self._decode_classes.pop(request, None)
