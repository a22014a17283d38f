"""LMCache: a common cache, or a receiver that is named."""

from __future__ import annotations

from tests.proxy.transfer.making import PAIR, make, params


def test_with_a_common_cache_nothing_is_said() -> None:
    lmcache = make("lmcache")
    assert lmcache.prefill(PAIR) == {}
    assert lmcache.decode(PAIR, lmcache.take(PAIR, {})) == {}


def test_a_receiver_is_named_to_the_prefill_worker_alone() -> None:
    lmcache = make("lmcache", addresses={"d0": "10.0.0.2:7300:7400"})
    spec = params(lmcache.prefill(PAIR))["disagg_spec"]
    assert spec == {
        "req_id": PAIR.id,
        "receiver_host": "10.0.0.2",
        "receiver_init_port": [7300],
        "receiver_alloc_port": [7400],
    }
    assert lmcache.decode(PAIR, lmcache.take(PAIR, {})) == {}
