"""Hand-overs of requests that are somebody's: both legs are the tenant's, and it pays once."""

from __future__ import annotations

import pytest

from proxy.core.limits import Limits
from proxy.core.tenants import TenantSpec
from tests.proxy.wire import scripts
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.kv import CACHED, Faults
from tests.proxy.wire.pairs import Pairs, ask, chat_body, expected, pairs, words
from tests.proxy.wire.test_tenants import KEY, OTHER, bearer, keep


async def guarded(start: Start) -> Pairs:
    """Start workers for two tenants, one of which is kept apart in caches."""
    here = await pairs(start, prefills=1, decodes=2)
    limits = Limits(concurrency=1, tokens_per_minute=10_000)
    keep(here.site, TenantSpec("a", limits=limits, salted=True), TenantSpec("b"), a=KEY, b=OTHER)
    return here


async def test_both_legs_are_cached_apart_and_bear_no_key(start: Start) -> None:
    here = await guarded(start)
    body = chat_body()
    assert words(await ask(here, body, bearer())) == expected(body)
    await here.settled()
    legs = here.site.served()
    assert here.kinds() == ["prefill", "decode"]
    salts = {call.json()["cache_salt"] for call in legs}
    assert len(salts) == 1
    assert all(call.all(b"authorization") == [] for call in legs)
    await ask(here, chat_body(), bearer(OTHER))
    assert all("cache_salt" not in call.json() for call in here.site.served()[2:])
    assert salts != {""}


@pytest.mark.parametrize("failing", [(), ("prefill",), ("decode",), ("prefill", "decode")])
async def test_it_pays_once_and_frees_its_place(start: Start, failing: tuple[str, ...]) -> None:
    here = await guarded(start)
    for role, how in zip(failing, (scripts.reset, scripts.error(500)), strict=False):
        here.kv.wrong(role, Faults(during=how))  # of two that drop it no third would be asked
    body = chat_body()
    answer = await ask(here, body, bearer())
    assert words(answer) == expected(body)
    await here.settled()
    tenant = here.site.tenant()
    assert tenant.ledger.running == 0
    again = await ask(here, chat_body(), bearer())  # one at a time is what it may
    await here.settled()
    usages = [each.json()["usage"] for each in (answer, again)]
    totals = tenant.totals
    assert totals.prompt_tokens == sum(usage["prompt_tokens"] for usage in usages)
    assert totals.output_tokens == 8
    assert usages[1]["prompt_tokens_details"] == {"cached_tokens": CACHED}


@pytest.mark.parametrize("asks", [False, True])
async def test_a_stream_is_paid_for_by_its_usage(start: Start, asks: bool) -> None:
    here = await guarded(start)
    fields = {"stream_options": {"include_usage": True}} if asks else {}
    answer = await ask(here, chat_body(stream=True, **fields), bearer())
    await here.settled()
    assert here.kinds() == ["prefill", "decode"]
    assert answer.body.endswith(scripts.DONE)
    assert (b'"usage"' in answer.body) is asks
    tenant = here.site.tenant()
    assert tenant.totals.output_tokens == 4
