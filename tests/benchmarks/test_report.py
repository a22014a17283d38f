"""Figures and verdicts of measured windows."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from benchmarks.router.measure import Results, Sample
from benchmarks.router.processes import Memory
from benchmarks.router.report import Figure, Target, errors, figures, show, table
from benchmarks.router.stage import DIRECT, OURS

RIVAL = "vllm-router"
SIDES = [DIRECT, OURS, RIVAL]


def sample(load: str, side: str, number: int = 1, **given: object) -> Sample:
    base = Sample(load, side, number, 2.0, 1000, 0, 0.0, 0.001, 0.002, 0)
    return replace(base, **given)  # type: ignore[arg-type]


def figure(found: list[Figure], title: str) -> Figure:
    return next(each for each in found if each.title.startswith(title))


def figures_of(*samples: Sample) -> list[Figure]:
    return figures(Results([*samples], {}), None)


def test_ratio_is_the_median_of_the_rounds() -> None:
    times = {OURS: (0.05, 0.06, 0.30), RIVAL: (0.10, 0.10, 0.60)}
    found = figures_of(
        *(
            sample("1kb-c32", side, number, cpu_s=cpu)
            for side, rounds in times.items()
            for number, cpu in enumerate(rounds, 1)
        ),
        sample("1kb-c32", DIRECT, cpu_s=0.0),
    )
    cpu = figure(found, "CPU per request, 1 KB, c=32")
    assert cpu.values == pytest.approx({OURS: 60.0, RIVAL: 100.0})
    assert cpu.ratio == pytest.approx(0.5)
    assert cpu.met is True
    rate = figure(found, "requests/s, 1 KB, c=32")
    assert rate.values == {DIRECT: 500.0, OURS: 500.0, RIVAL: 500.0}
    assert (rate.ratio, rate.met) == (1.0, False)


def test_added_latency_is_relative_to_the_bare_worker_of_the_round() -> None:
    found = figures_of(
        *(
            sample("c1", side, number, p50_s=bare + more, p99_s=2 * bare + more)
            for number, bare in ((1, 0.1), (2, 0.9))
            for side, more in ((DIRECT, 0.0), (OURS, 0.0002), (RIVAL, 0.0001))
        )
    )
    for title in ("added p50", "added p99"):
        assert figure(found, title).values == pytest.approx({OURS: 0.2, RIVAL: 0.1})
    assert figure(found, "added p50").met is False
    assert figure(found, "added p99").met is None


def test_relative_target_without_the_rival_is_not_measured() -> None:
    found = figures_of(sample("chunks", OURS, events=100, cpu_s=0.001))
    chunk = figure(found, "CPU per chunk")
    assert chunk.values == pytest.approx({OURS: 10.0})
    assert chunk.met is None
    assert "not measured" in shown(found)
    assert figures_of() == []
    # A load without answers has no figure.
    nothing = figures_of(sample("1kb-c32", OURS, done=0, cpu_s=1.0), sample("chunks", OURS))
    assert figure(nothing, "CPU per request").values == {}
    assert figure(nothing, "CPU per chunk").values == {}


@pytest.mark.parametrize(
    ("most_open", "wrong", "expected"),
    [(2000, {}, 0), (1990, {}, 10), (2000, {"cut off": 3}, 3), (1990, {"HTTP 500": 10}, 10)],
)
def test_failed_and_missing_streams_are_counted(
    most_open: int, wrong: dict[str, int], expected: int
) -> None:
    found = figures_of(sample("streams", OURS, most_open=most_open, errors=wrong, events=9))
    line = figure(found, "2,000 streams")
    assert line.values[OURS] == expected
    assert line.met is (expected == 0)


@pytest.mark.parametrize(("rss", "met"), [(119_000_000, True), (121_000_000, False)])
def test_memory_and_decisions_have_absolute_limits(rss: int, *, met: bool) -> None:
    found = figures(Results([], {OURS: Memory(rss, rss // 2), RIVAL: Memory(1, 1)}), 49.0)
    assert figure(found, "resident").met is met
    assert figure(found, "its proportional").values[OURS] == pytest.approx(rss / 2e6)
    assert figure(found, "a decision").met is True


def test_errors_are_summed_by_side_and_load() -> None:
    found = errors(
        [
            sample("c1", OURS, 1, errors={"HTTP 500": 2}),
            sample("c1", OURS, 2, errors={"HTTP 500": 3, "cut off": 1}),
            sample("c1", RIVAL),
        ]
    )
    assert found == {OURS: {"c1: HTTP 500": 5, "c1: cut off": 1}}


def shown(found: list[Figure]) -> str:
    out = io.StringIO()
    Console(file=out, width=150).print(table(found, SIDES, "what"))
    return out.getvalue()


def test_table_shows_met_and_missed() -> None:
    text = shown(
        figures_of(
            *(
                sample("1kb-c32", side, cpu_s=cpu, done=done)
                for side, cpu, done in ((OURS, 0.01, 500), (RIVAL, 0.1, 1000))
            )
        )
    )
    cpu, rate = (line for line in text.splitlines() if "c=32" in line)
    assert cpu.split()[-1] == "met"
    assert "0.20x" in cpu
    assert rate.split()[-1] == "missed"
    assert "<= 0.6x vllm-router" in cpu
    assert ">= 1.3x vllm-router" in rate
    assert str(Target(120, relative=False)) == "<= 120"


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.0, "0"), (0.01234, "0.0123"), (99.5, "99.5"), (12345.6, "12,346"), (-2, "-2")],
)
def test_numbers_are_shown_with_three_digits(value: float | None, text: str) -> None:
    assert show(value) == text
