"""Folders that are made once a machine: the tiny model, vLLM's own tests."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from vllm_sched.errors import UsageError

VARIABLE: Final = "VLLM_SCHED_CACHE"


def cache_dir() -> Path:
    """Where made things are kept: `VLLM_SCHED_CACHE`, else the user's cache folder."""
    if explicit := os.environ.get(VARIABLE):
        return Path(explicit).absolute()  # workers start elsewhere
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "vllm-sched"


def cached_folder(name: str, make: Callable[[Path], None]) -> Path:
    """Return the folder of that name, made first if this machine has none."""
    try:
        folder = cache_dir() / name
        if folder.is_dir():
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Made aside and renamed: a second process sees the whole folder or none of it.
        aside = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=folder.parent))
    except (OSError, RuntimeError) as error:  # the latter of a user without a home
        raise UsageError(
            f"{name} can't be kept: {error}; set {VARIABLE} to a folder that can be written to"
        ) from None
    try:
        make(aside)
        aside.chmod(0o755)
        aside.rename(folder)
    except OSError:
        if not folder.is_dir():  # else another process was first, with the same content
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder
