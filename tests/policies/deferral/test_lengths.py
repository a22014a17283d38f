"""The mean lengths of recent requests."""

from __future__ import annotations

import pytest

from vllm_sched.policies.deferral.lengths import RequestLengths


def test_means_of_equal_requests_are_exact() -> None:
    lengths = RequestLengths()
    for _ in range(10):
        lengths.record_admission()
        lengths.record_prefill(300)
        lengths.record_departure(51)
    assert lengths.is_known
    assert (lengths.mean_prompt, lengths.mean_output) == pytest.approx((300, 50))
