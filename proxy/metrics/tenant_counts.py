"""Counters of tenants and their metrics.

Tenant names come from the operator, so their number is bounded; beyond `MAX_TENANTS` tenants share
the label `other`. A removed tenant keeps its label.
"""

from __future__ import annotations

from collections import Counter

from proxy.core.tenants.tenants import Tenant, Tenants
from proxy.metrics.exposition import OTHER, MetricsPage, counter, gauge, histogram
from proxy.metrics.histogram import TTFT_BOUNDS, WAIT_BOUNDS, Histograms

MAX_TENANTS = 100

REQUESTS = counter(
    "proxy_tenant_requests",
    "Finished requests of a tenant, by status.",
    ("tenant", "class", "status"),
)
TOKENS = counter(
    "proxy_tenant_tokens",
    "Tokens of a tenant's prompts and responses, counted by workers or estimated.",
    ("tenant", "kind"),
)
LIMITED = counter(
    "proxy_tenant_limited", "Requests that reached a limit of their tenant.", ("tenant", "limit")
)
INFLIGHT = gauge(
    "proxy_tenant_inflight_requests",
    "Requests of a tenant in flight, including queued requests.",
    ("tenant",),
)
WAITING = gauge("proxy_tenant_queue_requests", "Requests of a tenant in the queue.", ("tenant",))
TTFT = histogram(
    "proxy_tenant_ttft_seconds",
    "Time from a request's arrival to its first token, by tenant.",
    ("tenant", "class"),
)
WAITS = histogram(
    "proxy_tenant_queue_wait_seconds",
    "Time of a tenant's requests in the router's queue.",
    ("tenant", "class"),
)
Key = tuple[str, str]  # tenant and class


class TenantCounts:
    """Counters that outlive their tenants, because counters must not decrease."""

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants
        self._names: set[str] = set()
        self._requests: Counter[tuple[str, str, int]] = Counter()
        self._ttft: Histograms[Key] = Histograms(TTFT_BOUNDS)
        self._waits: Histograms[Key] = Histograms(WAIT_BOUNDS)

    def name(self, name: str) -> str:
        """Return a tenant's name as all families show it."""
        if name in self._names:
            return name
        if len(self._names) >= MAX_TENANTS:
            return OTHER
        self._names.add(name)
        return name

    def count(self, tenant: Tenant, status: int, ttft_s: float | None, queue_s: float) -> None:
        name, rank = self.name(tenant.name), tenant.spec.rank.name.lower()
        self._requests[name, rank, status] += 1
        self._waits[name, rank].observe(queue_s)
        ttft = self._ttft[name, rank]  # also without an observation, as a divisor of shares
        if ttft_s is not None:
            ttft.observe(ttft_s)

    def show(self, page: MetricsPage) -> None:
        if not self._tenants.totals:
            return  # no tenant was ever configured
        running: Counter[str] = Counter()
        waiting: Counter[str] = Counter()
        for tenant in self._tenants:
            name = self.name(tenant.name)
            running[name] += tenant.ledger.running
            waiting[name] += tenant.waiting
        tokens: Counter[tuple[str, str]] = Counter()
        limited: Counter[tuple[str, str]] = Counter()
        for tenant_name, totals in self._tenants.totals.items():
            name = self.name(tenant_name)
            tokens[name, "prompt"] += totals.prompt_tokens
            tokens[name, "output"] += totals.output_tokens
            for limit, count in totals.limited.items():
                limited[name, limit] += count
        rows = (((n, rank, str(s)), count) for (n, rank, s), count in self._requests.items())
        page.values(REQUESTS, rows)
        page.values(TOKENS, tokens.items())
        page.values(LIMITED, limited.items())
        page.values(INFLIGHT, (((name,), count) for name, count in running.items()))
        page.values(WAITING, (((name,), count) for name, count in waiting.items()))
        page.histograms(TTFT, self._ttft.items())
        page.histograms(WAITS, self._waits.items())
