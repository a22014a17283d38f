"""Metrics of tenants."""

from __future__ import annotations

from hashlib import sha256

from proxy.core.tenants.limits import Limits
from proxy.core.tenants.tenants import Rank, Tenant, Tenants, TenantSpec
from proxy.metrics import tenant_counts
from proxy.metrics.exposition import Family
from proxy.metrics.tenant_counts import MAX_TENANTS, TenantCounts
from tests.proxy.metrics.scraped import shown


def counts_of(*specs: TenantSpec) -> tuple[Tenants, TenantCounts]:
    tenants = Tenants()
    tenants.replace(specs, {sha256(spec.name.encode()).digest(): spec.name for spec in specs})
    return tenants, TenantCounts(tenants)


def tenant_named(tenants: Tenants, name: str) -> Tenant:
    found = tenants.get(name)
    assert found is not None
    return found


def test_no_tenants_show_no_metrics() -> None:
    assert shown(TenantCounts(Tenants())) == {}


def test_requests_are_counted_by_tenant_class_and_status() -> None:
    tenants, counts = counts_of(TenantSpec("a", Rank.INTERACTIVE), TenantSpec("b"))
    for status in (200, 200, 429):
        counts.count(tenant_named(tenants, "a"), status, 0.3 if status == 200 else None, 0.02)
    found = shown(counts)
    labels = 'tenant="a",class="interactive"'
    assert found[f'proxy_tenant_requests_total{{{labels},status="200"}}'] == 2
    assert found[f'proxy_tenant_requests_total{{{labels},status="429"}}'] == 1
    assert found[f"proxy_tenant_ttft_seconds_count{{{labels}}}"] == 2
    assert found[f"proxy_tenant_queue_wait_seconds_count{{{labels}}}"] == 3
    assert not [name for name in found if '"b"' in name and "requests_total" in name]


def test_tokens_limits_and_running_requests_are_shown() -> None:
    tenants, counts = counts_of(TenantSpec("a", limits=Limits(concurrency=1)))
    a = tenant_named(tenants, "a")
    a.ledger.enter(0.0, 10, 1)
    a.waiting = 3
    a.totals.prompt_tokens, a.totals.output_tokens = 70, 30
    a.totals.limited["concurrency"] = 2
    found = shown(counts)
    assert found['proxy_tenant_tokens_total{tenant="a",kind="prompt"}'] == 70
    assert found['proxy_tenant_tokens_total{tenant="a",kind="output"}'] == 30
    assert found['proxy_tenant_limited_total{tenant="a",limit="concurrency"}'] == 2
    assert found['proxy_tenant_inflight_requests{tenant="a"}'] == 1
    assert found['proxy_tenant_queue_requests{tenant="a"}'] == 3


def test_counters_outlive_a_removed_tenant() -> None:
    tenants, counts = counts_of(TenantSpec("a"))
    a = tenant_named(tenants, "a")
    a.totals.prompt_tokens = 70
    counts.count(a, 200, 0.1, 0.0)
    tenants.replace([], {})
    found = shown(counts)
    assert found['proxy_tenant_tokens_total{tenant="a",kind="prompt"}'] == 70
    assert 'proxy_tenant_inflight_requests{tenant="a"}' not in found
    assert any(name.startswith("proxy_tenant_requests_total") for name in found)


def test_tenants_above_the_limit_are_counted_as_other() -> None:
    tenants, counts = counts_of(*(TenantSpec(f"t{number}") for number in range(MAX_TENANTS + 50)))
    for tenant in tenants:
        tenant.totals.prompt_tokens = tenant.waiting = 1
        counts.count(tenant, 200, 0.1, 0.0)
    found = shown(counts)
    assert found['proxy_tenant_queue_requests{tenant="other"}'] == 50
    assert found['proxy_tenant_tokens_total{tenant="other",kind="prompt"}'] == 50
    assert sum(name.startswith("proxy_tenant_queue_requests") for name in found) == MAX_TENANTS + 1


def test_labels_contain_no_text_of_clients() -> None:
    families = [item for item in vars(tenant_counts).values() if isinstance(item, Family)]
    assert {label for family in families for label in family.labels} == {
        "tenant", "class", "status", "kind", "limit",
    }  # fmt: skip
