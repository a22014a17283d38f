"""Texts of refusals."""

from __future__ import annotations

import pytest

from proxy.core.model import refusals
from proxy.core.tenants.limits import Limit, LimitExceeded


@pytest.mark.parametrize(
    ("wait_s", "text"), [(0.02, "0.02s"), (59.9, "59.9s"), (60.0, "60s"), (1234.5678, "1234.568s")]
)
def test_limit_names_the_wait_in_plain_digits(wait_s: float, text: str) -> None:
    refusal = refusals.limited_for_now(LimitExceeded(Limit.TOKENS, 500, wait_s), wait_s)
    assert refusal.message.endswith(f"Please try again in {text}.")


def test_deadline_shows_times_below_a_tenth_of_a_second() -> None:
    message = refusals.deadline(0.021, 0.001, 1.0).message
    assert "about 0.021 s; X-Request-Deadline-Ms leaves 0.001 s" in message
