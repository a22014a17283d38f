"""Fixtures of several commands."""

from __future__ import annotations

import pytest

from vllm_sched.bench.plots import style


@pytest.fixture
def svg_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw SVG files only; tests of plots check the PNG files."""
    monkeypatch.setattr(style, "files", lambda stem, _=(): [stem.with_name(f"{stem.name}.svg")])
