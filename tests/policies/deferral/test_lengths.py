"""The mean lengths of recent requests."""

from __future__ import annotations

import pytest

from vllm_sched.policies.deferral.lengths import RequestLengths


def test_means_of_equal_requests_are_exact() -> None:
    lengths = RequestLengths()
    for _ in range(10):
        lengths.admitted()
        lengths.prefilled(300)
        lengths.departed(51)
    assert lengths.known
    assert (lengths.prompt, lengths.output) == pytest.approx((300, 50))
