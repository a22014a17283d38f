"""Finds the compiled modules of the current sources."""

from __future__ import annotations

import os
import sys
from hashlib import sha256
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Final

from proxy.errors import ProxyError

SWITCH: Final = "VLLM_SCHED_COMPILED"  # "0" selects plain modules
PACKAGE: Final = Path(__file__).parents[1]
# Next to the package.
BUILT: Final = PACKAGE.with_name(".vllm-sched-compiled")
BUILD_VERSION: Final = b"2"  # increase it when the build itself changes
FOLDERS: Final = ("core", "http", "wire", "processes/shared")
# uvloop's objects lack the types that `server`, `bind` and `ticks` declare. `specs` objects are
# sent to processes that may run plain modules.
PLAIN: Final = ("core/model/specs.py", "wire/bind.py", "wire/server.py", "wire/ticks.py")
PLATFORM: Final = EXTENSION_SUFFIXES[0].strip(".")  # Python's version, processor, C library


class CompileError(ProxyError):
    """The modules can't be compiled."""


def compiled_sources() -> list[Path]:
    plain = {PACKAGE / module for module in PLAIN}
    sources = (path for folder in FOLDERS for path in (PACKAGE / folder).rglob("*.py"))
    return sorted(path for path in sources if path.stem != "__init__" and path not in plain)


def compiled_names() -> list[str]:
    return [
        ".".join(p.relative_to(PACKAGE.parent).with_suffix("").parts) for p in compiled_sources()
    ]


def name() -> str:
    """Return the folder name for these sources.

    It depends on all sources: a module is compiled with the types of its imports.
    """
    digest = sha256(BUILD_VERSION + PLATFORM.encode())
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(path.relative_to(PACKAGE).as_posix().encode() + b"\0")
        digest.update(path.read_bytes() + b"\0")
    return f"{PLATFORM}-{digest.hexdigest()[:16]}"


def found() -> Path | None:
    try:
        if os.environ.get(SWITCH) == "0" or not BUILT.is_dir():
            return None
        folder = BUILT / name()
        return folder if folder.is_dir() else None
    except OSError:  # an unreadable source or folder: use plain modules
        return None


def use(folder: Path, path: list[str]) -> None:
    """Make imports search the folder first; `path` is the package's `__path__`."""
    path.insert(0, str(folder / PACKAGE.name))
    sys.path.append(str(folder))  # for the library that compiled modules share


def in_use() -> bool:
    return Path(sys.modules[PACKAGE.name].__path__[0]) != PACKAGE


def kind() -> str:
    """Return whether modules are compiled or plain, and why."""
    if in_use():
        return "compiled"
    if os.environ.get(SWITCH) == "0":
        return f"plain ({SWITCH} is 0)"
    try:
        others = [path.name for path in BUILT.iterdir()] if BUILT.is_dir() else []
    except OSError as error:
        return f"plain ({error})"
    why = "not compiled yet"
    if any(other.startswith(f"{PLATFORM}-") for other in others):
        why = "the sources have changed since they were compiled"
    elif others:
        why = "compiled for another Python or platform"
    return f"plain ({why}: see `vllm-sched compile --help`)"
