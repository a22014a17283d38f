"""The whole command, with a mock worker instead of the router."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.router import __main__ as command
from benchmarks.router import mock, opponents, report, stage
from benchmarks.router.stage import OURS
from vllm_sched.workers.launch import Worker, free_port


def fake_router(program: Sequence[str], port: int) -> Worker:
    return Worker(program, port=port, name=OURS, deadline_s=20, grace_s=2)


@pytest.fixture(autouse=True)
def mock_as_router(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    router = fake_router([sys.executable, mock.__file__, str(port)], port)
    monkeypatch.setattr(stage, "our_router", lambda *_: router)
    monkeypatch.setattr(command, "FOLDER", tmp_path)


@pytest.mark.parametrize("wrong", [{}, {OURS: Counter({"c1: cut off": 3})}])
def test_command_measures_prints_and_saves(
    wrong: dict[str, Counter[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if wrong:
        monkeypatch.setattr(report, "errors", lambda _: wrong)
    path = tmp_path / "run.json"
    only = ["--only", "c1", "chunks"]
    status = command.main(["--quick", "--without-peers", *only, "--save", str(path)])
    printed = capsys.readouterr().out
    assert status == bool(wrong)
    assert ("vllm-sched: 3 x c1: cut off" in printed) == bool(wrong)
    assert "added p50, c=1" in printed
    assert "Medians of 1 rounds" in printed
    saved = json.loads(path.read_text())
    assert {sample["side"] for sample in saved["samples"]} == {"direct", OURS}
    figures = {figure["title"]: figure for figure in saved["figures"]}
    # The mock does little work, but its CPU time is measured.
    assert 0 < figures["CPU per chunk, 64 streams"]["values"][OURS] < 1000
    resident = figures["resident after load"]
    assert 5 < resident["values"][OURS] < 120
    assert resident["met"] is True
    assert figures["added p50, c=1"]["met"] is None
    assert saved["facts"]["rounds"] == 1
    assert saved["memory"][OURS]["rss"] > 0


def test_decision_benchmark_starts_no_router(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stage, "our_router", None)
    monkeypatch.setattr(command, "WORKERS", 10)
    assert command.main(["--only", "decision"]) == 0
    printed = capsys.readouterr().out
    assert "a decision" in printed
    assert "resident" not in printed


def test_router_that_does_not_start_is_reported_with_its_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    router = fake_router(["sh", "-c", "echo out of luck; exit 3"], free_port())
    monkeypatch.setattr(stage, "our_router", lambda *_: router)
    assert command.main(["--quick", "--without-peers", "--only", "c1"]) == 1
    printed = capsys.readouterr().out
    assert "died with exit code 3" in printed
    assert "out of luck" in printed


def test_missing_opponents_end_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(opponents, "INSTALL_S", 0.0)
    assert command.main(["--quick", "--only", "c1"]) == 1
    assert "--without-peers" in capsys.readouterr().out
