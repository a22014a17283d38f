"""The policies' trials without their workers: what is asked of whom, and what is a promise kept."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from rich.console import Console

from benchmarks.policies import trials
from benchmarks.policies.__main__ import main
from benchmarks.policies.promise import Promise, table
from tests.bench.canned import StillWorker, record
from vllm_sched.bench.compare.compare import ComparisonPlan, Contender, ProgressReporter
from vllm_sched.bench.compare.runner import Round
from vllm_sched.bench.compare.workloads import Workload

Asked = list[tuple[str, Workload]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Have rounds that are made by hand, after what they were asked for."""
    found: Asked = []

    def contender(role: str, _side: object, _plan: ComparisonPlan, *, sharing: int) -> Contender:
        assert 1 <= sharing <= 8
        return Contender(role, role, StillWorker())  # type: ignore[arg-type]

    class Nobody:
        def __init__(self, workers: Sequence[object], narrator: object) -> None: ...
        async def __aenter__(self) -> None: ...
        async def __aexit__(self, *_: object) -> None: ...

    async def play_round(
        each: Contender, _plan: ComparisonPlan, workload: Workload, number: int, _narrator: object
    ) -> Round:
        found.append((each.role, workload))
        return Round(number, tuple(of(each.role, workload)))

    async def measure(
        sides: Sequence[Contender], plan: ComparisonPlan, narrator: ProgressReporter
    ) -> None:
        for number in range(1, plan.rounds + 1):
            for each in sides:
                each.rounds.append(await play_round(each, plan, plan.workload, number, narrator))

    for name, stand_in in (("contender", contender), ("running", Nobody)):
        monkeypatch.setattr(trials, name, stand_in)
    monkeypatch.setattr(trials, "measure", measure)
    monkeypatch.setattr(trials, "play_round", play_round)
    return found


def of(role: str, workload: Workload) -> list[object]:
    """Answer each request at a pace that follows from who is asked."""
    slow = 2.0 if role.startswith("default") else 1.0
    gap = 0.15 if role.startswith("default") and "2048" in role else 0.05
    return [
        record(
            each.klass,
            each.at,
            [each.at + slow * (1 + index), each.at + slow * (1 + index) + gap],
            prompt=each.prompt_tokens,
        )
        for index, each in enumerate(workload.arrivals)
    ]


async def run(name: str) -> dict[str, Promise]:
    with ProgressReporter(Console(quiet=True)) as narrator:
        verdict = await trials.TRIALS[name]("tiny", 2, 0, narrator)
    assert not verdict.failed
    return {promise.what: promise for promise in verdict.promises}


async def test_rotation_is_held_to_the_spread_and_the_makespan(asked: Asked) -> None:
    promises = list((await run("rotation")).values())
    assert [p.measured for p in promises] == pytest.approx([0.5, 0.5], abs=0.01)
    assert all(p.kept for p in promises)
    assert {role for role, _ in asked} == {"default", "rotation"}


async def test_the_chunks_target_lies_between_the_outer_two(asked: Asked) -> None:
    share, ttft = (await run("chunk_budget")).values()
    assert "100 ms" in share.what
    assert share.kept
    assert ttft.measured == pytest.approx(0.5, abs=0.1)
    ours = [role for role, _ in asked if role.startswith("chunk_budget")]
    assert ours == ["chunk_budget chunk_budget.itl_ms=100 --max-num-batched-tokens=2048"] * 2
    assert len({role for role, _ in asked}) == 6


async def test_lanes_are_played_alone_and_together_on_one_worker(asked: Asked) -> None:
    ttft, rest = (await run("lanes")).values()
    # With the hundred of the batch before them in the list, chats come later beside it.
    assert ttft.measured is not None
    assert ttft.measured > 1.2
    assert not ttft.kept
    assert rest.measured is not None
    classes = {role: {a.klass for a in workload.arrivals} for role, workload in asked}
    assert classes == {
        "chats alone": {"short"},
        "batch alone": {"batch"},
        "both": {"short", "batch"},
    }


async def test_auto_is_held_to_the_best_fixed_threshold_and_to_the_default(asked: Asked) -> None:
    fixed, default, again = (await run("deferred_prefill")).values()
    assert fixed.measured == again.measured == pytest.approx(1.0)
    assert fixed.what.startswith("tokens/s of auto, to K=1,")
    assert default.measured == pytest.approx(2.0, rel=0.02)
    assert fixed.kept
    assert default.kept
    assert len({role for role, _ in asked}) == 8


def test_a_promise_has_both_bounds_and_nothing_measured_is_none_kept() -> None:
    assert Promise("", 1.0, 1.0).kept
    assert not Promise("", 1.01, 1.0).kept
    assert Promise("", 1.0, at_least=1.0).kept
    assert not Promise("", 0.99, at_least=1.0).kept
    assert not Promise("", None, 1.0).kept
    shown = Console(width=100)
    with shown.capture() as capture:
        promises = [Promise("what", 0.512, 0.5), Promise("nothing", None), Promise("beside", 0.9)]
        shown.print(table("t", promises))
    assert "0.512" in capture.get()
    assert "at most 0.5" in capture.get()
    assert "missed" in capture.get()
    assert "kept" not in capture.get()


def test_an_unknown_trial_is_named_beside_those_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["rotations"])
    assert "'rotations' is no trial; use one of: rotation, chunk_budget" in capsys.readouterr().err
