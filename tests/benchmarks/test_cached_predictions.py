"""The comparison of predicted and found tokens."""

from __future__ import annotations

import json
import random
from functools import cache

import pytest

from benchmarks import cached_predictions
from benchmarks.cached_predictions import Traffic, play, tokenizer


@cache
def fixed_texts() -> dict[str, str]:
    """Return texts that do not depend on the repository's own."""
    rng = random.Random(0)
    words = ["".join(rng.choices("etaoinshrdlu", k=rng.randint(2, 9))) for _ in range(500)]
    records = [
        {"id": n, "value": rng.random(), "tags": rng.choices(words, k=3)} for n in range(800)
    ]
    chars = [*map(chr, range(0x4E00, 0x5200)), *"\uff0c\u3002" * 99]
    chinese = "".join(rng.choices(chars, k=50_000))
    return {
        "prose": " ".join(rng.choices(words, k=20_000)),
        "json": json.dumps(records),
        "chinese": chinese,
    }


@pytest.mark.parametrize("block", [16, 128])
def test_repeated_forks_and_turns_are_predicted_within_a_block(
    monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(cached_predictions, "VOCABULARY", 600)
    monkeypatch.setattr(cached_predictions, "texts", fixed_texts)
    monkeypatch.setattr(cached_predictions, "tokenizer", cache(tokenizer.__wrapped__))
    traffic = Traffic(3)
    requests = [("systems", each) for each in traffic.systems()]
    requests += [("turns", each) for each in traffic.turns()]
    found = play(requests, block)
    assert [len(each) for each in found.values()] == [12, 8]
    # Of the first two with the common prompt nothing is known, and then only its size.
    for predicted, cached in found["systems"][2:] + found["turns"]:
        assert abs(predicted - cached) <= block, found
