"""Traces at another rate than their own: from all over the file, and without end."""

from __future__ import annotations

import random
from itertools import islice
from typing import TYPE_CHECKING

import pytest

from vllm_sched.bench.traffic.sampled import MAX_STRETCHES, STRETCH_LINES, Sampled
from vllm_sched.bench.traffic.types import Request, TrafficSource

if TYPE_CHECKING:
    from collections.abc import Iterator


class Numbered(TrafficSource):
    """Requests whose prompts are as long as their place."""

    name, timed, rate = "numbered", True, 7.0

    def __init__(self, count: int) -> None:
        self.count = count

    def requests(self, rng: random.Random) -> Iterator[Request]:  # noqa: ARG002
        """Make them; each begins with what two of them share."""
        for at in range(1, (self.count or 0) + 1):
            yield Request(float(at), "x", at, 1, shared=((at // 2, at),))


def sampled(count: int) -> Sampled:
    """Sample so many."""
    return Sampled(Numbered(count), random.Random(0))


def places(source: Sampled, count: int, seed: int = 0) -> list[int]:
    """Say which lines are played first."""
    return [each.prompt_tokens for each in islice(source.requests(random.Random(seed)), count)]


def test_it_is_a_source_without_end_or_times() -> None:
    source = sampled(120)
    assert (source.name, source.rate, source.count, source.timed) == ("numbered", 7.0, None, False)
    assert (source.lines, source.held) == (120, 120)
    assert list(sampled(0).requests(random.Random())) == []


@pytest.mark.parametrize("count", [1, 2, STRETCH_LINES, STRETCH_LINES + 1, 7 * STRETCH_LINES - 3])
def test_a_round_has_every_line_once_and_each_its_own_texts(count: int) -> None:
    source = sampled(count)
    made = list(islice(source.requests(random.Random(3)), 3 * count))
    rounds = [made[at : at + count] for at in (0, count, 2 * count)]
    names = []
    for each in rounds:
        assert sorted(request.prompt_tokens for request in each) == list(range(1, count + 1))
        names.append({name for request in each for name, _ in request.shared})
        # Within a round lines share what they did.
        assert len(names[-1]) == count // 2 + 1
    assert len(set.union(*names)) == sum(map(len, names))


def test_lines_that_follow_each_other_stay_together() -> None:
    first = places(sampled(50 * STRETCH_LINES), STRETCH_LINES)
    assert first == list(range(first[0], first[0] + STRETCH_LINES))


@pytest.mark.parametrize("seed", range(5))
def test_the_first_few_hundred_are_from_all_over_the_file(seed: int) -> None:
    count = 180 * STRETCH_LINES
    some = places(sampled(count), 10 * STRETCH_LINES, seed)
    assert sum(each <= count / 2 for each in some) in range(
        4 * STRETCH_LINES, 6 * STRETCH_LINES + 1
    )
    for part in range(5):
        assert any(part * count / 5 < each <= (part + 1) * count / 5 for each in some)


def test_seeds_begin_elsewhere_and_one_seed_where_it_did() -> None:
    source = sampled(50 * STRETCH_LINES)
    assert places(source, 500, 1) == places(source, 500, 1)
    assert len({places(source, 1, seed)[0] for seed in range(8)}) > 3


def test_of_a_long_file_it_keeps_stretches_from_all_over_it() -> None:
    count = 3 * MAX_STRETCHES * STRETCH_LINES + 7
    source = sampled(count)
    assert (
        MAX_STRETCHES * STRETCH_LINES - STRETCH_LINES < source.held <= MAX_STRETCHES * STRETCH_LINES
    )
    kept = places(source, source.held)
    assert len(set(kept)) == source.held
    assert sum(kept) / len(kept) == pytest.approx(count / 2, rel=0.01)


def test_a_file_that_does_not_stay_as_it_is_shows() -> None:
    # Ever larger: the last fifth has nine tenths of the largest, the mean half of it.
    assert sampled(10_000).heaviest == pytest.approx(1.8, rel=0.01)
    assert sampled(3).heaviest == 1.0
