"""Workers that offload KV blocks, alone and beside a transfer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cli.fleet.test_transfer_checks import (
    DECODE,
    PREFILL,
    Entry,
    commands,
    entry,
    own,
    problems,
    transfer_config,
    written,
)
from vllm_sched.cli.fleet import fleet
from vllm_sched.cli.fleet.transfer_checks import unsupported_here
from vllm_sched.workers import connectors, launch

NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
TIER = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
LONG_LEASE = {"connector": "nixl", "lease_s": 60}


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "on_cpu", lambda: True)


def several(*parts: Entry) -> str:
    return own("MultiConnector", kv_connector_extra_config={"connectors": [*parts]})


def test_up_starts_nixl_before_offloading(tmp_path: Path) -> None:
    general = {"name": "g", "launch": {"kv_offloading_size": 0.5}}
    offloads = entry("prefill", kv_offloading_size=20)
    path = written(tmp_path, offloads, DECODE, general)
    prefill, _, alone = commands(fleet.read(path), tmp_path)
    made = transfer_config(prefill)
    assert (made["kv_connector"], made["kv_role"]) == ("MultiConnector", "kv_both")
    assert made["kv_load_failure_policy"] == "recompute"
    nixl, tier = made["kv_connector_extra_config"]["connectors"]
    assert (nixl["kv_connector"], nixl["kv_role"]) == ("NixlConnector", "kv_producer")
    assert nixl["kv_connector_extra_config"]["kv_lease_duration"] == connectors.DEFAULT_LEASE_S
    assert tier == TIER | {"kv_connector_extra_config": {"cpu_bytes_to_use": 20 * 2**30}}
    assert alone[alone.index("--kv-offloading-size") + 1] == "0.5"


ALONE = "launch.args: --kv-offloading-size 4: vLLM would run only its offloading connector"
OWN = f"{ALONE}, and no other; put OffloadingConnector into --kv-transfer-config instead"
TWICE = "launch.kv_offloading_size: 2: launch.args has --kv-transfer-config too"
ORDER = "the connector 'OffloadingConnector' first in MultiConnector: transfer is nixl"


@pytest.mark.parametrize(
    ("worker", "moved", "message"),
    [
        (entry("prefill", "--kv-offloading-size=4"), "nixl", ALONE),
        (entry("general", "--kv_offloading_size", "4", kv_offloading_size=2), "nixl", ALONE),
        (entry("general", own("LMCacheConnectorV1"), "--kv-offloading-size=4"), "nixl", OWN),
        (entry("decode", several(NIXL, TIER), "--kv-offloading-size=4"), "nixl", OWN),
        (entry("decode", several(NIXL, TIER), kv_offloading_size=2), "nixl", TWICE),
        (
            entry("decode", kv_offloading_size=2), "mooncake",
            "launch.kv_offloading_size: 2: transfer is mooncake, and only nixl",
        ),
        (entry("decode", kv_offloading_size=0), "nixl", "launch.kv_offloading_size: "),
        (entry("decode", several(TIER, NIXL)), "nixl", ORDER),
        (entry("decode", several()), "nixl", "the connector 'MultiConnector': transfer is nixl"),
        (
            entry("decode", several(NIXL | {"kv_role": "kv_producer"}, TIER)), "nixl",
            "kv_role 'kv_producer': a decode worker needs kv_consumer",
        ),
        (
            entry("decode", several(NIXL | {"engine_id": "d"}, TIER)), "nixl",
            "engine_id in a part of MultiConnector",
        ),
        (
            entry("decode", several(NIXL, TIER)), LONG_LEASE,
            "kv_lease_duration 30: transfer.lease_s is 60",
        ),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused(
    tmp_path: Path, worker: Entry, moved: Any, message: str
) -> None:
    others = [entry(role) for role in ("prefill", "decode") if role != worker["role"]]
    (line,) = problems(tmp_path, worker, *others, transfer=moved)
    assert "workers[0]." in line
    assert message in line


def test_own_configuration_with_both_connectors_is_accepted(tmp_path: Path) -> None:
    fleet.read(written(tmp_path, entry("prefill", several(NIXL, TIER)), DECODE))
    assert not connectors.connector_parts({"kv_connector": "MultiConnector"})
    alone = entry("general", own("OffloadingConnector"), "--kv-offloading-size=4")
    fleet.read(written(tmp_path, alone, PREFILL, DECODE))  # the flag sets the same connector


@pytest.mark.parametrize("on_cpu", [True, False])
def test_offloading_needs_an_accelerator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_cpu: bool
) -> None:
    monkeypatch.setattr(launch, "on_cpu", lambda: on_cpu)
    config = fleet.read(written(tmp_path, entry("prefill", kv_offloading_size=2), DECODE))
    found = [problem.path for problem in unsupported_here(config)]
    assert ("workers[0].launch.kv_offloading_size" in found) == on_cpu
