"""NIXL's settings and a thread's processors; what a worker gains is seen in tests/fleet."""

from __future__ import annotations

import importlib
import os
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_sched.engine import nixl as ours

bindings = pytest.importorskip("nixl._api").nixlBind


def test_an_agent_made_inside_is_told_to_pause_whatever_its_maker_says() -> None:
    plain = bindings.nixlAgentConfig
    with ours.limit_polling(bindings, 700):
        config = bindings.nixlAgentConfig()
        config.pthrDelay = 0
        config.useProgThread = True
        assert config.pthrDelay == 700
        assert isinstance(config, plain)
    after = bindings.nixlAgentConfig()
    after.pthrDelay = 0
    assert after.pthrDelay == 0


def test_the_real_agent_takes_it() -> None:
    api = importlib.import_module("nixl._api")
    with ours.limit_polling(bindings):
        agent = api.nixl_agent("a", api.nixl_agent_config(backends=[]))
    assert agent.name == "a"


def test_settings_are_as_before_even_after_an_error() -> None:
    plain = bindings.nixlAgentConfig
    with pytest.raises(RuntimeError, match="no agent"), ours.limit_polling(bindings):
        raise RuntimeError("no agent")
    assert bindings.nixlAgentConfig is plain


def test_a_thread_that_is_bound_elsewhere_gets_its_processors_back() -> None:
    before = os.sched_getaffinity(0)
    with ours.keep_affinity():
        os.sched_setaffinity(0, {max(before)})
    assert os.sched_getaffinity(0) == before


def test_a_nixl_without_that_setting_is_left_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Unknown:
        """The settings of another NIXL."""

    other: Any = SimpleNamespace(nixlBind=SimpleNamespace(nixlAgentConfig=Unknown))
    monkeypatch.setattr(importlib, "import_module", lambda _: other)
    said: list[str] = []
    monkeypatch.setattr(ours.logger, "warning", said.append)
    with ours.with_cpu_settings():
        assert other.nixlBind.nixlAgentConfig is Unknown
    assert len(said) == 1


@pytest.mark.parametrize("name", ["NixlConnector", "NixlPushConnector"])
def test_vllm_takes_ours_by_its_own_names(name: str) -> None:
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
