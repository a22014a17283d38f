"""The predictions of measured rows: what counts, and what is marked."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import silicon
from vllm_sched.cost.profiles import find
from vllm_sched.cost.step_time import StepShape

ROW = silicon.Row("llama-3.1-70b", "h100", "fp8", 4, 8, 8000, 100, "unknown", 20.0, 500.0)


def test_requests_that_arrive_together_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silicon, "WAVES", 1)
    prompt_s = find("h100-70b-fp8-tp4").time.seconds(StepShape(prefill_tokens=8000))
    together = silicon.predict(ROW).predicted_ttft_ms / 1000
    # The mean of 1 to 8 prompts, one after another, of 0.8 to 1 times the length.
    assert 0.8 * 4.5 * prompt_s < together < 1.2 * 4.5 * prompt_s
    monkeypatch.setattr(silicon, "WAVES", 10)
    assert silicon.predict(ROW).predicted_ttft_ms / 1000 < together


def test_what_is_far_off_is_marked_by_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    late = replace(ROW, predicted_tpot_ms=21.0, predicted_ttft_ms=100.0)
    both = replace(ROW, predicted_tpot_ms=40.0, predicted_ttft_ms=100.0)
    near = replace(ROW, predicted_tpot_ms=21.0, predicted_ttft_ms=510.0)
    monkeypatch.setattr(silicon, "sample_path", lambda: Path("rows.csv"))
    monkeypatch.setattr(silicon, "read_rows", lambda _path: ([late, both, near], Counter()))
    monkeypatch.setattr(silicon, "predict", lambda row: row)
    monkeypatch.setattr(sys, "argv", ["silicon", "--rows"])
    assert silicon.main() == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("    tp4")]
    assert [line.partition("  off: ")[2] for line in rows] == ["TTFT", "TPOT, TTFT", ""]
