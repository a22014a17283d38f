from __future__ import annotations

import asyncio
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.bench.canned import StillWorker, canned_comparison, canned_round
from vllm_sched.bench.compare import compare
from vllm_sched.bench.compare.compare import ComparisonPlan, Contender, ProgressReporter
from vllm_sched.bench.compare.runner import Round
from vllm_sched.bench.compare.workloads import Workload, long_blocks_short
from vllm_sched.workers.launch import Side, WorkerError


class FakeWorker(StillWorker):
    def __init__(self, name: str, *, broken: bool = False) -> None:
        super().__init__(name=name)
        self.broken = broken
        self.events: list[str] = []

    def start(self) -> None:
        self.events.append("start")

    def wait_ready(self) -> None:
        if self.broken:
            raise WorkerError(f"{self.name} died")
        self.events.append("ready")

    def stop(self) -> None:
        self.events.append("stop")


def quiet() -> ProgressReporter:
    return ProgressReporter(Console(file=io.StringIO()))


def fakes(*names: str, broken: str = "") -> list[Any]:
    return [FakeWorker(name, broken=name == broken) for name in names]


@pytest.fixture(params=[True, False], ids=["cpu", "gpu"])
def _either_build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "on_cpu", lambda: request.param)


@pytest.mark.usefixtures("_either_build")
async def test_workers_run_inside_and_stop_after() -> None:
    workers = fakes("a", "b")
    async with compare.running(workers, quiet()):
        assert [w.events for w in workers] == [["start", "ready"]] * 2
    assert [w.events[-1] for w in workers] == ["stop"] * 2
    workers = fakes("a", "b", broken="b")
    with pytest.raises(WorkerError, match="b died"):
        async with compare.running(workers, quiet()):
            pytest.fail("entered without a worker")
    assert [w.events[-1] for w in workers] == ["stop"] * 2


@pytest.mark.usefixtures("_either_build")
async def test_cancellation_stops_all_workers() -> None:
    workers = fakes("a", "b")

    async def run() -> None:
        async with compare.running(workers, quiet()):
            entered.set()
            await asyncio.Event().wait()

    entered = asyncio.Event()
    task = asyncio.create_task(run())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [w.events[-1] for w in workers] == ["stop"] * 2


async def test_rounds_alternate_after_a_warm_up_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    played: list[tuple[str, int]] = []
    rests: list[float] = []

    async def rest(seconds: float) -> None:
        rests.append(seconds)
        assert len(rests) == len(played) + 1  # before each round: the other side still spins

    async def play(url: str, _: str, workload: Workload, number: int, **__: object) -> Round:
        played.append((url, number))
        assert workload == long_blocks_short()  # the warm-up round too
        return Round(number, ())

    monkeypatch.setattr(compare, "play", play)
    monkeypatch.setattr(compare.asyncio, "sleep", rest)
    a, b = fakes("a", "b")
    a.url, b.url = "a", "b"
    sides = [Contender(w.name, "", w) for w in (a, b)]
    await compare.measure(sides, ComparisonPlan("m", long_blocks_short(), rounds=3), quiet())
    warm_ups = [("a", 0), ("b", 0)]
    rounds = [("a", 1), ("b", 1), ("b", 2), ("a", 2), ("a", 3), ("b", 3)]
    assert played == warm_ups + rounds
    assert rests == [compare.PAUSE_BETWEEN_SIDES_S] * 8
    assert [[r.number for r in side.rounds] for side in sides] == [[1, 2, 3]] * 2


async def test_dead_worker_raises_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    (dead,) = fakes("a")

    def check() -> None:
        raise WorkerError("a died")

    monkeypatch.setattr(dead, "check", check)
    monkeypatch.setattr(compare, "PAUSE_BETWEEN_SIDES_S", 0.0)
    with pytest.raises(WorkerError, match="a died"):
        await compare.measure(
            [Contender("a", "", dead)], ComparisonPlan("m", long_blocks_short()), quiet()
        )


def test_workers_on_one_accelerator_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "on_cpu", lambda: False)
    monkeypatch.setattr("vllm_sched.workers.launch.on_cpu", lambda: False)
    side = Side("default", {}, ("--gpu-memory-utilization=0.3",))
    command = compare.contender("a", side, ComparisonPlan("m", long_blocks_short())).worker.command
    assert command[command.index("--gpu-memory-utilization") + 1] == "0.42"
    assert command[-1] == "--gpu-memory-utilization=0.3"  # the explicit flag comes last


def test_saved_file_has_settings_samples_and_ratios(tmp_path: Path) -> None:
    path, result = tmp_path / "out.json", canned_comparison((2.0, 2.0), (0.5, 0.5))
    result.save(path)
    saved = json.loads(path.read_text())
    assert saved["settings"]["rounds"] == 2
    assert saved["settings"]["workload"]["name"] == "long-blocks-short"
    short = saved["sides"]["candidate"]["classes"]["short"]
    assert short["ttfts"] == pytest.approx([0.5] * 4)
    assert saved["sides"]["candidate"]["policies"] == {"long_prompt": {"a<b": 1}}
    assert len(saved["sides"]["baseline"]["per_round"]) == 2
    ratio = next(f for f in saved["figures"] if (f["group"], f["measure"]) == ("short", "TTFT p50"))
    assert ratio["ratio"] == pytest.approx(0.25)
    # With more than two contenders, the figures are named by the others.
    first, second = result.contenders
    replace(result, contenders=[first, second, replace(second, role="third")]).save(path)
    saved = json.loads(path.read_text())
    assert list(saved["sides"]) == ["baseline", "candidate", "third"]
    assert list(saved["figures"]) == ["candidate", "third"]


def test_disturbed_rounds_are_reported_and_not_drawn() -> None:
    result = canned_comparison((2.0, 2.0, 2.0), (0.1, 1.9, 1.0))
    assert result.typical() == 2  # the median
    result.contenders[1].rounds[2] = canned_round(3, 1.95)
    assert result.typical() == 1
    assert result.warning() == ""
    result.contenders[0].rounds[2] = replace(result.contenders[0].rounds[2], stall=0.75)
    assert result.disturbed == [2]
    assert result.warning().startswith("1 of 3 rounds were disturbed")
    assert "0.75 s" in result.warning()
    assert result.typical() != 2
    for side in result.contenders:
        side.rounds[:] = [replace(played, stall=0.2) for played in side.rounds]
    assert result.typical() == 1  # all rounds are disturbed


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_is_plain_lines_in_a_pipe_and_live_in_a_terminal(terminal: bool) -> None:
    out = io.StringIO()
    with ProgressReporter(Console(file=out, force_terminal=terminal)) as reporter:
        reporter.step("round 1")
        reporter.detail("3 requests done")
    assert (out.getvalue() == "round 1\n") is not terminal
