"""Write files atomically, so that an interrupted command keeps the previous file."""

from __future__ import annotations

import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path


def write_whole(path: Path, content: str | bytes, *, errors: str = "strict") -> None:
    """Write a temporary file in the same folder and rename it to `path`.

    Writes in place if `path` is not a regular file, if the folder is not writable, or if the
    rename fails (`path` is a mount point).
    """
    data = content.encode("utf-8", errors) if isinstance(content, str) else content
    # A random name: containers share process ids, and in a shared folder another user could place
    # a link under a predictable name.
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
