"""`python -m benchmarks.handed_over`: a scene becomes a row."""

from __future__ import annotations

from benchmarks.handed_over import APART, LONG, LONG_TOKENS, SCENES, SHORT, STREAM, Scene, play, row
from vllm_sched.bench.results.outcome import Outcome
from vllm_sched.bench.traffic.types import Request


def test_a_long_prompt_is_handed_over_and_told() -> None:
    asked = [
        Request(0.0, STREAM, 100, 600),
        Request(1.0, LONG, LONG_TOKENS, 4),
        Request(1.1, SHORT, 100, 4),
    ]
    scene = Scene("one", asked, 4)
    played = play(scene)
    assert [each.worker for each in played.outcomes if each.klass == LONG] == ["prefill-0>decode-1"]
    told = row(scene, played.outcomes)
    assert told[:3] == ["one", "4", "256"]
    assert "streams" in told[5]
    assert told[-1] == "1 of 1"


def test_who_was_not_answered_is_told() -> None:
    answered = Outcome(0.0, LONG, 9, 1, worker="a>b", completed=1, ticks=[2.0])
    lost = Outcome(0.0, LONG, 9, 1, error="no")
    short = Outcome(0.0, SHORT, 9, 1, worker="b", completed=1, ticks=[1.0])
    told = row(Scene("x", [], 1), [answered, lost, short])
    assert told[3:5] == ["2.00 s; 1 of 2 unanswered", "1.00 / 1.00 s"]
    assert told[-1] == "1 of 2"


def test_every_scene_is_in_the_order_of_time() -> None:
    for scene in SCENES:
        times = [each.at for each in scene.asked]
        assert times == sorted(times)
        assert (scene.roles == APART) == ("general" not in scene.longs)
