"""A CPU build of vLLM with all connectors, as the tools see it."""

from __future__ import annotations

import pytest

from vllm_sched.workers import connectors, launch

NAMES = (
    "NixlConnector", "NixlPushConnector", "ExampleConnector", "MooncakeConnector",
    "LMCacheConnectorV1",
)  # fmt: skip


def pretend_cpu_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that it is installed, with the package of NIXL alone."""
    monkeypatch.setattr(launch, "on_cpu", lambda: True)
    text = " ".join(f'"{name}"' for name in NAMES)
    monkeypatch.setattr(connectors, "_factory_source", lambda: text)
    monkeypatch.setattr(connectors, "_importable", lambda package: package == "nixl")
