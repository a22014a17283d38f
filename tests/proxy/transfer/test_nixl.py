"""NIXL's transfer parameters, as real workers write them."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from proxy.config import TransferConfig
from proxy.transfer.registry import connector
from proxy.transfer.types import Pair, PrefillResult, Side
from tests.proxy.transfer.making import PAIR, make, params

# vLLM 0.32's response to a prefill leg.
PREFILL_PARAMS: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2, 3]],
    "remote_engine_id": "a-b-c",
    "remote_request_id": "cmpl-x-0-8f3aa91a",
    "remote_host": "localhost",
    "remote_port": 54985,
    "tp_size": 1,
    "dcp_size": 1,
    "pp_size": 1,
    "remote_num_tokens": 300,
    "remote_blocks_expiry_time": None,
    "transfer_mode": "pull",
    "remote_prefill_cached_tokens": 0,
}
USAGE = {"prompt_tokens": 300, "prompt_tokens_details": {"cached_tokens": 128}}
nixl = make("nixl")


def test_prefill_leg_requests_remote_decode() -> None:
    fields = params(nixl.prefill(PAIR))
    assert fields["do_remote_decode"] is True
    assert fields["do_remote_prefill"] is False
    assert all(value is None for key, value in fields.items() if key.startswith("remote_"))


def test_decode_leg_has_the_prefill_workers_parameters() -> None:
    result = nixl.result_of(PAIR, {"kv_transfer_params": PREFILL_PARAMS, "usage": USAGE})
    assert params(nixl.decode(PAIR, result)) == PREFILL_PARAMS
    assert result.cached_tokens is None  # the decode worker reports them


def test_cached_tokens_of_an_older_worker_come_from_usage() -> None:
    older_params = {k: v for k, v in PREFILL_PARAMS.items() if k != "remote_prefill_cached_tokens"}
    result = nixl.result_of(PAIR, {"kv_transfer_params": older_params, "usage": USAGE})
    assert result.params is not None
    assert result.cached_tokens == 128


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_missing_tp_size_means_no_push(mode: str) -> None:
    """VLLM reads `kv_transfer_params.get("tp_size", 1)`; in push mode its engine would die."""
    incomplete = {key: value for key, value in PREFILL_PARAMS.items() if key != "tp_size"}
    result = make("nixl", mode=mode).result_of(PAIR, {"kv_transfer_params": incomplete})
    assert (result.params is None) == (mode == "push")


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"kv_transfer_params": None},
        {"kv_transfer_params": 7},
        *(
            {"kv_transfer_params": {k: v for k, v in PREFILL_PARAMS.items() if k != missing}}
            for missing in ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")
        ),
        *(
            {"kv_transfer_params": PREFILL_PARAMS | wrong}
            for wrong in (
                {"remote_block_ids": []},
                {"remote_block_ids": [[]]},
                {"remote_block_ids": None},
                {"do_remote_prefill": False},
                {"tp_size": None},
                {"remote_engine_id": None},
            )
        ),
    ],
)
def test_invalid_parameters_are_not_passed_on(answer: dict[str, Any]) -> None:
    result = nixl.result_of(PAIR, answer)
    assert result.params is None
    assert nixl.decode(PAIR, result) == {}
    assert nixl.release(result) is None


def test_unfetched_blocks_are_released_by_an_invalid_request() -> None:
    body = nixl.release(nixl.result_of(PAIR, {"kv_transfer_params": PREFILL_PARAMS}))
    assert body is not None
    fields = orjson.loads(body)
    assert fields["kv_transfer_params"] == PREFILL_PARAMS
    assert fields["max_tokens"] == 1
    assert fields["model"].startswith("vllm-sched:")


def test_pull_needs_no_request_id() -> None:
    assert nixl.request_id(PAIR) is None


def test_push_uses_the_routers_id_and_cannot_release() -> None:
    """The worker pushes blocks to the request with the id, so no client may choose it."""
    push = make("nixl", mode="push")
    result = push.result_of(
        PAIR, {"kv_transfer_params": PREFILL_PARAMS | {"transfer_mode": "push"}}
    )
    assert push.request_id(PAIR) == PAIR.id.encode()
    assert params(push.decode(PAIR, result))["transfer_mode"] == "push"
    assert push.release(result) is None


@pytest.mark.parametrize(
    ("hosts", "remote_host", "wrong"),
    [
        (("10.0.0.1", "10.0.0.2"), "localhost", True),
        (("10.0.0.1", "10.0.0.2"), "::1", True),
        (("10.0.0.1", "10.0.0.2"), "10.0.0.1", False),
        (("10.0.0.1", "10.0.0.1"), "localhost", False),  # both on one host
        (("127.0.0.1", "10.0.0.2"), "127.0.0.1", False),  # perhaps a tunnel
    ],
)
def test_loopback_address_of_another_host_is_doubted(
    hosts: tuple[str, str], remote_host: str, wrong: bool
) -> None:
    pair = Pair(Side("p", hosts[0]), Side("d", hosts[1]), "1")
    warning = nixl.warning(
        pair, PrefillResult(orjson.dumps(PREFILL_PARAMS | {"remote_host": remote_host}))
    )
    assert bool(warning) == wrong
    assert not wrong or warning.endswith("VLLM_NIXL_SIDE_CHANNEL_HOST=10.0.0.1")
    assert nixl.warning(pair, PrefillResult()) == ""


@pytest.mark.parametrize(("lease_s", "within_s"), [(None, 24.0), (60.0, 48.0)])
def test_fetch_limit_is_80_percent_of_the_lease(lease_s: float | None, within_s: float) -> None:
    config = TransferConfig(connector="nixl", lease_s=lease_s)
    assert connector(config).read_within_s == pytest.approx(within_s)
    other_config = TransferConfig(connector="shared-storage", path="/kv")
    assert connector(other_config).read_within_s == float("inf")
