"""Where engines and servers share what they count."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from vllm_sched import metrics_folder


def test_it_is_in_memory_where_there_is_room(tmp_path: Path) -> None:
    made = metrics_folder.make_folder(tmp_path)
    assert made.parent == tmp_path
    assert [*made.iterdir()] == []
    assert made != metrics_folder.make_folder(tmp_path)


@pytest.mark.parametrize("why", ["not there", "full", "not ours"])
def test_it_is_elsewhere_where_there_is_none(
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
