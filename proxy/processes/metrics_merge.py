"""Many processes' metrics as one page.

Counters and histograms add up, those of processes that are no more too: a sum must never fall, or
whoever reads it takes that for a restart and the whole of it for new. Gauges add where each process
has a part; what all of them know alike is taken from the leader.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf

from proxy.core.model.types import NONE
from proxy.metrics.exposition import OPENMETRICS, OTHER, TEXT, number
from proxy.metrics.handovers import ANY

# Each process has its own part of these.
ADDED = frozenset(
    [
        "proxy_batch_lines_in_flight",
        "proxy_batches",
        "proxy_batches_paused",
        "proxy_client_connections",
        "proxy_processes",
        "proxy_queue_bytes",
        "proxy_queue_requests",
        "proxy_tenant_inflight_requests",
        "proxy_tenant_queue_requests",
        "proxy_upstream_connections",
        "process_max_fds",
        "process_open_fds",
        "process_resident_memory_bytes",
        "process_virtual_memory_bytes",
    ]
)
# Told in a label, and each process may be about to hear of another: one of them is shown.
LEADERS = frozenset(["proxy_worker_breaker_state"])
# Counters that are no process's own: workers tell them, to everybody; or processes one another.
ALIKE = frozenset(
    ["proxy_transfer_bytes_total", "proxy_breaker_openings_total", "proxy_pool_panics_total"]
)

FLEET = "proxy_worker_up"  # has a series for each worker that there is
NOBODYS = frozenset([NONE, OTHER, ANY])
# A quote in a label's value is escaped, so this is never part of one.
NAMED = re.compile(r'[{,](?:worker|prefill|decode)="((?:[^"\\]|\\.)*)"')
BOUND = re.compile(r'(?:^|,)le="[^"]*"}$|}$')


@dataclass(slots=True)
class MergedFamily:
    """A metric, its series in the order they were told."""

    kind: str
    help: str
    series: dict[str, float] = field(default_factory=dict)


Page = dict[str, MergedFamily]
NOTHING = MergedFamily("untyped", "")


def read(text: str) -> Page:
    """Read a page in Prometheus's format, as we write it."""
    page: Page = {}
    family = MergedFamily("untyped", "")
    for line in text.split("\n"):  # names may have what else ends lines
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
    """Make one page of many; the leader's comes first."""
    total: Page = {}
    for page in pages:
        for name, family in page.items():
            if name in LEADERS and name in total:
                continue
            found = total.setdefault(name, MergedFamily(family.kind, family.help))
            adds = family.kind != "gauge" or name in ADDED
            for series, value in family.series.items():
                if series not in found.series:
                    found.series[series] = value
                elif adds and name not in ALIKE:
                    found.series[series] += value
    return total


def lasting(page: Page) -> Page:
    """Return what counts on when a process is gone."""
    return {
        name: family
        for name, family in page.items()
        if family.kind != "gauge" and name not in ALIKE
    }


def less(page: Page, other: Page) -> Page:
    """Leave out series that another page has too."""
    left: Page = {}
    for name, family in page.items():
        told = other.get(name, NOTHING).series
        if not family.series.keys() <= told.keys():
            series = {each: value for each, value in family.series.items() if each not in told}
            left[name] = MergedFamily(family.kind, family.help, series)
    return left


def dropped(before: Page, now: Page) -> Page:
    """Return what a process has dropped, be it that it has begun to count that anew.

    Of a histogram all series, or its buckets would not be in order. Its sum tells nothing: it may
    fall by a rounding error.
    """
    gone: Page = {}
    for name, family in before.items():
        told, total = now.get(name, NOTHING).series, f"{name}_sum"
        fell = {
            _labels(each)
            for each, value in family.series.items()
            if told.get(each, -inf) < value and not each.startswith(total)
        }
        if fell:
            series = {each: n for each, n in family.series.items() if _labels(each) in fell}
            gone[name] = MergedFamily(family.kind, family.help, series)
    return gone


def _labels(series: str) -> str:
    """Return what the parts of one histogram have in common."""
    return BOUND.sub("", series.partition("{")[2])


def without_strangers(past: Page, present: Page) -> Page:
    """Leave out series of workers that are gone, unless a process that is there has them too.

    Those would fall, and not end. Where no worker is known, as may be while all begin anew, all
    stay.
    """
    workers = present.get(FLEET, NOTHING).series
    fleet = {name for series in workers for name in NAMED.findall(series)}
    if not fleet:
        return past
    known = fleet | NOBODYS
    left: Page = {}
    for name, family in past.items():
        shown = present.get(name, NOTHING).series
        series = {
            each: value
            for each, value in family.series.items()
            if each in shown or known.issuperset(NAMED.findall(each))
        }
        left[name] = MergedFamily(family.kind, family.help, series)
    return left


def write(page: Page, *, openmetrics: bool) -> tuple[bytes, str]:
    """Write a page, in either format; return it with its content type."""
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
