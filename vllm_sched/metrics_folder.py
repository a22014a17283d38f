"""The folder of memory-mapped metric files that an engine and its server share.

It is in memory if possible: on a busy disk, a write can block the engine for tenths of a second.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Final

# The variable that prometheus_client reads when it is first imported.
METRICS_VARIABLE: Final = "PROMETHEUS_MULTIPROC_DIR"
MEMORY: Final = Path("/dev/shm")  # noqa: S108 - mkdtemp creates our own folder in it
# A process dies when a mapped page finds no memory, and other programs need /dev/shm too. The
# 64 MiB of a plain container are not enough.
MIN_FREE_BYTES: Final = 256 << 20


def make_folder(memory: Path = MEMORY) -> Path:
    """Return a new, empty folder, which the caller removes."""
    return Path(tempfile.mkdtemp(prefix="vllm-sched-metrics-", dir=_usable(memory)))


def _usable(memory: Path) -> Path | None:
    try:
        status = os.statvfs(memory)
    except OSError:
        return None
    has_room = status.f_bavail * status.f_frsize >= MIN_FREE_BYTES
    return memory if has_room and os.access(memory, os.W_OK | os.X_OK) else None
