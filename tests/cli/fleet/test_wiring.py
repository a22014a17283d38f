"""The flags and environment of workers with a transfer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from proxy.config import TransferConfig, WorkerConfig
from tests.workers.cpu_build import pretend_cpu_build
from vllm_sched.cli.fleet.wiring import Wiring, transfer_wiring
from vllm_sched.workers import connectors, launch
from vllm_sched.workers.connectors import SIDE_HOST, SIDE_PORT


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cpu_build(monkeypatch)


def wiring(connector: str, role: str, *, url: str | None = None, **settings: Any) -> Wiring:
    """Return a worker's wiring; other settings are those of `transfer` and `launch`."""
    transfer = {key: settings.pop(key) for key in TransferConfig.model_fields if key in settings}
    worker = {"name": "w", "role": role, "url": url, "launch": settings}
    return transfer_wiring(
        TransferConfig.model_validate({"connector": connector, **transfer}),
        WorkerConfig.model_validate(worker),
    )


def config_of(made: Wiring) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(value(made, "--kv-transfer-config"))
    return found


def value(made: Wiring, flag: str) -> str:
    return made.flags[made.flags.index(flag) + 1]


def test_nixl_workers_on_a_cpu() -> None:
    prefill, decode = (
        wiring("nixl", "prefill"),
        wiring("nixl", "decode", url="http://10.0.0.7:8000"),
    )
    assert [config_of(made)["kv_role"] for made in (prefill, decode)] == [
        "kv_producer",
        "kv_consumer",
    ]
    for made in (prefill, decode):
        config = config_of(made)
        assert config["kv_connector"] == "NixlConnector"
        assert config["kv_buffer_device"] == "cpu"
        assert config["kv_load_failure_policy"] == "recompute"
        assert config["kv_connector_module_path"] == "vllm_sched.engine.nixl"
        assert config["kv_connector_extra_config"] == {
            "kv_lease_duration": connectors.DEFAULT_LEASE_S
        }
        assert value(made, "--block-size") == "128"
        assert "--enable-prompt-tokens-details" in made.flags
    assert (prefill.env[SIDE_HOST], decode.env[SIDE_HOST]) == ("127.0.0.1", "10.0.0.7")
    assert prefill.env[SIDE_PORT] != decode.env[SIDE_PORT]
    assert decode.env[SIDE_PORT] in decode.summary


def test_push_mode_uses_its_own_connector_class() -> None:
    assert config_of(wiring("nixl", "decode", mode="push"))["kv_connector"] == "NixlPushConnector"


def test_lease_outlives_three_missed_heartbeats() -> None:
    # vLLM sends a heartbeat every sixth of the lease, and each adds two thirds of it.
    assert connectors.DEFAULT_LEASE_S // 6 >= 1
    assert connectors.DEFAULT_LEASE_S * 2 // 3 > 3 * (connectors.DEFAULT_LEASE_S // 6)


def test_gpu_worker_leaves_block_size_and_buffer_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "on_cpu", lambda: False)
    made = wiring("nixl", "prefill")
    assert "--block-size" not in made.flags
    assert config_of(made).keys().isdisjoint({"kv_buffer_device", "kv_connector_module_path"})
    bound = config_of(wiring("nixl", "prefill", cpus=[0]))
    assert bound["kv_connector_module_path"] == connectors.NIXL_MODULE


def test_missing_key_of_an_own_configuration_is_reported() -> None:
    own = '{"kv_connector": "NixlConnector", "kv_role": "kv_both"%s}'
    bare = wiring("nixl", "prefill", args=["--kv-transfer-config", own % ""])
    assert f'set "kv_connector_module_path": "{connectors.NIXL_MODULE}"' in bare.summary
    assert bare.summary.endswith("blocks of 128")
    whole = own % f', "kv_connector_module_path": "{connectors.NIXL_MODULE}"'
    description = wiring("nixl", "prefill", args=["--kv-transfer-config", whole]).summary
    assert description == "--kv-transfer-config as given, blocks of 128"


def test_users_flags_and_environment_win() -> None:
    own = '--kv-transfer-config={"kv_connector": "NixlConnector", "kv_role": "kv_both"}'
    made = wiring(
        "nixl", "prefill", args=["--block_size=64", own], env={SIDE_PORT: "5999", SIDE_HOST: "h"}
    )
    assert value(made, "--block-size") == "64"
    assert "--kv-transfer-config" not in made.flags
    assert dict(made.env) == {SIDE_HOST: "h", SIDE_PORT: "5999"}


def test_users_config_file_wins(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text(
        "block-size: 64\nkv-transfer-config: {kv_connector: NixlConnector, kv_role: kv_both}\n"
    )
    args = ["--config", str(file)]
    made = wiring("nixl", "prefill", args=args)
    assert value(made, "--block-size") == "64"
    assert "--kv-transfer-config" not in made.flags
    own = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    assert connectors.user_config(args) == own


def test_connectors_with_an_address() -> None:
    mooncake = wiring("mooncake", "prefill", addresses={"w": "http://10.0.0.1:9001"})
    assert mooncake.env == {"VLLM_MOONCAKE_BOOTSTRAP_PORT": "9001"}
    assert wiring("mooncake", "decode").env == {}
    assert config_of(wiring("lmcache", "prefill"))["kv_connector"] == "LMCacheConnectorV1"


def test_shared_storage_has_a_path_one_role_and_no_chunks() -> None:
    made = wiring("shared-storage", "prefill", path="/kv")
    config = config_of(made)
    assert "--no-enable-chunked-prefill" in made.flags
    assert (config["kv_connector"], config["kv_role"]) == ("ExampleConnector", "kv_both")
    assert config["kv_connector_extra_config"] == {"shared_storage_path": "/kv"}


@pytest.mark.parametrize(("lease_s", "given"), [(None, 60), (30.0, 60), (6, 12), (45.5, 91)])
def test_worker_lease_is_longer_than_the_routers(lease_s: float | None, given: int) -> None:
    """A lease that ends early exposes reused blocks; a late end costs memory."""
    config = config_of(wiring("nixl", "prefill", lease_s=lease_s))
    assert config["kv_connector_extra_config"]["kv_lease_duration"] == given
