"""Writes log lines in a thread, so that the event loop never waits for a disk or a pipe.

The lines of `GATHER_S` are written together. If the buffer is full, lines are dropped, and a line
with their number follows. Pieces fit in an atomic write to a pipe, which processes may share.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator

GATHER_S = 0.1
MAX_BUFFER_BYTES = 8 << 20
MAX_PIECE_BYTES = 4096  # PIPE_BUF
CLOSE_S = 2.0


class LogWriter:
    def __init__(self, fd: int = 2, most_bytes: int = MAX_BUFFER_BYTES) -> None:
        self.written = 0
        self._refused = 0  # by `put`
        self._lost = 0  # by the thread
        self._fd = fd
        self._max_bytes = most_bytes
        self._lines: deque[bytes] = deque()
        self._bytes = 0
        self._taken = 0  # bytes that the thread has taken in total
        self._unreported = 0  # dropped lines that are not reported yet
        self._wake = threading.Event()
        self._idle = threading.Event()
        self._idle.set()
        self._closing = False
        self._thread: threading.Thread | None = None

    @property
    def dropped(self) -> int:
        """Number of lines that were not written."""
        return self._refused + self._lost

    def put(self, line: bytes) -> None:
        """Queue a line, which ends with a newline."""
        if self._bytes - self._taken + len(line) > self._max_bytes or self._closing:
            self._refused += 1
            self._unreported += 1
            return
        self._lines.append(line)
        self._bytes += len(line)
        if not self._wake.is_set():
            self._idle.clear()
            self._wake.set()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="log", daemon=True)
                self._thread.start()

    def flush(self, within_s: float = CLOSE_S) -> bool:
        """Wait until all lines are written; return whether they are."""
        return self._idle.wait(within_s)

    def close(self, within_s: float = CLOSE_S) -> None:
        """Write queued lines within the time limit, and refuse new lines."""
        self.flush(within_s)
        self._closing = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(within_s)

    def _run(self) -> None:
        unreported = 0
        while not self._closing:
            self._wake.wait()
            if not self._closing:
                time.sleep(GATHER_S)
            # Before taking lines: a new line sets it again.
            self._wake.clear()
            lines = self._lines
            while lines:
                batch = [lines.popleft() for _ in range(len(lines))]
                lost = self._write(batch)
                self._lost += lost
                unreported += lost
                self._taken += sum(map(len, batch))
            count, self._unreported = self._unreported, 0
            unreported += count
            notice = b'{"event":"log_lines_dropped","count":%d}\n' % unreported
            if unreported and not self._write([notice]):
                unreported = 0
            if not self._wake.is_set():
                self._idle.set()
                if self._lines:  # queued in the last moment
                    self._idle.clear()
                    self._wake.set()

    def _write(self, lines: Iterable[bytes]) -> int:
        """Write lines; return the number of lost lines."""
        lost = 0
        for piece in pieces(lines):
            left = memoryview(piece)
            while left:
                try:
                    left = left[os.write(self._fd, left) :]
                except BlockingIOError:
                    if not self._closing:
                        time.sleep(GATHER_S)
                        continue
                    break
                except OSError:
                    break
            missed = bytes(left).count(b"\n")
            lost += missed
            self.written += piece.count(b"\n") - missed
        return lost


def pieces(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Yield lines joined to pieces; longer lines stay whole."""
    held: list[bytes] = []
    size = 0
    for line in lines:
        if held and size + len(line) > MAX_PIECE_BYTES:
            yield b"".join(held)
            held, size = [], 0
        held.append(line)
        size += len(line)
    if held:
        yield b"".join(held)
