"""Where results go: what can't be written is refused before anything is measured."""

from __future__ import annotations

from pathlib import Path

from vllm_sched.errors import UsageError


def require_folders(*paths: Path | None) -> None:
    """Refuse folders, and files whose folder is not there; None is a file nobody asked for."""
    for path in filter(None, paths):
        if path.is_dir():
            raise UsageError(f"{path}: is a folder; name a file in it")
        if not path.parent.is_dir():
            raise UsageError(f"{path}: there is no folder {path.parent}; make it first")
