"""A file is written whole or not at all: a command that is stopped loses no older one."""

from __future__ import annotations

import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path


def write_whole(path: Path, content: str | bytes, *, errors: str = "strict") -> None:
    """Write a file beside it, and let that take its place.

    What is no plain file (a device, a pipe, a link), or in a folder that takes no more files, is
    written where it is; so is one whose place can't be taken, as it is a mount of its own.
    """
    data = content.encode("utf-8", errors) if isinstance(content, str) else content
    # By a name that nobody can have taken: in containers all have one process id, and in a folder
    # of everybody's a link might lie there.
    place = path.parent / f".{secrets.token_hex(8)}.vllm-sched.part"
    plain = not path.is_symlink() and (path.is_file() or not path.exists())
    if not plain or not os.access(path.parent, os.W_OK):
        path.write_bytes(data)
        return
    try:
        with place.open("xb") as file:
            file.write(data)
        if path.exists():
            shutil.copymode(path, place)
        try:
            place.replace(path)
        except OSError:
            path.write_bytes(data)
            place.unlink()
    except BaseException:
        with suppress(OSError):
            place.unlink()
        raise
