"""Where compiled modules lie, and whether there are any of these very sources."""

from __future__ import annotations

import os
import sys
from hashlib import sha256
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Final

from proxy.errors import ProxyError

SWITCH: Final = "VLLM_SCHED_COMPILED"  # "0": leave them aside
PACKAGE: Final = Path(__file__).parents[1]
# In a clone, and where a wheel that has this folder is installed.
BUILT: Final = PACKAGE.with_name(".vllm-sched-compiled")
EDITION: Final = b"2"  # of the way they are made
FOLDERS: Final = ("core", "http", "wire")
# uvloop's objects do not have the types that `server` and `bind` name. `specs` go to other
# processes and to the simulator, which may run plain modules.
PLAIN: Final = ("core/model/specs.py", "wire/bind.py", "wire/server.py")
PLATFORM: Final = EXTENSION_SUFFIXES[0].strip(".")  # Python's version, processor, C library


class CompileError(ProxyError):
    """The modules can't be compiled."""


def hot() -> list[Path]:
    """Return the modules to compile: those on the path of each request."""
    plain = {PACKAGE / each for each in PLAIN}
    found = (path for folder in FOLDERS for path in (PACKAGE / folder).rglob("*.py"))
    return sorted(path for path in found if path.stem != "__init__" and path not in plain)


def hot_names() -> list[str]:
    """Name them as they are imported."""
    return [".".join(p.relative_to(PACKAGE.parent).with_suffix("").parts) for p in hot()]


def name() -> str:
    """Return the name of the folder with what is made of these sources.

    It depends on all of them: a module is compiled by the types of the modules that it imports.
    """
    found = sha256(EDITION + PLATFORM.encode())
    for path in sorted(PACKAGE.rglob("*.py")):
        found.update(path.relative_to(PACKAGE).as_posix().encode() + b"\0")
        found.update(path.read_bytes() + b"\0")
    return f"{PLATFORM}-{found.hexdigest()[:16]}"


def found() -> Path | None:
    """Return the folder with the compiled modules of these sources, if it is there and wanted."""
    try:
        if os.environ.get(SWITCH) == "0" or not BUILT.is_dir():
            return None
        folder = BUILT / name()
        return folder if folder.is_dir() else None
    except OSError:  # a source or the folder can't be read: plain modules need neither
        return None


def use(folder: Path, path: list[str]) -> None:
    """Have imports look there first; `path` is that of the whole package."""
    path.insert(0, str(folder / PACKAGE.name))
    sys.path.append(str(folder))  # of what they all share


def in_use() -> bool:
    """Return whether compiled modules run in this process."""
    return Path(sys.modules[PACKAGE.name].__path__[0]) != PACKAGE


def kind() -> str:
    """Return which modules run in this process; if plain ones do, why."""
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
