"""vLLM's scheduler has the behaviours that policies rely on, and a change is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_sched.engine import behaviour_checks
from vllm_sched.errors import UnsupportedVllmError


@pytest.mark.parametrize("check", behaviour_checks.CHECKS, ids=lambda check: check.__name__)
def test_vllm_passes_the_check(check: Callable[[], bool]) -> None:
    assert check()


def test_changed_behaviour_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    upstream = Scheduler.schedule

    def schedule(self: Scheduler, *args: object) -> object:
        self.running.sort(key=lambda request: request.request_id)  # ignores the arranged order
        return upstream(self, *args)

    monkeypatch.setattr(Scheduler, "schedule", schedule)
    with pytest.raises(UnsupportedVllmError, match=r"checks: running_is_served_in_order\)"):
        behaviour_checks.require_known_behaviour()


def test_check_that_raises_counts_as_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    def free(*_args: object, **_kwargs: object) -> None:
        raise TypeError("another argument is wanted")

    monkeypatch.setattr(Scheduler, "finish_requests", free)
    with pytest.raises(UnsupportedVllmError, match=r"checks: abort_frees_the_request\)"):
        behaviour_checks.require_known_behaviour()
