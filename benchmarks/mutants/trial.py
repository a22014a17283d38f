"""Run tests on a copy of the tree that has a mutant.

Each trial forks a process that has loaded the libraries, so it costs only the tests.
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
EXCLUDED = (".git", ".venv", "out", "__pycache__", ".pytest_cache", ".mypy_cache", ".hypothesis")
OPTIONS = (
    "-x", "-q", "--no-header", "--tb=no", "-p", "no:cacheprovider", "-p", "no:schemathesis",
    "-W", "ignore::pytest.PytestAssertRewriteWarning",
)  # fmt: skip


def copy_tree(root: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(root, target, ignore=shutil.ignore_patterns(*EXCLUDED), symlinks=True)
    (target / ".venv").symlink_to(root / ".venv")


def load(libraries: Sequence[str]) -> None:
    """Import the libraries of the trials, and none of our modules."""
    for name in libraries:
        with suppress(ImportError):
            import_module(name)
    ours = [name for name in sys.modules if name.partition(".")[0] in ("proxy", "vllm_sched")]
    assert not ours, f"imported before the mutant is in place: {ours}"


def run(tree: Path, tests: Sequence[str], limit_s: float) -> bool:
    """Return whether all of these tests pass in the tree within the time limit."""
    child = os.fork()
    if not child:
        os.setsid()
        try:
            os._exit(_pytest(tree, tests))
        finally:
            # After an error the child would go on as a worker of the pool.
            os._exit(1)
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
    files = dict.fromkeys(test.partition("::")[0] for test in tests)
    status = pytest.main([*OPTIONS, f"--rootdir={tree}", *files], [SelectedTests(tests)])
    sys.stdout.flush()
    return int(status)


class SelectedTests:
    """A pytest plugin that runs only the given tests, in their order."""

    def __init__(self, tests: Sequence[str]) -> None:
        self._position = {test: position for position, test in enumerate(tests)}

    def pytest_collection_modifyitems(self, items: list[object]) -> None:
        """Select and sort the tests."""
        positions = self._position
        items[:] = sorted(
            (item for item in items if item.nodeid in positions),  # type: ignore[attr-defined]
            key=lambda item: positions[item.nodeid],  # type: ignore[attr-defined]
        )


def _wait(child: int, limit_s: float) -> int:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -1
