"""`vllm-sched compare` without workers: what it refuses, prints, writes and returns."""

from __future__ import annotations

import argparse
import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.bench.canned import canned_comparison
from vllm_sched.bench.compare.compare import Comparison, ComparisonPlan, ProgressReporter
from vllm_sched.cli.bench import compare as measure
from vllm_sched.errors import UsageError
from vllm_sched.workers.launch import Side, WorkerError
from vllm_sched.workers.tiny_model import tiny_model

Calls = list[tuple[Side, Side, ComparisonPlan]]


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    measure.describe(parser.add_subparsers())
    args = parser.parse_args(["compare", "--model", "m", *words])
    code = args.func(args)
    assert isinstance(code, int)
    return code


@pytest.fixture
def result() -> Comparison:
    return canned_comparison()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, result: Comparison) -> Calls:
    seen: Calls = []

    async def compare(
        baseline: Side,
        candidate: Side,
        plan: ComparisonPlan,
        _: ProgressReporter,
        *,
        trace: Path | None,  # noqa: ARG001
    ) -> Comparison:
        seen.append((baseline, candidate, plan))
        return result

    monkeypatch.setattr(measure, "compare", compare)
    return seen


def test_arguments_become_sides_and_a_plan(
    calls: Calls, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--baseline none --candidate default --rounds 5 --longs 3 --seed 9"
    assert run(*words.split(), "--candidate-arg=--x=1", "--candidate-arg=--y") == 0
    [(baseline, candidate, plan)] = calls
    assert (baseline.name, candidate.name, candidate.extra) == ("none", "default", ("--x=1", "--y"))
    assert (plan.model, plan.rounds, plan.workload.seed) == ("m", 5, 9)
    assert sum(a.klass == "long" for a in plan.workload.arrivals) == 3
    assert "short prompts" in capsys.readouterr().out


def test_model_folder_is_passed_as_an_absolute_path(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    assert run("--model", "./mine") == 0
    assert run("--model", "tiny") == 0
    assert [plan.model for _, _, plan in calls] == [str(tmp_path / "mine"), str(tiny_model())]


def test_compare_writes_json_and_plot(calls: Calls, tmp_path: Path) -> None:
    saved, drawn = tmp_path / "out.json", tmp_path / "out.html"
    assert run("--save", str(saved), "--plot", str(drawn)) == 0
    assert len(calls) == 1
    assert "sides" in json.loads(saved.read_text())
    assert drawn.read_text().startswith("<!doctype html>")


@pytest.mark.usefixtures("calls")
@pytest.mark.parametrize("option", ["--save", "--plot"])
def test_full_disk_is_reported_in_one_line_after_the_figures(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "full.svg"
    path.symlink_to("/dev/full")
    with pytest.raises(UsageError, match=rf"^{path}: No space left on device$"):
        run(option, str(path))
    assert "short prompts" in capsys.readouterr().out


@pytest.mark.usefixtures("calls")
def test_failed_requests_are_shown_and_exit_code_is_1(
    result: Comparison, capsys: pytest.CaptureFixture[str]
) -> None:
    for record in (*result.candidate.rounds[0].records, *result.candidate.rounds[0].lone):
        record.error = "HTTP 500: [boom]"
    assert run() == 1
    out = capsys.readouterr().out
    assert "failed requests" in out
    assert "candidate: short: HTTP 500: [boom]" in out
    assert "and 1 more" in out


@pytest.mark.usefixtures("calls")
def test_stalled_round_is_reported_as_disturbed(
    result: Comparison, capsys: pytest.CaptureFixture[str]
) -> None:
    result.baseline.rounds[0] = replace(result.baseline.rounds[0], stall=0.5)
    assert run() == 0
    assert "disturbed" in capsys.readouterr().out


def test_failed_worker_is_reported_with_its_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def compare(*_: object, **__: object) -> Comparison:
        raise WorkerError("candidate died; the end of its log:\nboom")

    monkeypatch.setattr(measure, "compare", compare)
    assert run() == 1
    assert "boom" in capsys.readouterr().err


def test_interrupt_prints_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(coroutine: object) -> Comparison:
        coroutine.close()  # type: ignore[attr-defined]
        raise KeyboardInterrupt

    monkeypatch.setattr(asyncio, "run", interrupted)
    assert run() == 130
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--candidate", "quick"], r"'quick'.*long_prompt.*default or none"),
        (["--set", "long_prompt.nope=1"], r"long_prompt\.nope"),
        (["--candidate", "default", "--set", "long_prompt.max_wait_s=1"], r"long_prompt"),
        (["--workload", "quake"], r"'quake'.*long-blocks-short"),
        (["--rounds", "0"], r"--rounds 0: must be at least 1"),
        (["--longs", "-1"], r"--longs -1"),
        (["--plot", "out.png"], r"out\.png"),
        (["--save", "nowhere/out.json"], r"no folder nowhere"),
        (["--trace", "nowhere/out.json"], r"no folder nowhere"),
    ],
)
def test_invalid_input_is_refused_before_any_worker_starts(
    calls: Calls, words: list[str], message: str
) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        run(*words)
    assert "\n" not in str(caught.value)
    assert not calls
