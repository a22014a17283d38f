"""Programs that time a part of the code: the journal, the metrics, long bodies."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from benchmarks import journal_cost, long_bodies
from benchmarks.seen_cost import step_seconds, whole_step_s, write_seconds
from vllm_sched import SyncPolicyScheduler, metrics_folder


def test_journal_is_timed_in_both_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_cost, "RUNNING", 8)
    monkeypatch.setattr(journal_cost, "WARM_UP_STEPS", 2)
    cost = journal_cost.measure(4, str(tmp_path))
    assert min(cost.step_s, cost.reader_s) > 0
    assert math.isfinite(cost.thread_s + cost.process_s)


def test_targets_of_the_journal_are_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(journal_cost, "measure", lambda *_: journal_cost.Cost(1e-3, 1e-5, 1, 1e-3))
    monkeypatch.setattr("sys.argv", ["journal_cost", "--rounds", "1"])
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr("gc.disable", lambda: None)  # the tests after this one need it
    journal_cost.main()
    printed = capsys.readouterr().out
    assert "1% of a step: met" in printed
    assert "2 us per stream: MISSED" in printed


def test_steps_and_writes_of_metrics_are_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(metrics_folder.METRICS_VARIABLE, raising=False)
    with pytest.raises(AssertionError, match="metrics are off"):
        step_seconds(SyncPolicyScheduler, {"lanes": {}}, 6, seed=0)
    monkeypatch.setenv(metrics_folder.METRICS_VARIABLE, str(tmp_path))
    bare_s, added_s = step_seconds(SyncPolicyScheduler, {"lanes": {}}, 6, seed=0)
    assert bare_s > 0
    assert math.isfinite(added_s)
    assert write_seconds(SyncPolicyScheduler, {"lanes": {}}, between=2) > 0
    assert 0.005 < whole_step_s() < 0.05  # as on a GPU


def test_steps_of_long_bodies_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_bodies, "ROUNDS", 1)
    for kind, body in long_bodies.bodies(300_000):
        steps = long_bodies.steps_ms(body)
        assert len(steps) == 3, kind
        assert min(steps) >= 0, kind
    _, known = long_bodies.index_bytes(20, moves=2)  # so little memory is lost in the noise
    assert known == 20
