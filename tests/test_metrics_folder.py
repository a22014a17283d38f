"""The folder in which engines and servers share metrics."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from vllm_sched import metrics_folder


def test_folder_is_in_memory_if_there_is_room(tmp_path: Path) -> None:
    made = metrics_folder.make_folder(tmp_path)
    assert made.parent == tmp_path
    assert [*made.iterdir()] == []
    assert made != metrics_folder.make_folder(tmp_path)


@pytest.mark.parametrize("why", ["not there", "full", "not ours"])
def test_folder_is_on_disk_without_room_in_memory(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, elsewhere = tmp_path / "memory", tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(elsewhere))
    if why != "not there":
        memory.mkdir()
    if why == "full":
        monkeypatch.setattr(metrics_folder, "MIN_FREE_BYTES", 1 << 62)
    if why == "not ours":
        monkeypatch.setattr(os, "access", lambda *_: False)
    assert metrics_folder.make_folder(memory).parent == elsewhere
