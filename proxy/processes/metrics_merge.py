"""Merges the metrics pages of several processes.

Counters and histograms are summed, with those of exited processes: a decrease would look like a
reset. Gauges are summed if each process has its own part; otherwise the leader's value is used.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from math import inf

from proxy.core.model.types import NONE
from proxy.metrics.exposition import OPENMETRICS, OTHER, TEXT, number
from proxy.metrics.handovers import ANY

SUMMED_GAUGES = frozenset(
    [
        "proxy_batch_lines_in_flight",
        "proxy_batches",
        "proxy_client_connections",
        "proxy_processes",
        "proxy_queue_bytes",
        "proxy_queue_requests",
        "proxy_tenant_inflight_requests",
        "proxy_tenant_queue_requests",
        "proxy_upstream_connections",
        "proxy_worker_decode_tokens",
        "proxy_worker_held_prompts",
        "proxy_worker_inflight_requests",
        "proxy_worker_kv_tokens",
        "proxy_worker_prefill_tokens",
        "process_max_fds",
        "process_open_fds",
        "process_resident_memory_bytes",
        "process_virtual_memory_bytes",
    ]
)
# 1 if it is 1 in any process.
ANY_PROCESS = frozenset(["proxy_batches_paused"])
# The value is in a label, where processes may differ for a moment.
LEADER_ONLY = frozenset(["proxy_worker_breaker_state"])
# Counters that are the same in every process: workers report them or processes share them.
EQUAL_COUNTERS = frozenset(
    ["proxy_transfer_bytes_total", "proxy_breaker_openings_total", "proxy_pool_panics_total"]
)

WORKER_UP = "proxy_worker_up"  # one series per worker
PLACEHOLDERS = frozenset([NONE, OTHER, ANY])
# A quote in a label value is escaped, so this does not match within a value.
NAMED_WORKER = re.compile(r'[{,](?:worker|prefill|decode)="((?:[^"\\]|\\.)*)"')
BUCKET_BOUND = re.compile(r'(?:^|,)le="[^"]*"}$|}$')


@dataclass(slots=True)
class MergedFamily:
    """A metric with its series in their original order."""

    kind: str
    help: str
    series: dict[str, float] = field(default_factory=dict)


Page = dict[str, MergedFamily]
NO_FAMILY = MergedFamily("untyped", "")


def read(text: str) -> Page:
    """Parse a page in Prometheus's format, as written by `exposition`."""
    page: Page = {}
    family = MergedFamily("untyped", "")
    for line in text.split("\n"):  # names may contain other line separators
        if line.startswith("# HELP "):
            _, _, name, explained = line.split(" ", 3)
            family = page[name] = MergedFamily("untyped", explained)
        elif line.startswith("# TYPE "):
            family.kind = line.rsplit(" ", 1)[1]
        elif line and not line.startswith("#"):
            series, _, value = line.rpartition(" ")
            family.series[series] = float(value)
    return page


def add_up(pages: Iterable[Page]) -> Page:
    """Return the sum of several pages; the leader's page comes first."""
    total: Page = {}
    for name, family in chain.from_iterable(page.items() for page in pages):
        if name not in total:
            total[name] = MergedFamily(family.kind, family.help, {**family.series})
        elif name not in LEADER_ONLY:
            _add_series(total[name].series, name, family)
    return total


def _add_series(total: dict[str, float], name: str, family: MergedFamily) -> None:
    is_sum = family.kind != "gauge" or name in SUMMED_GAUGES
    for series, value in family.series.items():
        if series not in total:
            total[series] = value
        elif name in ANY_PROCESS:
            total[series] = max(total[series], value)
        elif is_sum and name not in EQUAL_COUNTERS:
            total[series] += value


def own_counts(page: Page) -> Page:
    """Return a process's counters and histograms, which stay in the sums after its exit."""
    return {
        name: family
        for name, family in page.items()
        if family.kind != "gauge" and name not in EQUAL_COUNTERS
    }


def series_missing_in(page: Page, other: Page) -> Page:
    left: Page = {}
    for name, family in page.items():
        other_series = other.get(name, NO_FAMILY).series
        if not family.series.keys() <= other_series.keys():
            series = {key: value for key, value in family.series.items() if key not in other_series}
            left[name] = MergedFamily(family.kind, family.help, series)
    return left


def lost_counts(before: Page, now: Page) -> Page:
    """Return the series that a process dropped or restarted since its last page.

    A histogram is returned as a whole, so that its buckets stay ordered. Its `_sum` is ignored,
    because it may decrease by a rounding error.
    """
    lost: Page = {}
    for name, family in before.items():
        current, total = now.get(name, NO_FAMILY).series, f"{name}_sum"
        fell = {
            _labels(key)
            for key, value in family.series.items()
            if current.get(key, -inf) < value and not key.startswith(total)
        }
        if fell:
            series = {key: n for key, n in family.series.items() if _labels(key) in fell}
            lost[name] = MergedFamily(family.kind, family.help, series)
    return lost


def _labels(series: str) -> str:
    return BUCKET_BOUND.sub("", series.partition("{")[2])


def without_removed_workers(past: Page, present: Page) -> Page:
    """Return the past without series of removed workers.

    Series that a process still shows stay: their sum must not decrease. Without a known worker, as
    after a restart, all series stay.
    """
    workers = present.get(WORKER_UP, NO_FAMILY).series
    fleet = {name for series in workers for name in NAMED_WORKER.findall(series)}
    if not fleet:
        return past
    names = fleet | PLACEHOLDERS
    left: Page = {}
    for name, family in past.items():
        shown = present.get(name, NO_FAMILY).series
        series = {
            key: value
            for key, value in family.series.items()
            if key in shown or names.issuperset(NAMED_WORKER.findall(key))
        }
        left[name] = MergedFamily(family.kind, family.help, series)
    return left


def write(page: Page, *, openmetrics: bool) -> tuple[bytes, str]:
    """Return a page in either format, and its content type."""
    lines: list[str] = []
    for name, family in page.items():
        counts = family.kind == "counter" and openmetrics
        announced = name.removesuffix("_total") if counts else name
        lines.append(f"# HELP {announced} {family.help}")
        lines.append(f"# TYPE {announced} {family.kind}")
        lines += [f"{series} {_number(value)}" for series, value in family.series.items()]
    if openmetrics:
        lines.append("# EOF")
    lines.append("")
    return "\n".join(lines).encode(), OPENMETRICS if openmetrics else TEXT


def _number(value: float) -> str:
    return number(int(value) if float(value).is_integer() else value)
