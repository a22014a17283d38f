"""What tests of several commands ask for."""

from __future__ import annotations

import pytest

from vllm_sched.bench.plots import style


@pytest.fixture
def svg_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw no PNG: tests of plots see that it is there."""
    monkeypatch.setattr(style, "files", lambda stem: [stem.with_name(f"{stem.name}.svg")])
