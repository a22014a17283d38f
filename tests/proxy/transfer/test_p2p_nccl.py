"""P2P NCCL: the id says all, and only ours does."""

from __future__ import annotations

import pytest

from proxy.transfer.p2p_nccl import is_steering
from proxy.transfer.types import Pair, Side
from tests.proxy.transfer.making import PAIR, make

p2p = make("p2p-nccl", addresses={"p0": "10.0.0.1:21001", "d0": "10.0.0.2:22001"})


def test_the_id_names_both_workers() -> None:
    found = p2p.request_id(PAIR)
    assert found == (b"___prefill_addr_10.0.0.1:21001___decode_addr_10.0.0.2:22001_one-of-a-kind")
    assert found is not None
    assert is_steering(found)
    assert p2p.prefill(PAIR) == p2p.decode(PAIR, p2p.take(PAIR, {})) == {}


def test_a_worker_that_joined_since_has_no_address() -> None:
    assert p2p.request_id(Pair(Side("p9", "10.0.0.9"), PAIR.decode, "x")) is None


@pytest.mark.parametrize("request_id", [b"", b"abc", b"prefill_addr", b"cmpl-___x_decode"])
def test_other_ids_steer_nothing(request_id: bytes) -> None:
    assert not is_steering(request_id)


@pytest.mark.parametrize("request_id", [b"x___prefill_addr_a:1", b"___decode_addr_b:2_"])
def test_half_an_address_is_enough(request_id: bytes) -> None:
    assert is_steering(request_id)
