from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from xml.parsers import expat

import pytest

from tests.bench.canned import canned_comparison, canned_round, record
from vllm_sched.bench.compare import swimlane
from vllm_sched.bench.compare.runner import Round
from vllm_sched.bench.results.engine_trace import Phase
from vllm_sched.bench.results.outcome import Outcome
from vllm_sched.errors import UsageError


def drawn(*rounds: Round) -> str:
    panels = [swimlane.Panel(f"side {i}", "a < b", played) for i, played in enumerate(rounds)]
    svg = swimlane.swimlane(panels, title="pair", subtitle="settings & such")
    elements(svg)
    return svg


def elements(svg: str) -> list[str]:
    """Return the element names in order; raise if the SVG is not well formed."""
    names: list[str] = []
    parser = expat.ParserCreate()
    parser.StartElementHandler = lambda name, _: names.append(name)
    parser.Parse(svg, True)
    return names


def test_every_request_has_a_lane_with_a_tooltip() -> None:
    svg = drawn(canned_round(1, 2.0), canned_round(1, 0.5))
    assert svg.count('<g class="lane">') == svg.count("<title>") == 2 * 4
    assert "short 1, 100-token prompt, arrived at 0.30 s, first token after 2.00 s" in svg


def test_wait_bar_is_as_long_as_the_ttft() -> None:
    svg = drawn(canned_round(1, 2.0), canned_round(1, 0.5))
    widths = [
        float(w) for w in re.findall(r'class="wait" x="[^"]*" y="[^"]*" width="([^"]*)"', svg)
    ]
    # The legend's box, then long, short, short of each panel; panels share the axis.
    _, long_a, short_a, _, long_b, short_b, _ = widths
    assert long_a == long_b
    assert short_a == pytest.approx(4 * short_b, rel=0.01)


def test_pauses_are_marked_and_normal_gaps_are_not() -> None:
    steady = [i / 20 for i in range(100)]
    paused = [tick + (1.0 if tick > 2.5 else 0.0) for tick in steady]
    marks = [
        drawn(Round(1, (record("short", 0.0, ticks),))).count('class="pause dash"')
        for ticks in (steady, paused)
    ]
    assert marks == [1, 2]  # the first is the legend's


def test_dense_ticks_keep_the_file_small() -> None:
    dense = record("background", -1.0, [i / 10_000 for i in range(50_000)])
    svg = drawn(Round(1, (dense, record("short", 0.0, [4.9, 5.0]))))
    assert len(svg) < 200_000


def test_failed_request_shows_its_error() -> None:
    failed = Outcome(0.5, "short", 100, 16, sent=0.5, error="HTTP 500: <boom>")
    svg = drawn(Round(1, (failed, record("long", 0.0, [3.0, 4.0]))))
    assert "failed: HTTP 500: &lt;boom&gt;" in svg
    drawn(Round(1, (failed,)), Round(1, ()))


@pytest.mark.parametrize(
    ("label", "title"),
    [
        ("default --x", "side: default --x (vLLM&#x27;s own scheduler)"),
        ("none", "side: none (our scheduler without a policy, equivalent to vLLM&#x27;s own"),
        ("long_prompt", "side: long_prompt<"),
    ],
)
def test_side_label_explains_its_scheduler(label: str, title: str) -> None:
    panel = swimlane.Panel("side", label, canned_round(1, 2.0))
    assert title in swimlane.swimlane([panel], title="one")


def test_page_escapes_text_and_loads_no_external_resource(tmp_path: Path) -> None:
    page = tmp_path / "pair.html"
    swimlane.write(canned_comparison(), page)
    html = page.read_text()
    for words in ("long_prompt.a&lt;b=1", "0.25x <small>better</small>", "baseline: default"):
        assert words in html
    assert html.count("prefers-color-scheme") == 2
    assert "1 round after a discarded one" in html
    assert "$" not in html
    links = set(re.findall(r"\w+://[^\s\"')]+", html))
    assert links == {"http://www.w3.org/2000/svg"}  # a name, not an address
    for loader in ("<script", "<link", "@import", "url(", "src="):
        assert loader not in html
    picture = tmp_path / "pair.svg"
    swimlane.write(canned_comparison(), picture)
    svg = picture.read_text()
    assert elements(svg)[0] == "svg"
    assert "prefers-color-scheme" in svg
    assert "round 1 of 1" in svg


def test_other_file_suffix_is_refused() -> None:
    with pytest.raises(UsageError, match=r"pair\.png.*\.html or \.svg"):
        swimlane.check_suffix(Path("pair.png"))


def drawn_with_trace(played: Round) -> str:
    """Return the SVG of a round with an engine trace, whose clock is shifted."""
    phases = [
        Phase("waiting", 11.0, 11.5),
        Phase("prefill", 11.5, 12.0, 6000),
        Phase("prefill", 13.0, 13.5, 6000),
        Phase("preempted", 13.5, 14.0),
        Phase("decode", 14.0, 14.5, 1),
    ]
    played = replace(played, began=11.0)
    played.records[1].name = "round1-1"
    panel = swimlane.Panel("side", "a", played, stories={"round1-1": phases})
    svg = swimlane.swimlane([panel], title="one")
    elements(svg)
    return svg


def test_engine_trace_is_drawn_as_chunks() -> None:
    svg = drawn_with_trace(canned_round(1, 2.0))
    # The legend's three boxes come first.
    boxes = re.findall(r'class="(chunk long|out)" x="([\d.]*)" y="[\d.]*" width="([\d.]*)"', svg)
    assert [name for name, _, _ in boxes] == ["chunk long", "chunk long", "out"] * 2
    first, second = [(float(x), float(width)) for _, x, width in boxes[3:5]]
    assert first[1] == second[1]
    assert second[0] - first[0] == pytest.approx(3 * first[1], rel=0.01)
    assert "in the engine&#x27;s queue 500 ms, prompt in 2 chunks, preempted 1 time," in svg
    assert "chunk" not in drawn(canned_round(1, 2.0)).split("</style>")[1]


def test_wait_bar_ends_where_the_engine_starts() -> None:
    widths = [
        [float(w) for w in re.findall(r'class="wait" x="[^"]*" y="[^"]*" width="([^"]*)"', svg)][1]
        for svg in (drawn_with_trace(canned_round(1, 2.0)), drawn(canned_round(1, 2.0)))
    ]
    assert widths[0] == pytest.approx(widths[1] * 0.5 / 3.9, rel=0.01)
