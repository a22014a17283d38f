"""The benchmark of the cost of the journal."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from benchmarks import journal_cost


def test_both_halves_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_cost, "RUNNING", 8)
    monkeypatch.setattr(journal_cost, "WARM_UP_STEPS", 2)
    cost = journal_cost.measure(4, str(tmp_path))
    assert cost.step_s > 0
    assert cost.reader_s > 0
    assert math.isfinite(cost.thread_s)
    assert math.isfinite(cost.process_s)


def test_targets_are_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(journal_cost, "measure", lambda *_: journal_cost.Cost(1e-3, 1e-5, 1, 1e-3))
    monkeypatch.setattr("sys.argv", ["journal_cost", "--rounds", "1"])
    monkeypatch.setenv("COLUMNS", "300")
    journal_cost.main()
    printed = capsys.readouterr().out
    assert "1% of a step: met" in printed
    assert "2 us per stream: MISSED" in printed
