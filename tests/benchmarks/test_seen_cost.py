"""The benchmark of the cost of metrics."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from benchmarks.seen_cost import step_seconds, whole_step_s, write_seconds
from vllm_sched import SyncPolicyScheduler, metrics_folder


def test_steps_and_writes_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(metrics_folder.METRICS_VARIABLE, str(tmp_path))
    bare_s, added_s = step_seconds(SyncPolicyScheduler, {"lanes": {}}, 6, seed=0)
    assert bare_s > 0
    assert math.isfinite(added_s)
    assert write_seconds(SyncPolicyScheduler, {"lanes": {}}, between=2) > 0


def test_disabled_metrics_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(metrics_folder.METRICS_VARIABLE, raising=False)
    with pytest.raises(AssertionError, match="metrics are off"):
        step_seconds(SyncPolicyScheduler, {"lanes": {}}, 6, seed=0)


def test_reference_step_is_a_gpu_step() -> None:
    assert 0.005 < whole_step_s() < 0.05
