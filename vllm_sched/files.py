"""A file is written whole or not at all: a command that is stopped loses no older one."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path


def write_whole(path: Path, text: str, *, errors: str = "strict") -> None:
    """Write a file beside it, and let that take its place.

    What is no plain file (a device, a pipe, a link), or in a folder that takes no more files, is
    written where it is; so is one whose place can't be taken, as it is a mount of its own.
    """
    place = path.parent / f".{os.getpid()}.vllm-sched.part"
    plain = not path.is_symlink() and (path.is_file() or not path.exists())
    if not plain or not os.access(path.parent, os.W_OK):
        path.write_text(text, encoding="utf-8", errors=errors)
        return
    try:
        place.write_text(text, encoding="utf-8", errors=errors)
        if path.exists():
            shutil.copymode(path, place)
        try:
            place.replace(path)
        except OSError:
            path.write_text(text, encoding="utf-8", errors=errors)
            place.unlink()
    except BaseException:
        with suppress(OSError):
            place.unlink()
        raise
