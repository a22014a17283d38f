"""The log writer: whole lines, in order, without waiting."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from proxy.telemetry.log_writer import MAX_PIECE_BYTES, LogWriter, pieces


def test_lines_are_written_whole_and_in_order(tmp_path: Path) -> None:
    file = tmp_path / "log"
    fd = os.open(file, os.O_WRONLY | os.O_CREAT)
    writer = LogWriter(fd)
    lines = [b"%d\n" % number for number in range(5000)]
    for line in lines:
        writer.put(line)
    assert writer.flush(30.0)
    assert file.read_bytes() == b"".join(lines)
    writer.put(b"more\n")
    writer.close(30.0)
    assert file.read_bytes().endswith(b"4999\nmore\n")
    assert (writer.written, writer.dropped) == (5001, 0)
    writer.put(b"too late\n")
    assert writer.dropped == 1
    os.close(fd)


def test_blocked_pipe_drops_and_counts_lines() -> None:
    reading, writing = os.pipe()
    writer = LogWriter(writing, most_bytes=100_000)
    line = b"x" * 99 + b"\n"
    for _ in range(5000):
        writer.put(line)  # a pipe takes 64 KiB, the buffer 100 KB
    assert 3000 < writer.dropped < 4500
    got = bytearray()
    done = threading.Event()

    def read() -> None:
        while data := os.read(reading, 65536):
            got.extend(data)
        done.set()

    threading.Thread(target=read, daemon=True).start()
    assert writer.flush(30.0)
    writer.close(30.0)
    os.close(writing)
    assert done.wait(30.0)
    lines = got.decode().split("\n")
    assert f'{{"event":"log_lines_dropped","count":{writer.dropped}}}' in lines
    assert lines.count("x" * 99) == 5000 - writer.dropped
    os.close(reading)


def test_closed_pipe_raises_nothing() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    writer = LogWriter(writing)
    writer.put(b"a\n")
    assert writer.flush(30.0)
    writer.close(30.0)
    os.close(writing)


def test_full_disk_drops_and_counts_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fd = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    full, write = threading.Event(), os.write

    def limited(to: int, data: bytes) -> int:
        if to == fd and full.is_set():
            raise OSError(errno.ENOSPC, "no space left")
        return write(to, data)

    monkeypatch.setattr(os, "write", limited)
    writer = LogWriter(fd)
    full.set()
    for _ in range(500):
        writer.put(b"x" * 99 + b"\n")
    assert writer.flush(30.0)
    assert (writer.written, writer.dropped) == (0, 500)
    full.clear()
    writer.put(b"room again\n")
    assert writer.flush(30.0)
    writer.close(30.0)
    assert (tmp_path / "log").read_bytes() == (
        b'room again\n{"event":"log_lines_dropped","count":500}\n'
    )
    os.close(fd)


def test_pieces_are_at_most_one_pipe_write() -> None:
    lines = [b"a" * size + b"\n" for size in (10, 4000, 80, 5, 9000, 7)]
    cut = list(pieces(lines))
    assert b"".join(cut) == b"".join(lines)
    assert [len(piece) for piece in cut if len(piece) > MAX_PIECE_BYTES] == [9001]
    assert all(piece.endswith(b"\n") for piece in cut)
