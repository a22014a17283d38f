"""Rates that each tenant teaches for itself, and what tenants have in common."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.core.learned.bytes_per_token import LearnedSizes
from proxy.core.learned.tenant_prior import MAX_PRIOR_TENANTS
from proxy.core.model.types import Outcome, RequestInfo, Usage
from proxy.core.request.sizing import MAX_RATES_PER_TENANT, MIN_SAMPLES_LEARNED, Sizer
from proxy.core.tenants.limits import Limits
from proxy.core.tenants.tenants import Tenant, TenantSpec
from tests.proxy.core.making import chat, placed, refused, route, router_of, spec

CHAT = "chat/completions"
TEXT = 4000
TEMPLATE = 7


def tenant(name: str, **limits: int) -> Tenant:
    return Tenant(TenantSpec(name, limits=Limits(**limits)))


def size(sizer: Sizer, who: Tenant, model: str = "m", **fields: Any) -> RequestInfo:
    found = sizer.ask(route(), model, chat("x" * TEXT, **fields), TEXT, "id", who)
    found.tenant = who
    return found


def taught(sizer: Sizer, who: Tenant, per_token: float, times: int = 60, output: int = 50) -> None:
    """Have a tenant send prompts of so many bytes per token."""
    for _ in range(times):
        tokens = int(TEXT / per_token) + TEMPLATE
        sizer.learn(size(sizer, who), Usage(tokens, output))


def estimate(sizer: Sizer, who: Tenant) -> int:
    return size(sizer, who).prompt_tokens - TEMPLATE


def test_a_tenants_limit_of_tokens_a_minute_is_its_own() -> None:
    """60,000 a minute are sixty prompts of 1,000 tokens, whatever another tenant sends."""
    router = router_of(spec("w"))
    odd, usual = tenant("odd"), tenant("usual", tokens_per_minute=60_000)
    taught(router.sizer, usual, 4.0, 20, 1)
    taught(router.sizer, odd, 0.9, 60, 4000)
    for _ in range(55):
        ask = size(router.sizer, usual, "m", max_tokens=1)
        lease = placed(router.submit(ask, 0.0))
        router.leases.finish(lease, 0.0, Outcome.DONE, Usage(1000, 1))
    asks = [size(router.sizer, usual, "m", max_tokens=1) for _ in range(20)]
    answers = [router.submit(ask, 0.0) for ask in asks]
    assert refused(answers[-1]).status == 429


def test_tenants_share_what_most_of_them_have() -> None:
    sizer = Sizer()
    for number, per_token in enumerate([2.0, 2.1, 2.2, 0.6]):
        taught(sizer, tenant(f"t{number}"), per_token)
    assert estimate(sizer, tenant("new")) == pytest.approx(TEXT / 2.15, rel=0.1)


@pytest.mark.parametrize("honest", range(6))
def test_no_single_tenant_decides_what_is_common(honest: int) -> None:
    """With whatever it sends, what others begin with stays within what others teach."""
    for per_token in (0.5, 16.0):
        sizer = Sizer()
        for number in range(honest):
            taught(sizer, tenant(f"t{number}"), 3.6 + 0.1 * number, 20)
        taught(sizer, tenant("odd"), per_token, 300)
        found = estimate(sizer, tenant("new"))
        assert TEXT / 4.2 <= found <= TEXT / 3.4


def test_a_tenants_first_answers_all_teach() -> None:
    """However many answers of other tenants end just before."""
    router, flood, small = router_of(spec("w")), tenant("flood"), tenant("small")
    now = 0.0
    for number in range(40 * MIN_SAMPLES_LEARNED):
        now += 0.001
        who = small if number % 20 == 7 else flood
        asked = size(router.sizer, who, stream=True)
        lease = placed(router.submit(asked, now))
        router.leases.first_token(lease, now)
        router.leases.finish(lease, now + 0.0005, Outcome.DONE, Usage(TEXT // 2, 50))
    assert small.learnt["m", CHAT].seen >= MIN_SAMPLES_LEARNED
    assert flood.learnt["m", CHAT].seen < 20 * MIN_SAMPLES_LEARNED, "of many, some will do"


def test_what_is_kept_is_bounded_and_no_tenant_takes_anothers_room() -> None:
    sizer, many, few = Sizer(), tenant("many"), tenant("few")
    taught(sizer, few, 2.0)
    for number in range(3 * MAX_RATES_PER_TENANT):
        for model in (f"m{number}", "often"):
            sizer.learn(size(sizer, many, model), Usage(2000, 50))
    assert len(many.learnt) == MAX_RATES_PER_TENANT
    assert ("often", CHAT) in many.learnt
    assert few.learnt["m", CHAT].seen == 60
    for number in range(3 * MAX_PRIOR_TENANTS):
        taught(sizer, tenant(f"t{number}"), 2.0, 1)
    assert len(sizer.prior("m", CHAT)._tenants) == MAX_PRIOR_TENANTS


def test_the_median_is_made_anew_seldom() -> None:
    sizer, made = Sizer(), 0
    prior, before = sizer.prior("m", CHAT), None
    for number in range(2000):
        taught(sizer, tenant(f"t{number % 20}"), 2.0, 1)
        common = prior.common()
        made += common is not before
        before = common
    assert made < 100


def test_the_tenant_that_was_silent_longest_goes() -> None:
    prior, rates = Sizer().prior("m", CHAT), LearnedSizes()
    for number in (*range(MAX_PRIOR_TENANTS), 0, MAX_PRIOR_TENANTS):
        prior.update(f"t{number}", rates)
    assert [*prior._tenants] == [
        f"t{number}" for number in (*range(2, MAX_PRIOR_TENANTS), 0, MAX_PRIOR_TENANTS)
    ]
