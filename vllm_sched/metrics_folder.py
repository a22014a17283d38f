"""Where an engine and its server share what they count: a folder of files that both map.

In memory where the machine has room. On a disk, to write to a page that is just being written
back waits for the disk, and the engine with it: some tenths of a second on a busy one.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Final

# As prometheus_client names it; read when it is first imported.
VARIABLE: Final = "PROMETHEUS_MULTIPROC_DIR"
MEMORY: Final = Path("/dev/shm")  # noqa: S108 - mkdtemp makes ours
# The files take a few MiB, but where a mapped page has none to go to its process dies, and others
# want memory there after us: a plain container's 64 MiB are not enough.
ROOM: Final = 256 << 20


def make(memory: Path = MEMORY) -> Path:
    """Return a new, empty folder, for whoever asks to remove."""
    return Path(tempfile.mkdtemp(prefix="vllm-sched-metrics-", dir=_usable(memory)))


def _usable(memory: Path) -> Path | None:
    try:
        found = os.statvfs(memory)
    except OSError:
        return None
    has_room = found.f_bavail * found.f_frsize >= ROOM
    return memory if has_room and os.access(memory, os.W_OK | os.X_OK) else None
