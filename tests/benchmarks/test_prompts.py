"""The requests: their sizes, and what they have in common."""

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
def test_bodies_have_the_size_that_was_asked_for(size: int, pace: Pace | None) -> None:
    for request in take(Prompts(size, seed=1, pace=pace), 2 * SHARED_EVERY):
        head, _, rest = request.partition(END_OF_HEAD)
        assert len(rest) == size
        found = present(LENGTH.search(head))
        assert int(found[1]) == size
        assert [m["role"] for m in body(request)["messages"]] == ["system", "user"]


def test_a_pace_is_in_the_body() -> None:
    asked = body(take(Prompts(1024, seed=1, pace=Pace(7, 25)), 1)[0])
    assert (asked["stream"], asked["max_tokens"]) == (True, 7)
    assert asked["messages"][1]["content"].startswith("gap-25ms ")
    assert "stream" not in body(take(Prompts(1024, seed=1), 1)[0])


def test_no_request_is_like_another_and_a_seed_repeats_itself_alone() -> None:
    first, again, other = (take(Prompts(1024, seed=seed), 100) for seed in (1, 1, 2))
    assert first == again
    assert len({*first, *other}) == 200


def test_one_in_four_begins_like_an_earlier_one() -> None:
    texts = [
        "".join(m["content"] for m in body(request)["messages"])
        for request in take(Prompts(2048, seed=3), 32 * SHARED_EVERY)
    ]
    half = [text[: len(text) // 2] for text in texts]
    earlier = [text in half[:number] for number, text in enumerate(half)]
    assert sum(earlier[len(texts) // 2 :]) == len(texts) // 2 // SHARED_EVERY
    # And the others part from one another within the first block of any router.
    unique = [text[:16] for number, text in enumerate(texts) if (number + 1) % SHARED_EVERY]
    assert all(a != b for a, b in itertools.combinations(unique, 2))
