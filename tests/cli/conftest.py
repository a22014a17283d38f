"""Fixtures of several commands."""

from __future__ import annotations

import gc

import pytest

from vllm_sched.bench.plots import style


@pytest.fixture(autouse=True)
def no_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collect no garbage: the objects of all tests and of vLLM would be scanned in each command."""
    for name in ("collect", "freeze", "unfreeze"):
        monkeypatch.setattr(gc, name, lambda: None)


@pytest.fixture
def svg_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw SVG files only; tests of plots check the PNG files."""
    monkeypatch.setattr(style, "files", lambda stem, _=(): [stem.with_name(f"{stem.name}.svg")])
