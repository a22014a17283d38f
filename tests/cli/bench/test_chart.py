"""The chart: valid XML with its labels, and points at their places."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from vllm_sched.cli.bench.chart import Chart, Series, check_suffix, draw
from vllm_sched.errors import UsageError

NAMESPACE = "{http://www.w3.org/2000/svg}"


def parsed(chart: Chart) -> ET.Element:
    """Return the parsed SVG of a chart."""
    return ET.fromstring(draw(chart))  # noqa: S314


def path_of(chart: Chart) -> list[tuple[float, float]]:
    """Return the coordinates of the first line's points."""
    line = parsed(chart).find(f"{NAMESPACE}polyline")
    assert line is not None
    return [
        (float(x), float(y)) for x, y in (pair.split(",") for pair in line.attrib["points"].split())
    ]


@pytest.mark.parametrize("log", [False, True])
def test_larger_values_are_further_right_and_higher(log: bool) -> None:
    points = [(1.0, 2.0), (10.0, 3.0), (100.0, 50.0)]
    places = path_of(Chart("t", "x", "y", [Series("s", points)], log_x=log, log_y=log))
    assert places == sorted(places)
    heights = [y for _, y in places]
    assert heights == sorted(heights, reverse=True)
    first, second, third = (x for x, _ in places)
    if log:
        assert second - first == pytest.approx(third - second, abs=0.2)
    else:
        assert third - second > 9 * (second - first)


def test_labels_are_present_and_escaped() -> None:
    chart = Chart(
        "A < B", "size & more", "s", [Series("one", [(1, 1)]), Series("two", [(2, 2)], dots=True)],
        subtitle="from <there>", marks=[(1.5, "here")],
    )  # fmt: skip
    words = [element.text for element in parsed(chart).iter(f"{NAMESPACE}text")]
    for word in ("A < B", "size & more", "from <there>", "one", "two", "here"):
        assert word in words


def test_series_differ_without_colour() -> None:
    lines = [Series(str(n), [(0, n), (1, n)]) for n in range(3)]
    drawn = parsed(Chart("t", "x", "y", lines)).findall(f"{NAMESPACE}polyline")
    assert len({line.attrib["stroke-dasharray"] for line in drawn}) == 3
    dots = [Series(str(n), [(n, n)], dots=True) for n in range(4)]
    text = draw(Chart("t", "x", "y", dots))
    # Circles, squares and two kinds of paths, each with its legend entry.
    assert len(re.findall("<circle", text)) == 2
    assert len(re.findall(r'<rect x="[^"]*" y="[^"]*" width="6"', text)) == 2
    assert len(re.findall("<path", text)) == 4


def test_equal_points_can_be_drawn() -> None:
    assert path_of(Chart("t", "x", "y", [Series("s", [(5, 5), (5, 5)])], log_x=True))


def test_chart_without_series_is_refused() -> None:
    with pytest.raises(UsageError, match="nothing to draw"):
        draw(Chart("t", "x", "y", []))


def test_other_file_suffix_is_refused() -> None:
    check_suffix(Path("a.svg"))
    with pytest.raises(UsageError, match=r"a name that ends in \.svg"):
        check_suffix(Path("a.png"))
