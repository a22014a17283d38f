"""The chart: an SVG file with its labels, lines that differ without colour, and dots."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.plots.test_plots import dashes, marked, texts
from vllm_sched.bench.plots.chart import Chart, Series, check_chart, draw_chart
from vllm_sched.errors import UsageError


@pytest.mark.parametrize("log", [False, True])
def test_labels_are_present_and_series_differ_without_colour(log: bool, tmp_path: Path) -> None:
    path = tmp_path / "a.b.svg"
    lines = [Series(f"line {n}", [(1, n + 1), (10, n + 2)]) for n in range(3)]
    dots = Series("_dots", [(2, 2), (5, 5)], dots=True)
    chart = Chart(
        "A < B", "size & more", "s", [*lines, dots], "from <there>", log, log, marks=[(1.5, "here")]
    )
    draw_chart(chart, path)
    assert {"A < B", "size & more", "s", "from <there>", "here", "line 0", "_dots"} <= {
        *texts(path)
    }
    drawn = marked(path, "line")
    assert len(drawn) == 4
    assert len(dashes(drawn[:3])) == 3
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_equal_points_can_be_drawn(tmp_path: Path) -> None:
    path = tmp_path / "a.svg"
    draw_chart(Chart("t", "x", "y", [Series("s", [(5, 5), (5, 5)])], log_x=True), path)
    assert marked(path, "line")


def test_other_file_suffix_is_refused() -> None:
    check_chart(Path("a.svg"))
    with pytest.raises(UsageError, match=r"a name that ends in \.svg"):
        check_chart(Path("a.png"))
