"""Paths of results: unwritable paths are refused early."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from vllm_sched.cli.output import require_folders, require_place, writing
from vllm_sched.errors import UsageError


def test_writable_paths_are_accepted(tmp_path: Path) -> None:
    there = tmp_path / "there.json"
    there.touch()
    require_folders(None, there, tmp_path / "new.json")
    require_place(tmp_path)
    require_place(tmp_path / "to" / "be" / "made")


def test_folders_and_missing_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a folder; name a file in it"):
        require_folders(tmp_path)
    with pytest.raises(UsageError, match=r"there is no folder .*nowhere; make it first"):
        require_folders(tmp_path / "nowhere" / "a.json")
    (tmp_path / "a").touch()
    for pictures in (tmp_path / "a", tmp_path / "a" / "b"):
        with pytest.raises(UsageError, match=f"--plot {pictures}: {tmp_path}/a is a file"):
            require_place(pictures)


def test_unwritable_paths_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests may run as root, which may write anywhere."""
    (tmp_path / "there.json").touch()
    monkeypatch.setattr(os, "access", lambda path, mode: mode == os.F_OK and Path(path).exists())
    for name, place in (("there.json", "there.json"), ("new.json", "")):
        with pytest.raises(UsageError, match=f"{name}: {tmp_path / place} is not writable"):
            require_folders(tmp_path / name)
    with pytest.raises(UsageError, match=f"a/b: {tmp_path} is not writable"):
        require_place(tmp_path / "a" / "b")


def test_inaccessible_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hidden(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_dir", hidden)
    with pytest.raises(UsageError, match="there is no folder"):
        require_folders(tmp_path / "a.json")


def test_full_disk_is_reported_in_one_line() -> None:
    full = pytest.raises(UsageError, match=r"^a\.json: No space left on device$")
    with full, writing(Path("a.json")):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
