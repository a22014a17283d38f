"""Benchmark requests: sizes and shared prefixes."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from benchmarks.router.mock import END_OF_HEAD, LENGTH
from benchmarks.router.prompts import SHARED_EVERY, Pace, Prompts
from tests.present import present


def take(prompts: Prompts, count: int) -> list[bytes]:
    return [b"".join(prompts.next()) for _ in range(count)]


def body(request: bytes) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(request.partition(END_OF_HEAD)[2])
    return parsed


@pytest.mark.parametrize("size", [512, 1024, 100 * 1024])
@pytest.mark.parametrize("pace", [None, Pace(7, 25)])
def test_bodies_have_the_requested_size(size: int, pace: Pace | None) -> None:
    for request in take(Prompts(size, seed=1, pace=pace), 2 * SHARED_EVERY):
        head, _, rest = request.partition(END_OF_HEAD)
        assert len(rest) == size
        found = present(LENGTH.search(head))
        assert int(found[1]) == size
        assert [m["role"] for m in body(request)["messages"]] == ["system", "user"]
        assert ("stream" in body(request)) is (pace is not None)
    if pace:
        assert (body(request)["stream"], body(request)["max_tokens"]) == (True, 7)
        assert body(request)["messages"][1]["content"].startswith("gap-25ms ")


def test_one_request_in_four_shares_a_prefix() -> None:
    texts = [
        "".join(m["content"] for m in body(request)["messages"])
        for request in take(Prompts(2048, seed=3), 32 * SHARED_EVERY)
    ]
    assert len(set(texts)) == len(texts)
    assert take(Prompts(2048, seed=3), 9) == take(Prompts(2048, seed=3), 9)
    assert take(Prompts(2048, seed=3), 1) != take(Prompts(2048, seed=4), 1)
    half = [text[: len(text) // 2] for text in texts]
    earlier = [text in half[:number] for number, text in enumerate(half)]
    assert sum(earlier[len(texts) // 2 :]) == len(texts) // 2 // SHARED_EVERY
    # The other requests differ within the first block of any router.
    unique = [text[:16] for number, text in enumerate(texts) if (number + 1) % SHARED_EVERY]
    assert all(a != b for a, b in itertools.combinations(unique, 2))
