"""Fixtures of several commands."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator

import pytest

from tests.cli.program import Program
from vllm_sched.bench.plots import style
from vllm_sched.workers import launch


@pytest.fixture(autouse=True)
def no_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collect no garbage: the objects of all tests and of vLLM would be scanned in each command."""
    for name in ("collect", "freeze", "unfreeze"):
        monkeypatch.setattr(gc, name, lambda: None)


@pytest.fixture
def program(capsys: pytest.CaptureFixture[str]) -> Program:
    return Program(capsys)


@pytest.fixture
def svg_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw SVG files only; tests of plots check the PNG files."""
    monkeypatch.setattr(style, "files", lambda stem, _=(): [stem.with_name(f"{stem.name}.svg")])


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behave as with a CPU build of vLLM, which need not be installed."""
    monkeypatch.setattr(launch, "on_cpu", lambda: True)


@pytest.fixture
def default_ctrl_c() -> Iterator[None]:
    """Restore the default Ctrl-C handler, which earlier tests may have replaced."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
