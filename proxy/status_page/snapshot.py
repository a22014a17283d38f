"""How the router fares just now, as the status page shows it: written once a second."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import nlargest
from itertools import islice
from operator import add
from typing import TYPE_CHECKING, Any

from proxy.health.worker_state import state, why_not
from proxy.metrics.histogram import GAP_BOUNDS, TTFT_BOUNDS, Histogram
from proxy.metrics.scrape import VERSION
from proxy.status_page.window import EVERY_S, Window, quantile

if TYPE_CHECKING:
    from proxy.core.fleet.worker import Worker
    from proxy.core.tenants.tenants import Tenant
    from proxy.metrics.registry import Metrics

MOST_WORKERS = 500
MOST_TENANTS = 100
MOST_LINES = 12  # of latencies, of each kind
QUANTILES = (0.5, 0.99)
ANY = "all"
WELL = ("up", "draining", "drained")  # or as an operator wants it
KINDS = ("TTFT", "TPOT", "ITL")
SPENT = ("tokens", "limited")  # what is told of a tenant, since the start and of the last minute
Key = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LiveCounts:
    """What one process has counted: it may be one of several."""

    covers_s: float | None  # of the last minute
    counts: dict[Key, tuple[int, int]]  # since the start, and in the last minute
    histograms: dict[Key, list[int]]  # of the last minute, by what, pool, model and class
    clients: int
    queue: tuple[int, int]  # requests and bytes
    tenants: dict[str, tuple[int, int]]  # requests in flight and waiting, and of these that wait


class LiveState:
    """What is counted, and how much of it is of the last minute."""

    def __init__(self, metrics: Metrics, draining: Callable[[], bool] = lambda: False) -> None:
        self._metrics = metrics
        self._draining = draining
        self._window = Window()

    async def run(self, clock: Callable[[], float]) -> None:
        """Remember the last minute, for ever."""
        while True:
            self.copy(clock())
            await asyncio.sleep(EVERY_S)

    def copy(self, now: float) -> None:
        """Keep what is counted by now."""
        self._window.copy(now, dict(self._counts()), dict(self._histograms()))

    def figures(self, now: float) -> LiveCounts:
        """Return what this process has counted."""
        since, queue = self._window.since, self._metrics.router.queue
        return LiveCounts(
            None if since is None else min(now - since, 60.0),
            {key: (count, self._window.count(key, count)) for key, count in self._counts()},
            {key: self._window.of(key, each) for key, each in self._histograms()},
            self._metrics.client_connections,
            (len(queue), queue.bytes),
            {
                each.name: (each.ledger.running, each.waiting)
                for each in islice(self._metrics.router.tenants, MOST_TENANTS)
            },
        )

    def __call__(self, now: float, counted: Sequence[LiveCounts] = ()) -> dict[str, Any]:
        """Describe everything, with what several processes have counted if there are any."""
        counted = counted or [self.figures(now)]
        covers = [each.covers_s for each in counted if each.covers_s is not None]
        router = self._metrics.router
        workers = worst_first(router.fleet)
        tenants = list(islice(router.tenants, MOST_TENANTS))
        lines = list(latencies(counted))
        shown = busiest(lines)
        return {
            "version": VERSION,
            "policy": router.settings.policy,
            "draining": self._draining(),
            "covers_s": round(min(covers), 1) if covers else None,
            "clients": sum(each.clients for each in counted),
            "queue": {
                "requests": sum(each.queue[0] for each in counted),
                "limit": router.queue.most,
                "bytes": sum(each.queue[1] for each in counted),
            },
            "workers": [_worker(worker, now) for worker in workers],
            "pools": _pools(router.fleet),
            "more_workers": max(len(router.fleet) - MOST_WORKERS, 0),
            "answered": grown(counted, "answered")[0][1:],
            "decisions": grown(counted, "decision"),
            "handovers": grown(counted, "handover"),
            "retries": grown(counted, "retry"),
            "tenants": [self._tenant(each, counted) for each in tenants],
            "latencies": shown,
            "more_latencies": len(lines) - len(shown),
        }

    def _tenant(self, tenant: Tenant, counted: Sequence[LiveCounts]) -> dict[str, Any]:
        name = tenant.name
        now = [each.tenants.get(name, (0, 0)) for each in counted]
        of = {kind: [e.counts.get((kind, name), (0, 0)) for e in counted] for kind in SPENT}
        return {
            "name": name,
            "class": tenant.spec.rank.name.lower(),
            "requests": sum(running for running, _ in now),
            "waiting": sum(waiting for _, waiting in now),
            **{kind: [sum(numbers) for numbers in zip(*of[kind], strict=True)] for kind in SPENT},
        }

    def _counts(self) -> Iterator[tuple[Key, int]]:
        """Yield counters, each with what it is of and the name it is shown by."""
        metrics = self._metrics
        decisions: Counter[str] = Counter()
        for (_, reason), count in metrics.router.decisions.items():
            decisions[reason.value] += count
        retries: Counter[str] = Counter()
        for (_, why), count in metrics.retries.items():
            retries[why] += count
        for kind, table in (
            ("decision", decisions),
            ("handover", metrics.handovers.ends),
            ("retry", retries),
        ):
            for name, count in table.items():
                yield (kind, name), count
        yield ("answered", ""), sum(each.count for each in metrics.requests.values())
        for tenant in islice(metrics.router.tenants, MOST_TENANTS):
            totals = tenant.totals
            yield (SPENT[0], tenant.name), totals.prompt_tokens + totals.output_tokens
            yield (SPENT[1], tenant.name), sum(totals.limited.values())

    def _histograms(self) -> Iterator[tuple[Key, Histogram]]:
        """Yield histograms by what they measure, pool, model and class."""
        metrics = self._metrics
        for kind, table in ((KINDS[0], metrics.ttft), (KINDS[1], metrics.tpot)):
            for key, histogram in table.items():
                yield (kind, *key), histogram
        for (pool, size), histogram in metrics.gaps.items():
            yield (KINDS[2], str(pool), ANY, size), histogram


def grown(counted: Sequence[LiveCounts], kind: str) -> list[tuple[str, int, int]]:
    """List counters of a kind: name, since the start, in the last minute; most first."""
    total: Counter[str] = Counter()
    minute: Counter[str] = Counter()
    for each in counted:
        for (of, name, *_), (count, lately) in each.counts.items():
            if of == kind:
                total[name] += count
                minute[name] += lately
    found = [(name, count, minute[name]) for name, count in total.items()]
    return sorted(found, key=lambda each: (-each[2], -each[1], each[0]))


def latencies(counted: Sequence[LiveCounts]) -> Iterator[dict[str, Any]]:
    """Tell what the last minute's histograms come to."""
    found: dict[Key, list[int]] = {}
    for each in counted:
        for key, counts in each.histograms.items():
            before = found.get(key)
            found[key] = counts if before is None else [*map(add, before, counts)]
    for key, counts in sorted(found.items(), key=lambda each: KINDS.index(each[0][0])):
        if any(counts):
            kind, pool, model, size = key
            bounds = TTFT_BOUNDS if kind == KINDS[0] else GAP_BOUNDS
            p50, p99 = (quantile(share, counts, bounds) for share in QUANTILES)
            yield {
                "what": kind, "pool": pool, "model": model, "size": size,
                "count": sum(counts), "p50_s": p50, "p99_s": p99,
            }  # fmt: skip


