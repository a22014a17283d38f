"""`vllm-sched compare` without workers: what it refuses, prints, writes and returns."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.bench.canned import canned_comparison
from tests.cli.program import Program
from vllm_sched.bench.compare.compare import Comparison, ComparisonPlan
from vllm_sched.cli.bench import compare as measure
from vllm_sched.workers.launch import Side, WorkerError
from vllm_sched.workers.tiny_model import tiny_model

Calls = list[tuple[Side, Side, ComparisonPlan]]
COMPARE = ("compare", "--model", "m")


@pytest.fixture
def result() -> Comparison:
    return canned_comparison()


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch, result: Comparison) -> Calls:
    """Return the list of comparisons, which all have the same result."""
    seen: Calls = []

    async def compare(
        baseline: Side, candidate: Side, plan: ComparisonPlan, *_: object, **__: object
    ) -> Comparison:
        seen.append((baseline, candidate, plan))
        return result

    monkeypatch.setattr(measure, "compare", compare)
    return seen


def test_arguments_become_sides_and_a_plan(calls: Calls, program: Program) -> None:
    words = "--baseline none --candidate default --rounds 5 --longs 3 --seed 9"
    printed = program(*COMPARE, *words.split(), "--candidate-arg=--x=1", "--candidate-arg=--y")
    [(baseline, candidate, plan)] = calls
    assert (baseline.name, candidate.name, candidate.extra) == ("none", "default", ("--x=1", "--y"))
    assert (plan.model, plan.rounds, plan.workload.seed) == ("m", 5, 9)
    assert sum(a.klass == "long" for a in plan.workload.arrivals) == 3
    assert "short prompts" in printed.out


def test_model_folder_is_passed_as_an_absolute_path(
    calls: Calls, program: Program, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    program("compare", "--model", "./mine")
    program("compare", "--model", "tiny")
    assert [plan.model for _, _, plan in calls] == [str(tmp_path / "mine"), str(tiny_model())]


def test_compare_writes_json_and_plot(program: Program, tmp_path: Path) -> None:
    saved, drawn = tmp_path / "out.json", tmp_path / "out.html"
    program(*COMPARE, "--save", saved, "--plot", drawn)
    assert "sides" in json.loads(saved.read_text())
    assert drawn.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize("option", ["--save", "--plot"])
def test_full_disk_is_reported_after_the_figures(
    option: str, tmp_path: Path, program: Program
) -> None:
    path = tmp_path / "full.svg"
    path.symlink_to("/dev/full")
    printed = program(*COMPARE, option, path, status=2)
    assert "short prompts" in printed.out
    assert printed.err == f"vllm-sched compare: {path}: No space left on device\n"


def test_failed_requests_and_stalls_are_shown(result: Comparison, program: Program) -> None:
    result.contenders[0].rounds[0] = replace(result.contenders[0].rounds[0], stall=0.5)
    assert "disturbed" in program(*COMPARE).out
    for record in (*result.contenders[1].rounds[0].records, *result.contenders[1].rounds[0].lone):
        record.error = "HTTP 500: [boom]"
    printed = program(*COMPARE, status=1).out
    assert "failed requests" in printed
    assert "2 failed: candidate: short: HTTP 500: [boom]" in printed


def test_failed_worker_is_reported_with_its_log(
    monkeypatch: pytest.MonkeyPatch, program: Program
) -> None:
    async def compare(*_: object, **__: object) -> Comparison:
        raise WorkerError("candidate died; the end of its log:\nboom")

    monkeypatch.setattr(measure, "compare", compare)
    assert "boom" in program(*COMPARE, status=1).err


def test_interrupt_prints_one_line(monkeypatch: pytest.MonkeyPatch, program: Program) -> None:
    def interrupted(coroutine: object) -> Comparison:
        coroutine.close()  # type: ignore[attr-defined]
        raise KeyboardInterrupt

    monkeypatch.setattr(asyncio, "run", interrupted)
    interrupted_line = "vllm-sched: interrupted; the workers have been stopped\n"
    assert program(*COMPARE, status=130).err == interrupted_line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--candidate quick", "'quick'; valid: "),
        ("--set long_prompt.nope=1", "long_prompt.nope"),
        ("--candidate default --set long_prompt.max_wait_s=1", "long_prompt"),
        ("--workload quake", "'quake'"),
        ("--rounds 0", "--rounds 0: must be at least 1"),
        ("--longs -1", "--longs -1"),
        ("--plot out.png", "out.png"),
        ("--save nowhere/out.json", "no folder nowhere"),
        ("--trace nowhere/out.json", "no folder nowhere"),
    ],
)
def test_invalid_input_is_refused_before_any_worker_starts(
    calls: Calls, program: Program, words: str, message: str
) -> None:
    assert message in program.refusal(*COMPARE, *words.split())
    assert not calls
