"""The comparison of predicted and found tokens."""

from __future__ import annotations

import pytest

from benchmarks import cached_predictions
from benchmarks.cached_predictions import Traffic, play


@pytest.mark.parametrize("block", [16, 128])
def test_repeated_forks_and_turns_are_predicted_within_a_block(
    monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(cached_predictions, "VOCABULARY", 600)
    cached_predictions.tokenizer.cache_clear()
    traffic = Traffic(3)
    requests = [("systems", each) for each in traffic.systems()]
    requests += [("turns", each) for each in traffic.turns()]
    found = play(requests, block)
    assert [len(each) for each in found.values()] == [12, 8]
    # Of the first two with the common prompt nothing is known, and then only its size.
    for predicted, cached in found["systems"][2:] + found["turns"]:
        assert abs(predicted - cached) <= block, found
