"""Shared storage needs no parameters."""

from __future__ import annotations

from tests.proxy.transfer.making import PAIR, make

storage = make("shared-storage", path="/kv")


def test_neither_leg_has_parameters() -> None:
    result = storage.result_of(PAIR, {"kv_transfer_params": {"x": 1}})
    assert storage.prefill(PAIR) == storage.decode(PAIR, result) == {}
    assert storage.release(result) is None
    assert not storage.needs_params


def test_cached_tokens_are_the_prefill_workers() -> None:
    usage = {"prompt_tokens_details": {"cached_tokens": 64}}
    assert storage.result_of(PAIR, {"usage": usage}).cached_tokens == 64
    assert storage.result_of(PAIR, {"usage": {"prompt_tokens": 3}}).cached_tokens is None
    assert storage.result_of(PAIR, {}).cached_tokens is None
