"""P2P NCCL: the request id holds both addresses."""

from __future__ import annotations

import pytest

from proxy.transfer.p2p_nccl import is_steering
from proxy.transfer.types import Pair, Side
from tests.proxy.transfer.making import PAIR, make

p2p = make("p2p-nccl", addresses={"p0": "10.0.0.1:21001", "d0": "10.0.0.2:22001"})


def test_request_id_has_both_addresses() -> None:
    found = p2p.request_id(PAIR)
    assert found == (b"___prefill_addr_10.0.0.1:21001___decode_addr_10.0.0.2:22001_one-of-a-kind")
    assert found is not None
    assert is_steering(found)
    assert p2p.prefill(PAIR) == p2p.decode(PAIR, p2p.take(PAIR, {})) == {}


def test_worker_without_an_address_has_no_request_id() -> None:
    assert p2p.request_id(Pair(Side("p9", "10.0.0.9"), PAIR.decode, "x")) is None


@pytest.mark.parametrize(
    ("request_id", "steering"),
    [(b"", False), (b"abc", False), (b"prefill_addr", False), (b"cmpl-___x_decode", False),
     (b"x___prefill_addr_a:1", True), (b"___decode_addr_b:2_", True)],
)  # fmt: skip
def test_id_with_an_address_is_steering(request_id: bytes, steering: bool) -> None:
    assert is_steering(request_id) is steering
