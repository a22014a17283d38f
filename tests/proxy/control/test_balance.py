"""Which side is short, from how busy both were."""

from __future__ import annotations

import pytest

from proxy.control.balance import Balance, balance
from proxy.core.router import Router
from proxy.core.types import Gauges, Role
from tests.proxy.core.making import ask, placed, router_of, spec


@pytest.mark.parametrize(
    ("prefill", "decode", "short", "words"),
    [
        (0.95, 0.2, "prefill", "one more prefill worker would help, and a decode worker could"),
        (0.95, 0.7, "prefill", "one more prefill worker would help; "),
        (0.1, 0.9, "decode", "one more decode worker would help, and a prefill worker could"),
        (0.9, 0.9, "both", "both sides are short"),
        (0.3, 0.3, "neither", "would use 0.86 prefill and 0.86 decode workers well"),
    ],
)
def test_the_advice(prefill: float, decode: float, short: str, words: str) -> None:
    found = balance("m", 2, prefill, 2, decode)
    assert found.short == short
    assert words in found.advice


def test_one_worker_of_a_kind_is_not_given_away() -> None:
    assert "could become" not in balance("m", 1, 0.9, 1, 0.0).advice


def watched(here: Router, seconds: int) -> Balance:
    """Look for a while."""
    found = Balance(here)
    for at in range(4 * seconds):
        found.look(at / 4)
    return found


def test_a_prefill_worker_is_busy_while_a_prompt_is_charged_to_it() -> None:
    here = router_of(
        spec("p0", Role.PREFILL), spec("d0", Role.DECODE), transfer=True, disaggregate_above=1
    )
    assert watched(here, 1).shown()[0].prefill.busy == 0
    placed(here.submit(ask(1000), 0.0))
    [shown] = watched(here, 200).shown()
    assert shown.prefill.busy > 0.99
    assert shown.decode.busy == 0
    assert shown.short == "prefill"


def test_a_decode_worker_is_as_busy_as_its_cache_is_full() -> None:
    here = router_of(spec("p0", Role.PREFILL), spec("d0", Role.DECODE), transfer=True)
    here.fleet.set_gauges("d0", Gauges(0.0, kv_usage=0.9))
    assert watched(here, 200).shown()[0].decode.busy == pytest.approx(0.9, abs=0.01)


def test_fleets_without_both_sides_have_no_balance() -> None:
    assert watched(router_of(spec("g0"), spec("p0", Role.PREFILL)), 1).shown() == []
