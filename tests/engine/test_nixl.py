"""NIXL's settings and a thread's processors; tests/fleet tests the effect on a worker."""

from __future__ import annotations

import importlib
import os
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_sched.engine import nixl as ours

bindings = pytest.importorskip("nixl._api").nixlBind


def test_agent_config_gets_the_polling_pause() -> None:
    plain = bindings.nixlAgentConfig
    with suppress(ZeroDivisionError), ours.limit_polling(bindings, 700):
        config = bindings.nixlAgentConfig()
        config.pthrDelay = 0
        config.useProgThread = True
        assert config.pthrDelay == 700
        assert isinstance(config, plain)
        _ = 1 / 0
    assert bindings.nixlAgentConfig is plain


def test_real_agent_accepts_the_config() -> None:
    api = importlib.import_module("nixl._api")
    with ours.limit_polling(bindings):
        agent = api.nixl_agent("a", api.nixl_agent_config(backends=[]))
    assert agent.name == "a"


def test_thread_affinity_is_restored() -> None:
    before = os.sched_getaffinity(0)
    with ours.keep_affinity():
        os.sched_setaffinity(0, {max(before)})
    assert os.sched_getaffinity(0) == before


def test_nixl_without_the_setting_is_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unknown:
        """The settings of another NIXL."""

    other: Any = SimpleNamespace(nixlBind=SimpleNamespace(nixlAgentConfig=Unknown))
    monkeypatch.setattr(importlib, "import_module", lambda _: other)
    warnings: list[str] = []
    monkeypatch.setattr(ours.logger, "warning", warnings.append)
    with ours.with_cpu_settings():
        assert other.nixlBind.nixlAgentConfig is Unknown
    assert len(warnings) == 1


@pytest.mark.parametrize("name", ["NixlConnector", "NixlPushConnector"])
def test_connectors_are_created_with_cpu_settings(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, made = bindings.nixlAgentConfig, []

    def create(*arguments: object) -> None:
        made.append((arguments[1:], bindings.nixlAgentConfig is not plain))

    monkeypatch.setattr(getattr(ours.nixl, name), "__init__", create)
    getattr(ours, name)("config", "role", "cache")
    assert made == [(("config", "role", "cache"), True)]


@pytest.mark.parametrize("name", ["NixlConnector", "NixlPushConnector"])
def test_vllm_loads_our_connectors_by_its_names(name: str) -> None:
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    config = KVTransferConfig(
        kv_connector=name, kv_role="kv_producer", kv_connector_module_path=ours.__name__
    )
    found = KVConnectorFactory.get_connector_class(config)
    assert found is getattr(ours, name)
    plain = KVConnectorFactory.get_connector_class_by_name(name)
    assert issubclass(found, plain)
    assert KVConnectorFactory.supports_hma_config(config)
