"""Fixtures of several modules."""

from __future__ import annotations

import pytest

from vllm_sched.workers import launch


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behave as with a CPU build of vLLM, which need not be installed."""
    monkeypatch.setattr(launch, "on_cpu", lambda: True)
