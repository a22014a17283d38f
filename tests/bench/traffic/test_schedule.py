"""Arrival times of open and closed loops."""

from __future__ import annotations

import random
import statistics
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_sched.bench.traffic.catalogue import find
from vllm_sched.bench.traffic.schedule import Schedule, gamma_times
from vllm_sched.bench.traffic.types import Request
from vllm_sched.errors import UsageError


def schedule(workload: str = "azure-conv", **settings: Any) -> Schedule:
    return Schedule(source=find(workload), **settings)


@given(st.floats(0.01, 1e4), st.floats(0.001, 1e3), st.integers(1, 200), st.integers(0, 2**32))
def test_arrival_times_ascend_and_match_the_rate(
    rate: float, burstiness: float, count: int, seed: int
) -> None:
    times = gamma_times(rate, burstiness, count, random.Random(seed))
    assert len(times) == count
    assert list(times) == sorted(times)
    assert times[0] >= 0
    assert times[-1] == pytest.approx(count / rate) or times[-1] == 0  # all gaps underflowed


@pytest.mark.parametrize(("burstiness", "cv"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5)])
def test_burstiness_is_the_gamma_shape(burstiness: float, cv: float) -> None:
    times = gamma_times(5.0, burstiness, 20_000, random.Random(0))
    gaps = [b - a for a, b in pairwise(times)]
    assert statistics.fmean(gaps) == pytest.approx(0.2, rel=0.02)
    assert statistics.pstdev(gaps) / statistics.fmean(gaps) == pytest.approx(cv, rel=0.05)


def test_infinite_burstiness_gives_equal_gaps() -> None:
    assert list(gamma_times(2.0, float("inf"), 3, random.Random())) == [0.5, 1.0, 1.5]


def test_seed_determines_the_requests() -> None:
    planned = schedule("mooncake-conv:1,azure-code:2", seed=5, rate=3, count=200, tenants=3)
    assert list(planned) == list(planned)
    others = list(schedule("mooncake-conv:1,azure-code:2", seed=6, rate=3, count=200, tenants=3))
    assert [r.prompt_tokens for r in others] != [r.prompt_tokens for r in planned]
    assert [r.at for r in others] != [r.at for r in planned]


def test_number_of_requests() -> None:
    assert len(list(schedule(rate=2, duration_s=10))) == 20
    assert len(list(schedule(rate=2, duration_s=10, count=7))) == 7
    assert len(list(schedule(rate=2))) == 120  # a minute
    assert len(list(schedule())) == round(5.5 * 60)  # at the published rate
    assert len(list(schedule(concurrency=4, count=9))) == 9
    endless = schedule(concurrency=4, duration_s=1)
    assert (len(list(islice(endless, 5000))), endless.ends_after_s) == (5000, 1)
    assert schedule(rate=2, duration_s=1e9, count=7).arrivals() == 7
    assert schedule(rate=1e-8, duration_s=1e9).arrivals() == 10


def test_timed_source_keeps_its_times_without_a_rate() -> None:
    timed = schedule("long-blocks-short", duration_s=12)
    assert (timed.timed, len(list(timed)), max(r.at for r in timed)) == (True, 20, 7.35)
    drawn = schedule("long-blocks-short", rate=5, duration_s=4)
    assert not drawn.timed
    assert [r.klass for r in drawn].count("long") == 4


def test_trace_is_played_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    line = '{"timestamp": %d, "input_length": 10, "output_length": 2}\n'
    path.write_text("".join(line % (1000 * i) for i in range(90)))
    assert len(list(schedule(str(path)))) == 90
    assert len(list(schedule(str(path), duration_s=30))) == 30
    assert len(list(schedule(str(path), rate=1000))) == 90
    assert len(list(schedule(str(path), rate=1000, count=40))) == 40
    assert len(list(schedule(str(path), concurrency=2))) == 90


def test_trace_that_ends_too_soon_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 10, "output_length": 2}\n' * 60)
    (warning,) = schedule(str(path), rate=3000, duration_s=20).falls_short
    assert warning.startswith("t ended after 0.02 s: it has 60 requests, and 60,000 were wanted")
    assert schedule(str(path), rate=3, count=61).falls_short
    assert schedule(str(path), rate=1e308, duration_s=100).falls_short
    for settings in ({"rate": 3, "duration_s": 20}, {"rate": 3, "count": 60}, {"rate": 3000}, {}):
        assert not schedule(str(path), **settings).falls_short
    assert not schedule(rate=3000, duration_s=20).falls_short


def test_trace_of_sessions_that_ends_too_soon_names_sessions(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"session_id": "a", "input_length": 10, "output_length": 2}\n' * 3)
    source = find(str(path), sessions=True)
    (warning,) = Schedule(source=source, rate=5, count=99).falls_short
    assert "it has 1 sessions, and 99 were wanted" in warning
    assert "sweep" not in warning  # takes no sessions


def test_scale_applies_to_lengths_and_prefixes() -> None:
    whole, tenth = (list(schedule("mooncake-conv", count=50, scale=s)) for s in (1, 0.1))
    for large, small in zip(whole, tenth, strict=True):
        assert small.prompt_tokens == max(1, round(large.prompt_tokens / 10))
        assert small.shared_tokens == pytest.approx(large.shared_tokens / 10, abs=1)


def test_prefix_hit_adds_and_removes_shared_prefixes() -> None:
    def share(requests: list[Request]) -> int:
        names = [name for r in requests for name, _ in r.shared]
        return len(names) - len(set(names))

    assert share(list(schedule("azure-conv", count=200))) == 0
    assert share(list(schedule("azure-conv", count=200, prefix_hit=0.5))) > 50
    assert share(list(schedule("mooncake-conv", count=200))) > 30
    assert share(list(schedule("mooncake-conv", count=200, prefix_hit=0))) == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rate": 0}, "--request-rate 0"),
        ({"rate": float("nan")}, "--request-rate nan"),
        ({"rate": 1, "burstiness": -1}, "--burstiness -1"),
        ({"concurrency": 0}, "--concurrency 0"),
        ({"duration_s": 0}, "--duration 0"),
        ({"count": 0}, "--num-requests 0"),
        ({"scale": 0}, "--scale 0"),
        ({"rate": 1, "concurrency": 1}, "an open or a closed loop"),
        ({"concurrency": 1, "burstiness": 1}, "a closed loop draws no gaps"),
        ({"prefix_hit": 0.9}, "--prefix-hit 0.9"),
        ({"tenants": -1}, "--tenants -1"),
        ({"tenants": 10**9}, "--tenants: must be at most 1,000,000; give a smaller number"),
        ({"count": 10**400}, "--num-requests: must be at most 10,000,000"),
        ({"count": -(10**400)}, "--num-requests: must be at most 10,000,000"),
        ({"scale": 1e308}, r"--scale 1e\+308: must be at most 1e\+12"),
        ({"concurrency": 10**400}, "--concurrency: must be at most 10,000,000"),
        # Some are only known when the requests are drawn.
        ({"rate": 1, "duration_s": 0.1}, "--duration 0.1: at 1 requests/s no request arrives"),
        *(
            (settings, ": (a run has|must be) at most 10,000,000; give a")
            for settings in (
                {"duration_s": 1e9}, {"count": 10**9}, {"rate": 1e300, "duration_s": 1e300},
            )
        ),
    ],
)  # fmt: skip
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        next(iter(schedule(**settings)))
