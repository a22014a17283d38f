"""The content of SVG plots, and the presence of PNG files."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_sched.bench.plots import draw_run, draw_sweep, style
from vllm_sched.bench.plots.crowd import sent_to_workers, served_by_tenant
from vllm_sched.bench.plots.curves import Curve, ccdf
from vllm_sched.bench.plots.steps import PlottedStep, columns, draw_steps, steps_of
from vllm_sched.bench.results.goodput import Targets
from vllm_sched.bench.results.outcome import Outcome
from vllm_sched.bench.results.result import BenchResult
from vllm_sched.bench.traffic.catalogue import find
from vllm_sched.bench.traffic.schedule import Schedule
from vllm_sched.engine.trace import EngineTrace, TracedStep, chrome_trace
from vllm_sched.errors import UsageError

SVG = "{http://www.w3.org/2000/svg}"


def texts(path: Path) -> list[str]:
    return ["".join(e.itertext()).strip() for e in ET.parse(path).iter(f"{SVG}text")]  # noqa: S314


def marked(path: Path, name: str) -> list[ET.Element]:
    return [e for e in ET.parse(path).iter() if e.get("id") == name]  # noqa: S314


def dashes(lines: Sequence[ET.Element]) -> set[str]:
    found = set()
    for line in lines:
        styles = [e.get("style", "") for e in line.iter(f"{SVG}path")]
        found.add(
            next(
                (p.strip() for s in styles for p in s.split(";") if "stroke-dasharray" in p),
                "solid",
            )
        )
    return found


def crowd(seed: int = 0) -> list[Outcome]:
    rng = random.Random(seed)
    outcomes = []
    for i in range(60):
        first = i / 10 + rng.random()
        ticks = [first + 0.02 * j for j in range(5)]
        outcomes.append(
            Outcome(
                i / 10, "short" if i % 3 else "long", 100, 5, f"tenant-{i % 9 + 1}", i / 10, ticks,
                5, ("s0", "s1", "l0")[i % 3],
            )
        )  # fmt: skip
    return outcomes


def run(outcomes: list[Outcome]) -> BenchResult:
    schedule = Schedule(source=find("azure-conv"))
    return BenchResult(schedule, Targets(ttft=0.5, itl=0.1), outcomes, 7.0, "openai", "m")


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Draw a run once for all tests of its plots."""
    return [*draw_run(run(crowd()), tmp_path_factory.mktemp("run") / "new")]


@pytest.fixture
def picture(drawn: list[Path]) -> Callable[[str], Path]:
    """Return a function that finds a plot of the run by name."""
    return drawn[0].with_name


