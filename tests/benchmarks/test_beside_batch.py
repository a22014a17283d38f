"""The benchmark of chats beside a full batch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import beside_batch
from benchmarks.frontier.cells import Cell


def test_lanes_keep_chats_faster_than_priority_scheduling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside_batch, "SECONDS", 1.5)
    monkeypatch.setattr(beside_batch, "BATCH_REQUESTS", 600)
    model = replace(Cell("B200 8B", 2048, "").model, max_num_seqs=32)
    ttft_p50, _, _, batch_rate, priority_p50, _ = beside_batch.ratios(model, 1)
    assert 1.0 <= ttft_p50 < priority_p50
    assert batch_rate > 0.1
