"""`python -m benchmarks.handed_over`: scenes and their table rows."""

from __future__ import annotations

from benchmarks.handed_over import (
    LONG,
    LONG_TOKENS,
    PREFILL_DECODE,
    SCENES,
    SHORT,
    STREAM,
    Scene,
    play,
    row,
)
from vllm_sched.bench.results.outcome import Outcome
from vllm_sched.bench.traffic.types import Request


def test_handed_over_prompt_is_in_the_row() -> None:
    requests = [
        Request(0.0, STREAM, 100, 600),
        Request(1.0, LONG, LONG_TOKENS, 4),
        Request(1.1, SHORT, 100, 4),
    ]
    scene = Scene("one", requests, 4)
    played = play(scene)
    assert [each.worker for each in played.outcomes if each.klass == LONG] == ["prefill-0>decode-1"]
    cells = row(scene, played.outcomes)
    assert cells[:3] == ["one", "4", "256"]
    assert "streams" in cells[5]
    assert cells[-1] == "1 of 1"


def test_unanswered_requests_are_in_the_row() -> None:
    answered = Outcome(0.0, LONG, 9, 1, worker="a>b", completed=1, ticks=[2.0])
    lost = Outcome(0.0, LONG, 9, 1, error="no")
    short = Outcome(0.0, SHORT, 9, 1, worker="b", completed=1, ticks=[1.0])
    cells = row(Scene("x", [], 1), [answered, lost, short])
    assert cells[3:5] == ["2.00 s; 1 of 2 unanswered", "1.00 / 1.00 s"]
    assert cells[-1] == "1 of 2"


def test_requests_of_every_scene_are_in_time_order() -> None:
    for scene in SCENES:
        times = [each.at for each in scene.requests]
        assert times == sorted(times)
        assert (scene.roles == PREFILL_DECODE) == ("general" not in scene.longs)
