"""NIXL's parameters, as real workers write them."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from proxy.config import TransferConfig
from proxy.transfer.registry import connector
from proxy.transfer.types import Pair, PrefillResult, Side
from tests.proxy.transfer.making import PAIR, make, params

# From vLLM 0.32's answer to a prefill leg.
TOLD: dict[str, Any] = {
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


def test_the_prefill_leg_asks_for_its_blocks_to_be_kept() -> None:
    asked = params(nixl.prefill(PAIR))
    assert asked["do_remote_decode"] is True
    assert asked["do_remote_prefill"] is False
    assert all(value is None for key, value in asked.items() if key.startswith("remote_"))


def test_the_decode_leg_gets_what_the_prefill_leg_was_told() -> None:
    taken = nixl.take(PAIR, {"kv_transfer_params": TOLD, "usage": USAGE})
    assert params(nixl.decode(PAIR, taken)) == TOLD
    assert taken.cached_tokens is None  # the decode worker knows


def test_what_an_older_worker_does_not_know_the_router_does() -> None:
    older = {k: v for k, v in TOLD.items() if k != "remote_prefill_cached_tokens"}
    taken = nixl.take(PAIR, {"kv_transfer_params": older, "usage": USAGE})
    assert taken.params is not None
    assert taken.cached_tokens == 128


NEEDED = "remote_engine_id", "remote_request_id", "remote_host", "remote_port"


@pytest.mark.parametrize("name", NEEDED)
def test_a_part_that_is_missing_means_no_transfer(name: str) -> None:
    less = {key: value for key, value in TOLD.items() if key != name}
    assert nixl.take(PAIR, {"kv_transfer_params": less}).params is None


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_a_worker_that_says_nothing_of_its_ranks_has_one_to_who_pulls(mode: str) -> None:
    """So vLLM reads it: `kv_transfer_params.get("tp_size", 1)`; pushed, its engine would die."""
    less = {key: value for key, value in TOLD.items() if key != "tp_size"}
    taken = make("nixl", mode=mode).take(PAIR, {"kv_transfer_params": less})
    assert (taken.params is None) == (mode == "push")


@pytest.mark.parametrize(
    "wrong",
    [
        {"remote_block_ids": []},
        {"remote_block_ids": [[]]},
        {"remote_block_ids": None},
        {"do_remote_prefill": False},
        {"tp_size": None},
        {"remote_engine_id": None},
    ],
)
def test_what_would_kill_a_decode_worker_is_not_passed_on(wrong: dict[str, Any]) -> None:
    taken = nixl.take(PAIR, {"kv_transfer_params": TOLD | wrong})
    assert taken.params is None
    assert nixl.decode(PAIR, taken) == {}
    assert nixl.release(taken) is None


@pytest.mark.parametrize("answer", [{}, {"kv_transfer_params": None}, {"kv_transfer_params": 7}])
def test_a_worker_without_the_connector_leaves_nothing(answer: dict[str, Any]) -> None:
    assert nixl.take(PAIR, answer).params is None


def test_what_nobody_fetches_is_released_by_a_request_that_must_be_refused() -> None:
    body = nixl.release(nixl.take(PAIR, {"kv_transfer_params": TOLD}))
    assert body is not None
    asked = orjson.loads(body)
    assert asked["kv_transfer_params"] == TOLD
    assert asked["max_tokens"] == 1
    assert asked["model"].startswith("vllm-sched:")


def test_pulled_no_leg_needs_an_id_of_its_own() -> None:
    assert nixl.request_id(PAIR) is None


def test_pushed_the_id_is_ours_and_nothing_can_be_released() -> None:
    """Blocks are written to whoever has the id, so no client may choose it."""
    push = make("nixl", mode="push")
    taken = push.take(PAIR, {"kv_transfer_params": TOLD | {"transfer_mode": "push"}})
    assert push.request_id(PAIR) == PAIR.id.encode()
    assert params(push.decode(PAIR, taken))["transfer_mode"] == "push"
    assert push.release(taken) is None


@pytest.mark.parametrize(
    ("hosts", "told", "wrong"),
    [
        (("10.0.0.1", "10.0.0.2"), "localhost", True),
        (("10.0.0.1", "10.0.0.2"), "::1", True),
        (("10.0.0.1", "10.0.0.2"), "10.0.0.1", False),
        (("10.0.0.1", "10.0.0.1"), "localhost", False),  # both there
        (("127.0.0.1", "10.0.0.2"), "127.0.0.1", False),  # a tunnel, perhaps: nothing is known
    ],
)
def test_an_address_where_a_decode_worker_finds_itself_is_doubted(
    hosts: tuple[str, str], told: str, wrong: bool
) -> None:
    pair = Pair(Side("p", hosts[0]), Side("d", hosts[1]), "1")
    doubt = nixl.doubt(pair, PrefillResult(orjson.dumps(TOLD | {"remote_host": told})))
    assert bool(doubt) == wrong
    assert not wrong or doubt.endswith("VLLM_NIXL_SIDE_CHANNEL_HOST=10.0.0.1")
    assert nixl.doubt(pair, PrefillResult()) == ""


@pytest.mark.parametrize(("lease_s", "within_s"), [(None, 24.0), (60.0, 48.0)])
def test_blocks_are_fetched_well_within_their_lease(lease_s: float | None, within_s: float) -> None:
    config = TransferConfig(connector="nixl", lease_s=lease_s)
    assert connector(config).within_s == pytest.approx(within_s)
    others = TransferConfig(connector="shared-storage", path="/kv")
    assert connector(others).within_s == float("inf")
