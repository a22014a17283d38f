"""Outcomes, targets, summaries and statistics."""

from __future__ import annotations

import math
import statistics

import pytest

from tests.bench.canned import printed
from vllm_sched.bench.results import goodput
from vllm_sched.bench.results.goodput import Targets
from vllm_sched.bench.results.outcome import Outcome
from vllm_sched.bench.results.stats import interval
from vllm_sched.bench.results.summary import by_class, details, milliseconds, summary, table
from vllm_sched.errors import UsageError


def outcome(at: float, ticks: list[float], **settings: object) -> Outcome:
    known: dict[str, object] = {"klass": "a", "prompt_tokens": 10, "output_tokens": len(ticks)}
    known |= {"sent": at, "completed": len(ticks)} | settings
    return Outcome(at=at, ticks=ticks, **known)  # type: ignore[arg-type]


FAST = outcome(0.0, [0.1, 0.2, 0.3])
STALLED = outcome(1.0, [1.1, 2.1, 2.2, 2.3])
LATE = outcome(2.0, [4.0], sent=3.5)
FAILED = outcome(2.0, [2.5], error="gone")
CUT = outcome(2.5, [], interrupted=True)
OUTCOMES = [FAST, STALLED, LATE, FAILED, CUT]


def test_outcome_latencies() -> None:
    assert STALLED.ttft == pytest.approx(0.1)
    assert STALLED.tpot == pytest.approx(0.4)
    assert STALLED.itls == pytest.approx([1.0, 0.1, 0.1])
    assert STALLED.latency == pytest.approx(1.3)
    assert (LATE.ttft, LATE.late, LATE.tpot) == (2.0, 1.5, None)
    assert (CUT.ttft, CUT.end, CUT.itls) == (0.0, 2.5, [])


def test_long_times_have_plain_digits() -> None:
    shown = [milliseconds(value) for value in (999.6, 8_400.0, 99_940.0, 1_234_500.0)]
    assert shown == ["1,000 ms", "8.4 s", "99.9 s", "1,234 s"]


@pytest.mark.parametrize(
    ("targets", "met"),
    [
        (Targets(), [True, True, True, False, False]),
        (Targets(ttft=0.5), [True, True, False, False, False]),
        (Targets(tpot=0.3), [True, False, True, False, False]),
        (Targets(tpot=0.5), [True, True, True, False, False]),
        (Targets(itl=0.5), [True, False, True, False, False]),
        (Targets(e2el=1.5), [True, True, False, False, False]),
        (Targets(ttft=0.5, itl=0.5), [True, False, False, False, False]),
    ],
)
def test_targets_are_met_or_missed(targets: Targets, met: list[bool]) -> None:
    assert [targets.is_met_by(each) for each in OUTCOMES] == met


def test_targets_are_read_in_milliseconds() -> None:
    assert goodput.parse(["ttft:3000", "itl:300"]) == Targets(ttft=3.0, itl=0.3)
    assert not goodput.parse([])
    assert Targets(ttft=3.0).as_ms() == {"ttft": 3000, "tpot": None, "itl": None, "e2el": None}


@pytest.mark.parametrize("pair", ["speed:3", "ttft", "ttft:fast", "ttft:-1", "ttft:inf", "ttft:0"])
def test_invalid_target_is_refused(pair: str) -> None:
    with pytest.raises(UsageError, match=f"--goodput {pair}: "):
        goodput.parse([pair])


def test_summary_of_mixed_outcomes() -> None:
    found = summary(OUTCOMES, 5.0, Targets(itl=0.5))
    assert (found["completed"], found["failed"], found["interrupted"]) == (3, 1, 1)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (30, 8)
    assert found["request_throughput"] == pytest.approx(0.6)
    assert found["request_goodput"] == pytest.approx(0.4)
    assert found["goodput_share"] == pytest.approx(0.5)  # of four, as failures count
    assert found["total_token_throughput"] == pytest.approx(38 / 5)
    assert found["median_ttft_ms"] == pytest.approx(100)
    assert found["max_itl_ms"] == pytest.approx(1000)
    assert found["std_ttft_ms"] == pytest.approx(statistics.pstdev([100, 100, 2000]))
    assert found["max_concurrent_requests"] == 2
    assert found["max_output_tokens_per_s"] == 3
    assert summary(OUTCOMES, 5.0, Targets())["request_goodput"] is None


def test_merged_tokens_are_spread_between_first_and_last() -> None:
    coarse = [Outcome(0.0, "a", 10, 400, sent=0.0, ticks=[0.5, 3.5], completed=402)]
    found = summary(coarse, 4.0, Targets())
    assert found["max_output_tokens_per_s"] == pytest.approx(101)  # not two


def test_summary_of_no_outcomes() -> None:
    found = summary([], 0.0, Targets(ttft=1.0))
    assert (found["completed"], found["request_throughput"]) == (0, 0.0)
    assert found["p99_ttft_ms"] is None
    assert found["goodput_share"] is None


def test_details_have_an_entry_per_finished_request() -> None:
    found = details(OUTCOMES)
    assert {len(values) for values in found.values()} == {4}
    assert found["ttfts"] == pytest.approx([0.1, 0.1, 2.0, 0.0])
    assert found["errors"] == ["", "", "", "gone"]
    assert found["queue_times"][2] == 1.5
    assert found["output_lens"] == [3, 4, 1, 0]


def shown(outcomes: list[Outcome], targets: Targets, width: int = 80) -> str:
    return printed(table(by_class(outcomes, 5.0, targets), targets), width)


def test_table_has_a_column_per_class() -> None:
    other = outcome(0.0, [0.5, 0.6], klass="long")
    text = shown([*OUTCOMES, other], Targets(itl=0.5))
    for word in ("a", "long", "all", "goodput", "share in time", "50 %", "failed", "ITL p99 / max"):
        assert word in text
    single = shown([FAST], Targets())
    assert "goodput" not in single
    assert " all " not in single.splitlines()[1]


def test_table_shows_the_commonest_of_many_classes() -> None:
    many = [outcome(0.0, [0.5, 0.6], klass=f"app-{n % 50}") for n in range(100)]
    text = shown([*many, *(outcome(1.0, [1.5], klass="app-49") for _ in range(9))], Targets())
    assert text.splitlines()[1].split() == [
        *(f"app-{n}" for n in (49, 0, 1, 2, 3, 4)), "all",
    ]  # fmt: skip
    assert "--save also writes 44 more classes" in text


def test_confidence_intervals_over_seeds() -> None:
    mean, half = interval([1.0, 2.0, 3.0])
    assert (mean, half) == (2.0, pytest.approx(4.303 / math.sqrt(3)))
    assert interval([5.0]) == (5.0, 0.0)
    assert math.isnan(interval([])[0])
    wide, narrow = interval([0.0, 1.0] * 2)[1], interval([0.0, 1.0] * 50)[1]
    assert narrow < wide