def draw_svg_only(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(style, "files", lambda stem, _=(): [stem.with_name(f"{stem.name}.svg")])


@pytest.fixture
def svg_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw SVG files only."""
    draw_svg_only(monkeypatch)


@pytest.fixture(scope="module")
def unusual(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Draw a run with many classes and workers, large prompts, and names with underscores."""
    outcomes = crowd()
    for number, outcome in enumerate(outcomes):
        outcome.klass = f"_app-{number % 9 if number < 40 else 0}"
        outcome.tenant = f"_{outcome.tenant}"
        outcome.worker = f"p{number % 12}>d{number % 5}"
        outcome.prompt_tokens = 100_000
    folder = tmp_path_factory.mktemp("unusual")
    with pytest.MonkeyPatch.context() as patch:
        draw_svg_only(patch)
        draw_run(run(outcomes), folder)
    return folder


def test_run_is_drawn_as_svg_and_png(drawn: list[Path]) -> None:
    assert [path.name for path in drawn] == [
        f"{name}.{kind}" for name in ("ttft", "itl", "tenants", "router") for kind in ("svg", "png")
    ]
    for path in drawn:
        if path.suffix == ".png":
            assert path.read_bytes().startswith(b"\x89PNG")


def test_interrupted_drawing_keeps_the_older_plots(
    drawn: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    older = [Path(shutil.copy(path, tmp_path)) for path in drawn]
    before = [path.read_bytes() for path in older]

    def half(_: Figure, to: Any, **__: object) -> None:
        with to.open("wb") if isinstance(to, Path) else nullcontext(to) as file:
            file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(Figure, "savefig", half)
    with pytest.raises(KeyboardInterrupt):
        draw_run(run(crowd()[:9]), tmp_path)
    assert [path.read_bytes() for path in older] == before
    assert sorted(tmp_path.iterdir()) == sorted(older)


@pytest.mark.usefixtures("svg_only")
def test_steps_are_drawn_with_their_budget(tmp_path: Path) -> None:
    steps = [PlottedStep(n * 0.1, n * 0.1 + 0.1, 500.0 - n, float(n), 512.0) for n in range(20)]
    draw_steps(tmp_path / "steps", "Steps", [*steps, PlottedStep(9.0, 9.1, 0.0, 3.0, 512.0)])
    path = tmp_path / "steps.svg"
    assert {"time (s)", "tokens in a step", "prefill", "decode", "budget"} <= set(texts(path))
    assert [len(marked(path, name)) for name in ("prefill", "decode", "budget")] == [1, 1, 1]
    assert dashes(marked(path, "budget")) != {"solid"}  # told apart without colour
    assert marked(path, "prefill")[0].findall(f".//{SVG}path")
    draw_steps(tmp_path / "none", "Steps", [])


def test_many_steps_are_merged_into_columns() -> None:
    steps = [PlottedStep(n * 0.01, n * 0.01 + 0.01, 100.0, 4.0, 512.0) for n in range(9000)]
    shown = columns(steps, 100)
    assert 90 <= len(shown) <= 101
    assert {(step.prefill, step.decode) for step in shown} == {(100.0, 4.0)}
    assert shown[0].start == 0.0
    assert shown[-1].end == pytest.approx(90.0, abs=1.0)
    assert columns(steps[:50], 100) == steps[:50]


def test_steps_are_read_from_a_trace() -> None:
    trace = EngineTrace()
    trace.record_arrival(0.0, "a", 300)
    trace.record_step(TracedStep(1, 1.0, 1.5, 256, {"a": 250, "b": 1}, {"a": 0}, 2, 0))
    trace.record_step(TracedStep(2, 1.5, 1.6, 256, {"b": 1}, {}, 2, 0))
    events = json.loads("".join(chrome_trace(trace.copy(), 2.0)))["traceEvents"]
    assert steps_of(events) == [
        PlottedStep(1.0, 1.5, 250, 1, 256),
        PlottedStep(1.5, 1.6, 0, 1, 256),
    ]


@pytest.mark.parametrize("name", ["TTFT", "ITL"])
def test_latency_tails_have_targets_and_classes(picture: Callable[[str], Path], name: str) -> None:
    path = picture(f"{name.lower()}.svg")
    labels = texts(path)
    assert f"{name} (ms)" in labels
    assert "share of samples above" in labels
    assert any(text.startswith("target ") for text in labels)
    assert any(text.startswith("short (") for text in labels)
    assert {"100 %", "10 %"} <= set(labels)
    lines = marked(path, "line")
    assert len(lines) == 2
    assert len(dashes(lines)) == 2


def test_tenants_beyond_the_busiest_are_merged(picture: Callable[[str], Path]) -> None:
    path = picture("tenants.svg")
    assert {"seconds since the start", "tokens, prompt and output", "the others"} <= set(
        texts(path)
    )
    assert len(marked(path, "line")) == 6
    assert len(dashes(marked(path, "line"))) >= 5  # and the markers differ


@pytest.mark.usefixtures("svg_only")
def test_many_classes_and_workers_large_numbers_and_underscores(
    unusual: Path, tmp_path: Path
) -> None:
    for name in ("ttft.svg", "itl.svg"):
        assert len(marked(unusual / name, "line")) == 6
    labels = texts(unusual / "ttft.svg")
    assert {"_app-0 (25)", "_app-1 (5)", "the others (16)"} <= set(labels)
    assert "_tenant-1" in texts(unusual / "tenants.svg")
    # Only some of many workers are labelled.
    named = [text for text in texts(unusual / "router.svg") if ">" in text]
    assert named == sorted(f"p{number % 12}>d{number % 5}" for number in range(60))[::2]
    assert "1e6" not in "".join(texts(unusual / "tenants.svg"))
    for name in ("tenants", "router"):
        assert any(text.endswith("0,000") for text in texts(unusual / f"{name}.svg"))
    curves = {f"_{name}": curve for name, curve in CURVES.items()}
    draw_sweep(tmp_path, goodput=curves, ttft=curves, throughput=curves)
    for name in ("goodput", "ttft-by-rate", "throughput"):
        assert {"_short", "_long"} <= set(texts(tmp_path / f"{name}.svg"))


@pytest.mark.usefixtures("svg_only")
def test_run_without_workers_tenants_or_requests_has_two_plots(tmp_path: Path) -> None:
    outcomes = crowd()
    for outcome in outcomes:
        outcome.tenant = outcome.worker = ""
    assert {path.stem for path in draw_run(run(outcomes), tmp_path)} == {"ttft", "itl"}
    draw_run(run([]), tmp_path)
    assert marked(tmp_path / "ttft.svg", "line") == []


def test_served_by_tenant_counts_every_token() -> None:
    outcomes = crowd()
    served = served_by_tenant(outcomes)
    assert len(served) == 6
    assert sum(steps[-1][1] for steps in served.values()) == pytest.approx(60 * 105)
    for steps in served.values():
        assert all(a[0] <= b[0] and a[1] <= b[1] for a, b in pairwise(steps))


def test_router_plot_shows_tokens_per_worker(picture: Callable[[str], Path]) -> None:
    labels = set(texts(picture("router.svg")))
    assert {"worker", "seconds since the start", "s0", "s1", "l0", "prompt tokens/s"} <= labels
    workers, seconds, rows = sent_to_workers(crowd())
    assert workers == ["l0", "s0", "s1"]
    assert sum(map(sum, rows)) * seconds / len(rows[0]) == pytest.approx(60 * 100)


CURVES = {
    "short": Curve({1.0: [10, 12], 2.0: [18, 22], 4.0: [20, 21]}, knee=2.0),
    "long": Curve({1.0: [5], 2.0: [6], 4.0: [6.1]}, knee=1.0),
}


@pytest.mark.usefixtures("svg_only")
def test_sweep_is_drawn(tmp_path: Path) -> None:
    drawn = draw_sweep(
        tmp_path, goodput=CURVES, ttft=CURVES, throughput=CURVES, targets={"ttft": 500, "itl": None}
    )
    assert {path.stem for path in drawn} == {"goodput", "ttft-by-rate", "throughput"}
    for name, x, y in (
        ("goodput", "offered rate (requests/s)", "requests/s in time"),
        ("ttft-by-rate", "offered rate (requests/s)", "TTFT p99 (ms)"),
        ("throughput", "concurrent requests", "tokens/s, prompt and output"),
    ):
        path = tmp_path / f"{name}.svg"
        labels = texts(path)
        assert {x, y, "short", "long", "knee 2", "knee 1"} <= set(labels)
        assert len(marked(path, "knee")) == 2
    assert {"1", "2", "4"} <= set(texts(tmp_path / "throughput.svg"))
    assert "offered" in texts(tmp_path / "goodput.svg")
    assert any("TTFT 500 ms" in text for text in texts(tmp_path / "goodput.svg"))
    assert not any("ITL" in text for text in texts(tmp_path / "goodput.svg"))


@pytest.mark.usefixtures("svg_only")
def test_same_data_gives_the_same_file_without_fonts_or_links(tmp_path: Path) -> None:
    for name in ("a", "b"):
        draw_sweep(tmp_path / name, throughput=CURVES)
    one, two = (tmp_path / name / "throughput.svg" for name in ("a", "b"))
    assert one.read_bytes() == two.read_bytes()
    assert "@font-face" not in one.read_text()
    assert "http" not in one.read_text().replace("http://www.w3.org", "").replace(
        "http://purl.org", ""
    ).replace("http://creativecommons.org", "")


@given(st.lists(st.floats(0.001, 100), min_size=1, max_size=3000))
def test_ccdf_falls_and_keeps_its_tail(samples: list[float]) -> None:
    ordered = sorted(samples)
    x, y = ccdf(ordered)
    assert x == sorted(x)
    assert y == sorted(y, reverse=True)
    assert (x[-1], y[-1], y[0]) == (ordered[-1], 1 / len(ordered), 1.0)
    assert len(x) <= 1200
    for value, share in zip(x, y, strict=True):
        assert sum(sample >= value for sample in ordered) / len(ordered) >= share - 1e-9


def test_missing_matplotlib_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(style, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match=r"pip install 'vllm-sched\[plots\]'"):
        style.check_available()
