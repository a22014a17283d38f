"""LMCache: a shared cache, or a named receiver."""

from __future__ import annotations

from tests.proxy.transfer.making import PAIR, make, params


def test_shared_cache_needs_no_parameters() -> None:
    lmcache = make("lmcache")
    assert lmcache.prefill(PAIR) == {}
    assert lmcache.decode(PAIR, lmcache.result_of(PAIR, {})) == {}


def test_receiver_is_in_the_prefill_leg_only() -> None:
    lmcache = make("lmcache", addresses={"d0": "10.0.0.2:7300:7400"})
    spec = params(lmcache.prefill(PAIR))["disagg_spec"]
    assert spec == {
        "req_id": PAIR.id,
        "receiver_host": "10.0.0.2",
        "receiver_init_port": [7300],
        "receiver_alloc_port": [7400],
    }
    assert lmcache.decode(PAIR, lmcache.result_of(PAIR, {})) == {}
