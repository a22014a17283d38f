"""Folders that are made once per machine, such as the tiny model."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from vllm_sched.errors import UsageError

CACHE_VARIABLE: Final = "VLLM_SCHED_CACHE"


def cache_dir() -> Path:
    """Return the cache folder: `VLLM_SCHED_CACHE`, by default the user's cache folder."""
    if explicit := os.environ.get(CACHE_VARIABLE):
        return Path(explicit).absolute()  # workers start in another folder
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "vllm-sched"


def cached_folder(name: str, make: Callable[[Path], None]) -> Path:
    """Return the cached folder `name`; `make` fills it if it does not exist."""
    try:
        folder = cache_dir() / name
        if folder.is_dir():
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Renamed when complete, so other processes see no partial folder.
        aside = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=folder.parent))
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home folder
        raise UsageError(
            f"{name} can't be stored: {error}; set {CACHE_VARIABLE} to a writable folder"
        ) from None
    try:
        make(aside)
        aside.chmod(0o755)
        aside.rename(folder)
    except OSError:
        if not folder.is_dir():  # another process made the same folder first
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder
