"""Lines on their way to a file, from a thread: whoever logs never waits for a disk or a pipe.

A tenth of a second's lines are written together, so a busy router wakes the thread ten times a
second and an idle one never. What finds the buffer full is dropped, counted, and told of once there
is room. Pieces are at most what a pipe takes whole, so that several processes may share one.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator

GATHER_S = 0.1
MOST_BYTES = 8 << 20
WHOLE = 4096  # PIPE_BUF
CLOSE_S = 2.0


class LogWriter:
    """Writes lines to a file descriptor."""

    def __init__(self, fd: int = 2, most_bytes: int = MOST_BYTES) -> None:
        self.written = 0
        self._refused = 0  # by `put`
        self._lost = 0  # by the thread
        self._fd = fd
        self._most = most_bytes
        self._lines: deque[bytes] = deque()
        self._bytes = 0
        self._taken = 0  # bytes the thread has taken, since ever
        self._untold = 0  # dropped, and not yet told of
        self._wake = threading.Event()
        self._idle = threading.Event()
        self._idle.set()
        self._closing = False
        self._thread: threading.Thread | None = None

    @property
    def dropped(self) -> int:
        """Count the lines that were not written."""
        return self._refused + self._lost

    def put(self, line: bytes) -> None:
        """Have a line written, soon; it ends as lines do."""
        if self._bytes - self._taken + len(line) > self._most or self._closing:
            self._refused += 1
            self._untold += 1
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
        """Wait until all is written; whether it was."""
        return self._idle.wait(within_s)

    def close(self, within_s: float = CLOSE_S) -> None:
        """Write what there is, unless that takes too long, and nothing more."""
        self.flush(within_s)
        self._closing = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(within_s)

    def _run(self) -> None:
        untold = 0
        while not self._closing:
            self._wake.wait()
            if not self._closing:
                time.sleep(GATHER_S)
            # Before the lines are taken: one that comes now wakes it anew.
            self._wake.clear()
            lines = self._lines
            while lines:
                batch = [lines.popleft() for _ in range(len(lines))]
                lost = self._write(batch)
                self._lost += lost
                untold += lost
                self._taken += sum(map(len, batch))
            count, self._untold = self._untold, 0
            untold += count
            notice = b'{"event":"log_lines_dropped","count":%d}\n' % untold
            if untold and not self._write([notice]):
                untold = 0
            if not self._wake.is_set():
                self._idle.set()
                if self._lines:  # it came just now
                    self._idle.clear()
                    self._wake.set()

    def _write(self, lines: Iterable[bytes]) -> int:
        """Write lines; return how many were lost: the disk is full, or nobody reads any more."""
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
    """Join lines to pieces that a pipe takes whole; a longer line is a piece of its own."""
    held: list[bytes] = []
    size = 0
    for line in lines:
        if held and size + len(line) > WHOLE:
            yield b"".join(held)
            held, size = [], 0
        held.append(line)
        size += len(line)
    if held:
        yield b"".join(held)
