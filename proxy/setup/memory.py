"""Memory of a router process: freed blocks are reused, and lasting objects are not collected."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import sys
from collections.abc import Callable
from typing import Any, Final

# From glibc's malloc.h.
M_TRIM_THRESHOLD: Final = -1
M_MMAP_MAX: Final = -4
MAX_FREE_BYTES: Final = 64 << 20  # orjson allocates 12 bytes for each byte of a body
IDLE_S: Final = 5.0


def _glibc(function: str) -> Any:
    """Return a function of glibc; None on other systems."""
    return getattr(ctypes.CDLL(None), function, None) if sys.platform == "linux" else None


def keep_freed_memory() -> None:
    """Have glibc reuse the memory of large bodies instead of returning it to the kernel.

    Otherwise each body of 3 MB causes about 800 page faults.
    """
    if (mallopt := _glibc("mallopt")) is not None:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, MAX_FREE_BYTES)


async def return_freed_memory(large_bodies: Callable[[], int], idle_s: float = IDLE_S) -> None:
    """Return it to the kernel whenever no large body has come for a while."""
    if (malloc_trim := _glibc("malloc_trim")) is None:
        return
    seen = returned_at = large_bodies()
    while True:
        await asyncio.sleep(idle_s)
        if large_bodies() == seen != returned_at:
            malloc_trim(0)
            returned_at = seen
        seen = large_bodies()


def freeze_objects() -> None:
    """Exclude all current objects from garbage collection; call it once everything is set up."""
    gc.collect()
    gc.freeze()
