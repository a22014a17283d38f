"""Rates learned per tenant, and the common prior of all tenants."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.core.learned.bytes_per_token import LearnedSizes
from proxy.core.learned.tenant_prior import MAX_PRIOR_TENANTS
from proxy.core.model.types import Outcome, RequestInfo, Usage
from proxy.core.request.sizing import MAX_RATES_PER_TENANT, MIN_SAMPLES_LEARNED, Sizer
from proxy.core.tenants.tenants import Tenant
from tests.proxy.core.making import chat, placed, refused, route, router_of, serve, spec, tenant

CHAT = "chat/completions"
TEXT = 4000
TEMPLATE = 7


def size(sizer: Sizer, sender: Tenant, model: str = "m", **fields: Any) -> RequestInfo:
    found = sizer.estimate(route(), model, chat("x" * TEXT, **fields), TEXT, "id", sender)
    found.tenant = sender
    return found


def teach(
    sizer: Sizer, sender: Tenant, per_token: float, times: int = 60, output: int = 50
) -> None:
    """Teach a tenant's prompts of so many bytes per token."""
    for _ in range(times):
        tokens = int(TEXT / per_token) + TEMPLATE
        sizer.learn(size(sizer, sender), Usage(tokens, output))


def estimate(sizer: Sizer, sender: Tenant) -> int:
    return size(sizer, sender).prompt_tokens - TEMPLATE


def test_token_limit_is_independent_of_other_tenants_rates() -> None:
    """60,000 a minute are sixty prompts of 1,000 tokens, whatever other tenants send."""
    router = router_of(spec("w"))
    odd, usual = tenant("odd"), tenant("usual", tokens_per_minute=60_000)
    teach(router.sizer, usual, 4.0, 20, 1)
    teach(router.sizer, odd, 0.9, 60, 4000)
    for _ in range(55):
        serve(router, size(router.sizer, usual, max_tokens=1), usage=Usage(1000, 1))
    asks = [size(router.sizer, usual, "m", max_tokens=1) for _ in range(20)]
    answers = [router.submit(info, 0.0) for info in asks]
    assert refused(answers[-1]).status == 429


def test_new_tenant_starts_at_the_median_rate() -> None:
    sizer = Sizer()
    for number, per_token in enumerate([2.0, 2.1, 2.2, 0.6]):
        teach(sizer, tenant(f"t{number}"), per_token)
    assert estimate(sizer, tenant("new")) == pytest.approx(TEXT / 2.15, rel=0.1)


@pytest.mark.parametrize("usual_tenants", range(6))
def test_one_tenant_cannot_move_the_common_rate(usual_tenants: int) -> None:
    """The start value of a new tenant stays within what the other tenants teach."""
    for per_token in (0.5, 16.0):
        sizer = Sizer()
        for number in range(usual_tenants):
            teach(sizer, tenant(f"t{number}"), 3.6 + 0.1 * number, 20)
        teach(sizer, tenant("odd"), per_token, 300)
        found = estimate(sizer, tenant("new"))
        assert TEXT / 4.2 <= found <= TEXT / 3.4


def test_first_answers_of_a_tenant_all_teach() -> None:
    router, flood, small = router_of(spec("w")), tenant("flood"), tenant("small")
    now = 0.0
    for number in range(40 * MIN_SAMPLES_LEARNED):
        now += 0.001
        sender = small if number % 20 == 7 else flood
        request = size(router.sizer, sender, stream=True)
        lease = placed(router.submit(request, now))
        router.leases.record_first_token(lease, now)
        router.leases.finish(lease, now + 0.0005, Outcome.DONE, Usage(TEXT // 2, 50))
    assert small.learned["m", CHAT].seen >= MIN_SAMPLES_LEARNED
    assert flood.learned["m", CHAT].seen < 20 * MIN_SAMPLES_LEARNED, "many answers are sampled"


def test_learnt_rates_are_bounded_per_tenant() -> None:
    sizer, many, few = Sizer(), tenant("many"), tenant("few")
    teach(sizer, few, 2.0)
    for number in range(3 * MAX_RATES_PER_TENANT):
        for model in (f"m{number}", "often"):
            sizer.learn(size(sizer, many, model), Usage(2000, 50))
    assert len(many.learned) == MAX_RATES_PER_TENANT
    assert ("often", CHAT) in many.learned
    assert few.learned["m", CHAT].seen == 60
    for number in range(3 * MAX_PRIOR_TENANTS):
        teach(sizer, tenant(f"t{number}"), 2.0, 1)
    assert len(sizer.prior("m", CHAT)._tenants) == MAX_PRIOR_TENANTS


def test_median_is_recomputed_rarely() -> None:
    sizer, recomputed = Sizer(), 0
    prior, before = sizer.prior("m", CHAT), None
    for number in range(2000):
        teach(sizer, tenant(f"t{number % 20}"), 2.0, 1)
        common = prior.median()
        recomputed += common is not before
        before = common
    assert recomputed < 100


def test_the_tenant_that_was_silent_longest_goes() -> None:
    prior, rates = Sizer().prior("m", CHAT), LearnedSizes()
    for number in (*range(MAX_PRIOR_TENANTS), 0, MAX_PRIOR_TENANTS):
        prior.update(f"t{number}", rates)
    assert [*prior._tenants] == [
        f"t{number}" for number in (*range(2, MAX_PRIOR_TENANTS), 0, MAX_PRIOR_TENANTS)
    ]
