from __future__ import annotations

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.bench.canned import canned_round, printed, record
from tests.present import present
from vllm_sched.bench.compare import report
from vllm_sched.bench.compare.runner import Round
from vllm_sched.bench.results.stats import percentile


def test_percentiles_interpolate() -> None:
    assert percentile([4, 1, 3, 2], 50) == 2.5
    assert percentile(range(101), 99) == 99
    assert percentile([1, 2], 99) == pytest.approx(1.99)
    assert percentile([7], 1) == 7
    assert percentile([], 50) is None


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 100))
def test_percentile_lies_within_its_samples(samples: list[float], percent: float) -> None:
    value = present(percentile(samples, percent))
    assert min(samples) <= value * (1 + 1e-9) + 1e-9
    assert value <= max(samples) * (1 + 1e-9)
    assert percentile(random.Random(0).sample(samples, len(samples)), percent) == value


def test_samples_are_pooled_over_rounds_without_failures() -> None:
    rounds = [canned_round(1, 1.0), canned_round(2, 2.0)]
    assert report.ttfts(rounds, "short") == pytest.approx([1.0, 1.0, 2.0, 2.0])
    rounds[0].records[2].error = "gone"
    assert report.ttfts(rounds, "short") == pytest.approx([1.0, 2.0, 2.0])
    assert report.ttfts(rounds, "lone") == pytest.approx([0.01, 0.02] * 2)


def test_background_gaps_count_while_the_foreground_runs() -> None:
    # The gap across the start and the one across the foreground's end count; the tail does not.
    gaps = report.itls([canned_round(1, 1.0)], "background")
    assert gaps == pytest.approx([1.1, 1.0, 1.0, 1.5])


def test_class_and_total_rates() -> None:
    played = canned_round(1, 1.0)
    assert report.foreground_end(played) == 4.0
    assert report.class_rate(played, "long") == pytest.approx(12_002 / 4.0)
    assert report.class_rate(played, "short") == pytest.approx(204 / (1.6 - 0.3))
    assert report.class_rate(played, "background") == pytest.approx(3 / 4.0)
    # All the work, until the background's last token.
    assert report.total_rate(played) == pytest.approx((5 + 12_002 + 204) / 4.6)
    nothing = Round(1, ())
    assert report.total_rate(nothing) is None
    assert report.class_rate(nothing, "short") is report.class_rate(nothing, "background") is None


def test_figures_have_ratios_and_rates_use_the_median_round() -> None:
    baseline = [canned_round(i, wait) for i, wait in enumerate((1.0, 2.0, 9.0))]
    candidate = [canned_round(i, wait) for i, wait in enumerate((0.5, 0.5, 9.0))]
    lines = report.figures(baseline, candidate)
    short = report.figure(lines, "short", "TTFT p50")
    assert (short.baseline, short.candidate) == pytest.approx((2.0, 0.5))
    assert short.ratio == pytest.approx(0.25)
    rate = report.figure(lines, "short", "tokens/s")
    assert rate.ratio == pytest.approx((1.0 + 0.3) / (0.5 + 0.3))
    # A class without requests has no lines.
    assert {line.group for line in lines} == set(report.GROUPS) - {"batch", "turn"}


def test_spread_and_backlogged_rate_are_compared() -> None:
    longs = [record("long", 0.0, [first, 9.0], prompt=10) for first in (2.0, 3.5, 8.0)]
    batch = [record("batch", 0.0, [first, first + 1.0], prompt=10) for first in (1.0, 3.0)]
    played = Round(1, (*longs, *batch))
    assert report.spread(played, "long") == 6.0
    assert report.spread(played, "short") is None
    # Until the last request begins: both prompts, and the output until then.
    assert report.backlogged_rate(played, "batch") == pytest.approx((20 + 2 + 1) / 3.0)
    assert report.backlogged_rate(played, "short") is None
    lines = report.figures([played], [played])
    assert report.figure(lines, "long", report.SPREAD).ratio == 1.0
    assert report.figure(lines, "batch", "tokens/s").baseline == pytest.approx(23 / 3.0)


@pytest.mark.parametrize(
    ("unit", "ratio", "better"),
    [
        (report.SECONDS, 0.5, True), (report.SECONDS, 1.5, False), (report.RATE, 1.5, True),
        (report.RATE, 0.5, False), (report.RATE, 1.01, None), (report.RATE, None, None),
    ],
)  # fmt: skip
def test_better_depends_on_the_unit(unit: str, ratio: float | None, better: bool | None) -> None:
    assert report.Figure("all", "", unit, 1.0, 1.0, ratio).better is better


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [
        (4.6789, "s", "4.68 s"),
        (0.0301, "s", "30.1 ms"),
        (0.0, "s", "0 ms"),
        (4907.2, "tokens/s", "4,907"),
        (56.61, "tokens/s", "56.6"),
        (None, "s", "-"),
    ],
)
def test_values_are_shown_with_units(value: float | None, unit: str, shown: str) -> None:
    assert report.show(value, unit) == shown


def rendered(failed: list[int], *rounds: Round) -> str:
    """Return the table of sides with a round each, beside the first."""
    first, *others = ([each] for each in rounds)
    figures = [report.figures(first, each) for each in others]
    return printed(report.table(["default", "mine", "P/D"], figures, failed), 160)


def test_table_compares_sides_with_the_first() -> None:
    text = rendered([0, 0, 2], canned_round(1, 2.0), canned_round(1, 0.5), canned_round(1, 1.0))
    for word in ("default", "mine", "P/D", "running decodes", "a short alone", "1.00x"):
        assert word in text
    (line,) = (line for line in text.splitlines() if "short prompts" in line)
    assert re.split("  +", line.strip()) == [
        "short prompts", "TTFT p50", "2.00 s", "500 ms (0.25x)", "1.00 s (0.50x)",
    ]  # fmt: skip
    assert text.splitlines()[-2].split() == ["failed", "requests", "0", "0", "2"]
    assert "failed requests" not in rendered([0, 0], canned_round(1, 1.0), canned_round(1, 1.0))
    broken = Round(1, (record("short", 0.1, []), record("long", 0.0, [])))
    assert "- (-)" in rendered([2, 2], broken, broken)


def test_summary_has_the_keys_of_vllm_bench_serve() -> None:
    rounds = [canned_round(1, 1.0), canned_round(2, 3.0)]
    rounds[1].records[3].error = "gone"
    summary = report.serve_summary(rounds, "short")
    assert (summary["completed"], summary["failed"], summary["errors"]) == (3, 1, ["gone"])
    assert summary["ttfts"] == pytest.approx([1.0, 1.0, 3.0])
    assert summary["median_ttft_ms"] == pytest.approx(1000)
    assert summary["mean_itl_ms"] == summary["mean_tpot_ms"] == pytest.approx(100)
    assert summary["p99_e2el_ms"] == pytest.approx(percentile([1100, 1100, 3100], 99))
    assert summary["input_lens"] == [100, 100, 100]
    assert summary["output_lens"] == [2, 2, 2]
    assert summary["merged_tokens"] == 0
    assert summary["duration"] == pytest.approx(9.2)
    assert report.serve_summary([], "short")["p50_ttft_ms"] is None
    assert report.serve_summary(rounds)["completed"] == 7
