"""The trials of policies without workers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from rich.console import Console

from benchmarks.policies import trials
from benchmarks.policies.promise import Promise, table
from tests.bench.canned import StillWorker, printed, record
from vllm_sched.bench.compare.compare import ComparisonPlan, Contender, ProgressReporter
from vllm_sched.bench.compare.runner import Round
from vllm_sched.bench.compare.workloads import Workload

PlayedRounds = list[tuple[str, Workload]]


@pytest.fixture
def played_rounds(monkeypatch: pytest.MonkeyPatch) -> PlayedRounds:
    """Replace real rounds by computed ones; return the list of played rounds."""
    found: PlayedRounds = []

    def contender(role: str, _side: object, _plan: ComparisonPlan, *, sharing: int) -> Contender:
        assert 1 <= sharing <= 8
        return Contender(role, role, StillWorker())  # type: ignore[arg-type]

    class NoWorkers:
        def __init__(self, workers: Sequence[object], reporter: object) -> None: ...
        async def __aenter__(self) -> None: ...
        async def __aexit__(self, *_: object) -> None: ...

    async def play_round(
        each: Contender, _plan: ComparisonPlan, workload: Workload, number: int, _reporter: object
    ) -> Round:
        found.append((each.role, workload))
        return Round(number, tuple(records_of(each.role, workload)))

    async def measure(
        sides: Sequence[Contender], plan: ComparisonPlan, reporter: ProgressReporter
    ) -> None:
        for number in range(1, plan.rounds + 1):
            for each in sides:
                each.rounds.append(await play_round(each, plan, plan.workload, number, reporter))

    for name, stand_in in (("contender", contender), ("running", NoWorkers)):
        monkeypatch.setattr(trials, name, stand_in)
    monkeypatch.setattr(trials, "measure", measure)
    monkeypatch.setattr(trials, "play_round", play_round)
    return found


def records_of(role: str, workload: Workload) -> list[object]:
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
    with ProgressReporter(Console(quiet=True)) as reporter:
        verdict = await trials.TRIALS[name]("tiny", 2, 0, reporter)
    assert not verdict.failed
    return {promise.what: promise for promise in verdict.promises}


async def test_rotation_is_judged_by_spread_and_makespan(played_rounds: PlayedRounds) -> None:
    promises = list((await run("rotation")).values())
    assert [p.measured for p in promises] == pytest.approx([0.5, 0.5], abs=0.01)
    assert all(p.kept for p in promises)
    assert {role for role, _ in played_rounds} == {"default", "rotation"}


async def test_chunk_target_lies_between_the_extremes(played_rounds: PlayedRounds) -> None:
    share, ttft = (await run("chunk_budget")).values()
    assert "100 ms" in share.what
    assert share.kept
    assert ttft.measured == pytest.approx(0.5, abs=0.1)
    ours = [role for role, _ in played_rounds if role.startswith("chunk_budget")]
    assert ours == ["chunk_budget chunk_budget.itl_ms=100 --max-num-batched-tokens=2048"] * 2
    assert len({role for role, _ in played_rounds}) == 6


async def test_lanes_are_measured_alone_and_together_on_one_worker(
    played_rounds: PlayedRounds,
) -> None:
    ttft, rest = (await run("lanes")).values()
    # The batch precedes the chats in the list, so chats beside it are later.
    assert ttft.measured is not None
    assert ttft.measured > 1.2
    assert not ttft.kept
    assert rest.measured is not None
    classes = {role: {a.klass for a in workload.arrivals} for role, workload in played_rounds}
    assert classes == {
        "chats alone": {"short"},
        "batch alone": {"batch"},
        "both": {"short", "batch"},
    }


async def test_auto_is_judged_by_the_best_fixed_threshold_and_the_default(
    played_rounds: PlayedRounds,
) -> None:
    fixed, default, again = (await run("deferred_prefill")).values()
    assert fixed.measured == again.measured == pytest.approx(1.0)
    assert fixed.what.startswith("tokens/s of auto, to K=1,")
    assert default.measured == pytest.approx(2.0, rel=0.02)
    assert fixed.kept
    assert default.kept
    assert len({role for role, _ in played_rounds}) == 8


def test_promise_without_a_measurement_is_not_kept() -> None:
    assert Promise("", 1.0, 1.0).kept
    assert not Promise("", 1.01, 1.0).kept
    assert Promise("", 1.0, at_least=1.0).kept
    assert not Promise("", 0.99, at_least=1.0).kept
    assert not Promise("", None, 1.0).kept
    promises = [Promise("what", 0.512, 0.5), Promise("nothing", None), Promise("beside", 0.9)]
    shown = printed(table("t", promises))
    for words in ("0.512", "at most 0.5", "missed"):
        assert words in shown
    assert "kept" not in shown