def busiest(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return those of each kind that are of most requests, in the order they stood in."""
    shown: list[dict[str, Any]] = []
    for kind in KINDS:
        of_kind = [line for line in lines if line["what"] == kind]
        most = nlargest(MOST_LINES, range(len(of_kind)), key=lambda at: of_kind[at]["count"])
        shown += [of_kind[at] for at in sorted(most)]
    return shown


def worst_first(workers: Iterable[Worker]) -> list[Worker]:
    """Return as many as are shown: those in trouble, then the others, as they come."""
    troubled: list[Worker] = []
    well: list[Worker] = []
    for worker in workers:
        (well if is_well(worker) else troubled).append(worker)
    return [*troubled, *well][:MOST_WORKERS]


def is_well(worker: Worker) -> bool:
    """Whether nothing need be done about a worker."""
    return state(worker) in WELL


def _pools(workers: Iterable[Worker]) -> list[dict[str, Any]]:
    """Sum up all workers, those that are not shown included."""
    found: dict[str, Counter[str]] = {}
    for worker in workers:
        told = found.setdefault(worker.role.value, Counter(workers=0, up=0, requests=0))
        told["workers"] += 1
        told["up"] += state(worker) == "up"
        told["requests"] += worker.requests
    return [{"role": role, **found[role]} for role in sorted(found)]


def _worker(worker: Worker, now: float) -> dict[str, Any]:
    gauges = worker.gauges
    return {
        "name": worker.name,
        "role": worker.role.value,
        "model": worker.model,
        "state": state(worker),
        "well": is_well(worker),
        "why": why_not(worker, now),
        "breaker": worker.breaker.state(now).value,
        "requests": worker.requests,
        "most": worker.max_requests,
        "prefill_tokens": worker.prefill_tokens,
        "decode_tokens": worker.decode_tokens,
        "wait_s": round(worker.wait_s(now, for_long=True), 3),
        "running": None if gauges is None else gauges.running,
        "waiting": None if gauges is None else gauges.waiting,
        "kv_usage": None if gauges is None else round(gauges.kv_usage, 4),
    }
