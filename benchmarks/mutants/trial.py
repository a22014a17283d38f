"""A mutant on trial: the tests that reach its line run on a copy of the tree that has it.

A process that has loaded the libraries is forked for each trial: what costs is the tests alone.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path

LIBRARIES = (
    "pytest", "_pytest.config", "pytest_asyncio", "hypothesis", "aiohttp", "fastapi", "uvloop",
    "httptools", "orjson", "pydantic", "prometheus_client", "uvicorn", "yaml", "rich", "xxhash",
    "trustme", "openai", "anthropic", "httpx", "numpy",
)  # fmt: skip
ENGINE_LIBRARIES = (
    "torch", "vllm", "vllm.v1.core.sched.scheduler", "vllm.v1.core.sched.async_scheduler",
    "vllm.v1.engine.core", "vllm.engine.arg_utils", "vllm.config",
)  # fmt: skip
LEFT_OUT = (".git", ".venv", "out", "__pycache__", ".pytest_cache", ".mypy_cache", ".hypothesis")
OPTIONS = (
    "-x", "-q", "--no-header", "--tb=no", "-p", "no:cacheprovider",
    "-W", "ignore::pytest.PytestAssertRewriteWarning",
)  # fmt: skip


def copy_tree(root: Path, place: Path) -> None:
    """Copy the sources and the tests."""
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(root, place, ignore=shutil.ignore_patterns(*LEFT_OUT), symlinks=True)
    (place / ".venv").symlink_to(root / ".venv")


def load(libraries: Sequence[str]) -> None:
    """Load what trials need, and nothing of ours."""
    for name in libraries:
        with suppress(ImportError):
            import_module(name)
    ours = [name for name in sys.modules if name.partition(".")[0] in ("proxy", "vllm_sched")]
    assert not ours, f"loaded before the mutant is there: {ours}"


def run(tree: Path, tests: Sequence[str], limit_s: float) -> bool:
    """Return whether all of these tests pass in the tree within the time."""
    child = os.fork()
    if not child:
        os.setsid()
        os._exit(_pytest(tree, tests))
    try:
        return _wait(child, limit_s) == 0
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)


def _pytest(tree: Path, tests: Sequence[str]) -> int:
    import pytest

    os.chdir(tree)
    sys.path.insert(0, str(tree))
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    log = tree / "out" / f"trial-{os.getpid()}.log"
    log.parent.mkdir(exist_ok=True)
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    files = dict.fromkeys(each.partition("::")[0] for each in tests)
    ended = pytest.main([*OPTIONS, *files], [Chosen(tests)])
    sys.stdout.flush()
    return int(ended)


class Chosen:
    """Run the tests that are named, in that order, of all that their files have."""

    def __init__(self, tests: Sequence[str]) -> None:
        self._place = {each: place for place, each in enumerate(tests)}

    def pytest_collection_modifyitems(self, items: list[object]) -> None:
        """Leave the others out."""
        places = self._place
        items[:] = sorted(
            (each for each in items if each.nodeid in places),  # type: ignore[attr-defined]
            key=lambda each: places[each.nodeid],  # type: ignore[attr-defined]
        )


def _wait(child: int, limit_s: float) -> int:
    ends_at = time.monotonic() + limit_s
    while time.monotonic() < ends_at:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -1
