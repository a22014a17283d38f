"""Mooncake: the router's transfer id and the bootstrap address."""

from __future__ import annotations

import pytest

from tests.present import present
from tests.proxy.transfer.making import PAIR, make, params


@pytest.mark.parametrize(
    ("addresses", "address"),
    [({}, "http://10.0.0.1:8998"), ({"p0": "http://10.0.0.9:9000"}, "http://10.0.0.9:9000")],
)
def test_both_legs_have_the_transfer_id(addresses: dict[str, str], address: str) -> None:
    mooncake = make("mooncake", addresses=addresses)
    first = mooncake.prefill(PAIR)
    assert params(first) == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "transfer_id": PAIR.id,
    }
    second = params(mooncake.decode(PAIR, mooncake.result_of(PAIR, {})))
    assert second == {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_engine_id": "p0",
        "remote_bootstrap_addr": address,
        "transfer_id": PAIR.id,
    }


def test_prefill_leg_has_min_tokens_one() -> None:
    assert make("mooncake").prefill(PAIR)["min_tokens"] == b"1"


def test_unfetched_blocks_can_be_released() -> None:
    mooncake = make("mooncake")
    body = present(mooncake.release(mooncake.result_of(PAIR, {})))
    assert PAIR.id.encode() in body
