"""Traces at another rate: endless samples of the whole file."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice

import pytest

from vllm_sched.bench.traffic.sampled import MAX_STRETCHES, STRETCH_LINES, Sampled
from vllm_sched.bench.traffic.types import Request, TrafficSource


class Numbered(TrafficSource):
    """Requests whose prompt length is their line number."""

    name, timed, rate = "numbered", True, 7.0

    def __init__(self, count: int) -> None:
        self.count = count

    def requests(self, rng: random.Random) -> Iterator[Request]:  # noqa: ARG002
        for at in range(1, (self.count or 0) + 1):
            yield Request(float(at), "x", at, 1, shared=((at // 2, at),))


def sampled(count: int) -> Sampled:
    return Sampled(Numbered(count), random.Random(0))


def line_numbers(source: Sampled, count: int, seed: int = 0) -> list[int]:
    return [each.prompt_tokens for each in islice(source.requests(random.Random(seed)), count)]


def test_sampled_source_has_no_end_and_no_times() -> None:
    source = sampled(120)
    assert (source.name, source.rate, source.count, source.timed) == ("numbered", 7.0, None, False)
    assert (source.lines, source.held) == (120, 120)
    assert list(sampled(0).requests(random.Random())) == []


@pytest.mark.parametrize("count", [1, 2, STRETCH_LINES, STRETCH_LINES + 1, 7 * STRETCH_LINES - 3])
def test_round_has_every_line_once_with_fresh_texts(count: int) -> None:
    source = sampled(count)
    made = list(islice(source.requests(random.Random(3)), 3 * count))
    rounds = [made[at : at + count] for at in (0, count, 2 * count)]
    names = []
    for requests in rounds:
        assert sorted(request.prompt_tokens for request in requests) == list(range(1, count + 1))
        names.append({name for request in requests for name, _ in request.shared})
        # Within a round, lines share their prefixes.
        assert len(names[-1]) == count // 2 + 1
    assert len(set.union(*names)) == sum(map(len, names))


def test_consecutive_lines_stay_together() -> None:
    first = line_numbers(sampled(50 * STRETCH_LINES), STRETCH_LINES)
    assert first == list(range(first[0], first[0] + STRETCH_LINES))


@pytest.mark.parametrize("seed", range(5))
def test_first_lines_come_from_the_whole_file(seed: int) -> None:
    count = 180 * STRETCH_LINES
    numbers = line_numbers(sampled(count), 10 * STRETCH_LINES, seed)
    assert sum(number <= count / 2 for number in numbers) in range(
        4 * STRETCH_LINES, 6 * STRETCH_LINES + 1
    )
    for part in range(5):
        assert any(part * count / 5 < number <= (part + 1) * count / 5 for number in numbers)


def test_seed_sets_the_first_line() -> None:
    source = sampled(50 * STRETCH_LINES)
    assert line_numbers(source, 500, 1) == line_numbers(source, 500, 1)
    assert len({line_numbers(source, 1, seed)[0] for seed in range(8)}) > 3


def test_long_file_is_sampled_in_stretches_of_the_whole_file() -> None:
    count = 3 * MAX_STRETCHES * STRETCH_LINES + 7
    source = sampled(count)
    assert (
        MAX_STRETCHES * STRETCH_LINES - STRETCH_LINES < source.held <= MAX_STRETCHES * STRETCH_LINES
    )
    kept = line_numbers(source, source.held)
    assert len(set(kept)) == source.held
    assert sum(kept) / len(kept) == pytest.approx(count / 2, rel=0.01)


def test_heaviest_shows_a_file_that_drifts() -> None:
    # Growing prompts: the last fifth averages nine tenths of the maximum.
    assert sampled(10_000).heaviest == pytest.approx(1.8, rel=0.01)
    assert sampled(3).heaviest == 1.0
