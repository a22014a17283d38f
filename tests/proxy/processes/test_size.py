"""The number of processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from proxy.config import FleetConfig, parse
from proxy.processes import size
from proxy.processes.size import process_count


def config(processes: int | str) -> FleetConfig:
    worker = "{name: a, url: 'http://127.0.0.1:9'}"
    text = f"model: tiny\nworkers: [{worker}]\nrouter: {{processes: {processes}}}\n"
    return parse(text, "fleet.yaml")


@pytest.mark.parametrize(
    ("cpus", "quota", "wanted"),
    [
        (1, None, 1),
        (6, None, 6),
        (48, None, 8),
        (6, "max 100000", 6),
        (6, "250000 100000", 2),
        (6, "50000 100000", 1),
        (6, "9900000 100000", 6),
        (6, "?", 6),
    ],
)
def test_auto_is_one_process_per_processor_within_the_quota(
    cpus: int, quota: str | None, wanted: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cpus)))
    monkeypatch.setattr(size, "CPU_QUOTA_FILE", tmp_path / "cpu.max")
    if quota is not None:
        (tmp_path / "cpu.max").write_text(f"{quota}\n")
    assert process_count(config("auto")) == wanted
    assert process_count(config(3)) == 3
