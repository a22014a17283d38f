"""A file is written whole or not at all."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path
from typing import Any

import pytest

from vllm_sched.files import write_whole


def test_file_is_written_without_leftovers(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for content in ("one", b"\x89\r\n", "tw\u00f6"):
        write_whole(path, content)
        assert path.read_bytes() == (content if isinstance(content, bytes) else content.encode())
        path.chmod(0o640)
    assert [each.name for each in tmp_path.iterdir()] == ["a.json"]
    assert path.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()])
def test_failed_write_keeps_the_old_file(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")

    class Half(io.FileIO):
        def write(self, content: Any) -> int:
            super().write(content[:2])
            raise error

    def opened(place: Path, mode: str) -> Half:
        return Half(place, mode)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", opened)
        with pytest.raises(type(error)):
            write_whole(path, "new and longer")
    assert path.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["a.json"]


def test_temporary_names_differ_for_equal_process_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first process of each container has id 1, and names must be unpredictable."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    places: list[tuple[str, str]] = []
    opened = Path.open

    def noted(place: Path, mode: str, **more: Any) -> Any:
        places.append((place.name, mode))
        return opened(place, mode, **more)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", noted)
        for name in ("a.json", "a.json"):
            write_whole(tmp_path / name, "text")
    (one, how), (other, _) = places
    assert one != other
    assert how == "xb"  # an existing link is not followed


def test_links_pipes_and_devices_are_written_in_place(tmp_path: Path) -> None:
    there, link, pipe = (tmp_path / name for name in ("there", "link", "pipe"))
    link.symlink_to(there)
    write_whole(link, "through")
    assert link.is_symlink()
    assert there.read_text() == "through"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_whole(pipe, "piped")
    assert os.read(reader, 10) == b"piped"
    os.close(reader)
    with pytest.raises(OSError, match="No space left"):
        write_whole(Path("/dev/full"), "x")


def test_file_in_an_unwritable_folder_is_written_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests may run as root, which may write anywhere."""
    path = tmp_path / "a.json"
    path.write_text("old")
    monkeypatch.setattr(os, "access", lambda place, _: Path(place) != tmp_path)
    inode = path.stat().st_ino
    write_whole(path, "new")
    assert path.read_text() == "new"
    assert path.stat().st_ino == inode


def test_mounted_file_is_written_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may mount a single file of its host."""
    path = tmp_path / "a.json"
    path.write_text("old")

    def busy(*_: object) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(Path, "replace", busy)
    write_whole(path, "new")
    assert path.read_text() == "new"
    assert [each.name for each in tmp_path.iterdir()] == ["a.json"]
