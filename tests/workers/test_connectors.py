"""vLLM's KV connectors and the user's own configuration."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.transfer.registry import CONNECTORS
from tests.workers.cpu_build import pretend_cpu_build
from vllm_sched.workers import connectors


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cpu_build(monkeypatch)


def test_missing_connectors_are_detected_from_vllms_list(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not connectors.missing_requirement("nixl")
    assert not connectors.missing_requirement("nixl", "push")
    assert (
        connectors.missing_requirement("mooncake") == "the package mooncake is not installed here"
    )
    monkeypatch.setattr(connectors, "_factory_source", lambda: '"SharedStorageConnector"')
    assert not connectors.missing_requirement("shared-storage")
    assert connectors.missing_requirement("nixl").endswith("has no NixlConnector")
    monkeypatch.setattr(connectors, "_factory_source", lambda: "")
    # Without vLLM the start of a worker fails.
    assert not connectors.missing_requirement("mooncake")


def test_every_connector_of_the_router_has_vllms_class() -> None:
    modes = {"nixl push"}
    assert sorted(CONNECTORS) == sorted(connectors.CLASSES.keys() - modes), (
        "add vLLM's class to CLASSES in vllm_sched/workers/connectors.py"
    )


def test_vllms_list_of_connectors_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    pytest.importorskip("vllm")
    assert not connectors.missing_requirement("nixl")


@pytest.mark.parametrize(
    ("text", "read"), [(None, None), ("{", {}), ("[1]", {}), ('{"a": 1}', {"a": 1})]
)
def test_own_configuration_is_parsed(text: str | None, read: dict[str, Any] | None) -> None:
    args = [] if text is None else ["--kv-transfer-config", text]
    assert connectors.user_config(args) == read


def test_own_configuration_by_single_keys_is_merged() -> None:
    args = [
        "--kv_transfer_config.kv_buffer_device=cpu",
        "--kv-transfer-config.kv_connector_extra_config.kv_lease_duration", "90",
    ]  # fmt: skip
    own = {"kv_buffer_device": "cpu", "kv_connector_extra_config": {"kv_lease_duration": 90}}
    assert connectors.user_config(args) == own
    assert connectors.user_config(["--kv-transfer-config", '{"a": 1}', *args]) == {"a": 1, **own}
