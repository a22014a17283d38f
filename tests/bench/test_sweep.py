from __future__ import annotations

from typing import Any

import pytest

from tests.bench.canned import printed
from vllm_sched.bench.sweep import CONCURRENCY, RATE, Point, Sweep


def figures(share: float | None, tokens: float, **more: Any) -> dict[str, Any]:
    return {
        "goodput_share": share,
        "completed": 10,
        "failed": 0,
        "total_token_throughput": tokens,
        "p99_ttft_ms": 100.0,
        "p99_itl_ms": 10.0,
        **more,
    }


def sweep() -> Sweep:
    points = [
        Point(name, axis, load, seed, figures(share / load if share else None, tokens * load))
        for name, share, tokens in (("short", 4.0, 100.0), ("long", 1.0, 900.0))
        for axis, loads in ((RATE, (1.0, 4.0, 8.0)), (CONCURRENCY, (1.0, 4.0, 8.0, 9.0)))
        for load in loads
        for seed in (0, 1)
    ]
    return Sweep([p for p in points if p.share <= 1] + [p for p in points if p.share > 1])


def test_curves_have_a_value_per_seed_and_a_knee() -> None:
    curves = sweep().curves(RATE, "goodput")
    assert set(curves) == {"short", "long"}
    assert {load: len(values) for load, values in curves["long"].points.items()} == {
        1.0: 2, 4.0: 2, 8.0: 2,
    }  # fmt: skip
    assert curves["long"].knee == 1.0
    assert curves["short"].knee == 4.0
    assert sweep().curves(CONCURRENCY, "tokens")["short"].knee is None  # throughput still grows


def test_share_without_targets_is_the_kept_up_share() -> None:
    kept = Point("a", RATE, 2.0, 0, figures(None, 1.0))
    behind = Point("a", RATE, 8.0, 0, figures(None, 1.0), kept_up=0.25)
    failing = Point("a", RATE, 2.0, 0, figures(None, 1.0, failed=10))
    closed = Point("a", CONCURRENCY, 8.0, 0, figures(None, 1.0))
    assert [p.share for p in (kept, behind, failing, closed)] == [1.0, 0.25, 0.5, 1.0]
    assert [p.goodput for p in (kept, behind)] == [2.0, 2.0]
    assert Point("a", RATE, 1.0, 0, figures(None, 1.0, completed=0)).share == 0.0


def test_table_has_a_line_per_load_in_workload_order() -> None:
    text = printed(sweep().table(targets=True))
    for word in ("8 at once", "in time", "TTFT p99", "50%"):
        assert word in text
    lines = [line.split() for line in text.splitlines()]
    rows = [(line[0], line[1]) for line in lines if line and line[0] in ("short", "long")]
    rates = [row for row in rows if row[1].endswith("/s")]
    assert rates == [(name, f"{load}/s") for name in sweep().knees(RATE) for load in (1, 4, 8)]
    assert [*dict.fromkeys(name for name, _ in rows)] == ["short", "long"]


def test_json_has_every_run() -> None:
    found = sweep().to_json()
    assert len(found["points"]) == 28
    assert found["served_request_rate"] == {"short": 4.0, "long": 1.0}
    assert found["knee_concurrency"] == {"short": None, "long": None}
    assert {"request_rate", "seed", "share_in_time"} <= set(found["points"][0])


def test_table_shows_dashes_for_points_without_answers() -> None:
    none = figures(0.0, 0.0, completed=0, p99_ttft_ms=None, p99_itl_ms=None)
    points = [Point("b", RATE, 1.0, seed, figures(1.0, 9.0) if seed else none) for seed in (0, 1)]
    text = printed(Sweep([Point("a", RATE, 1.0, 0, none), *points]).table(targets=True))
    one, other = (line.split() for line in text.splitlines() if "1/s" in line)
    assert one == ["a", "1/s", "0%", "-", "-", "0"]
    nothing = Point("a", RATE, 1.0, 0, none).ttft_p99_ms
    assert nothing != pytest.approx(nothing)
    assert "100 ms 10 ms" in " ".join(other)  # of the run with answers
