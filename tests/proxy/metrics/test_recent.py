"""The ring of recent requests."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from proxy.core.fleet.leases import Decision, HandoverDecision
from proxy.core.model.types import Reason
from proxy.metrics.recent import MAX_TEXT, RecentRequests, RequestFilter
from tests.proxy.core.making import fleet_of, make_info, spec
from tests.proxy.metrics.finished import finished

WORKERS = {worker.name: worker for worker in fleet_of(spec("s0"), spec("s1")).roster}


def ring(kept: int = 10) -> RecentRequests:
    """Return a ring whose clock counts 1, 2, 3."""
    ticks = count(1)
    return RecentRequests(kept, clock=lambda: float(next(ticks)))


def add(recent: RecentRequests, name: str, worker: str | None = "s0", model: str = "tiny") -> None:
    info = make_info(output=20, model=model)
    info.id = name
    decision = Decision(WORKERS[worker], Reason.SHORT_POOL, 0.2) if worker else None
    reason = Reason.SHORT_POOL if decision else Reason.QUEUE_FULL
    status = 200 if decision else 429
    done = finished("completions", status, reason, 1.5, size="short", ttft_s=0.3, queue_s=0.1)
    recent.add(info, decision, done)


def test_entry_has_all_fields() -> None:
    recent = ring()
    add(recent, "r1")
    (entry,) = recent.newest(1)
    assert (entry.id, entry.time, entry.model, entry.route) == (
        "r1", 1.0, "tiny", "chat/completions",
    )  # fmt: skip
    assert (entry.worker, entry.reason, entry.status) == ("s0", Reason.SHORT_POOL, 200)
    assert (entry.body_bytes, entry.prompt_tokens, entry.output_tokens) == (400, 100, 20)
    assert (entry.predicted_ttft_s, entry.ttft_s) == (0.2, 0.3)
    assert (entry.duration_s, entry.queue_s) == (1.5, 0.1)
    assert (entry.cached_tokens, entry.cached_reported) == (0, False)


def test_cached_tokens_are_those_of_the_worker_that_prefills() -> None:
    recent = ring()
    decode, prefill = fleet_of(spec("s0"), spec("s1")).roster
    whole = Decision(decode, Reason.PREFIX, 0.7, cached_tokens=512)
    handover = HandoverDecision(prefill, 64, 700, prefill_s=0.4, transfer_s=0.2)
    handed = Decision(decode, Reason.HANDOVER, 0.7, cached_tokens=512, handover=handover)
    for reporting in (decode, prefill):
        for worker in (decode, prefill):
            worker.reports_prefixes = worker is reporting
        for decision in (whole, handed):
            recent.add(make_info(), decision, finished())
    found = [(entry.cached_tokens, entry.cached_reported) for entry in recent.newest(4)]
    assert found == [(64, True), (512, False), (64, False), (512, True)]


def test_newest_entries_come_first_and_oldest_are_dropped() -> None:
    recent = ring(kept=3)
    for number in range(5):
        add(recent, f"r{number}")
    assert [entry.id for entry in recent.newest(10)] == ["r4", "r3", "r2"]
    assert [entry.id for entry in recent.newest(2)] == ["r4", "r3"]
    assert len(recent) == 3


def test_filters_search_all_entries() -> None:
    recent = ring()
    add(recent, "a", worker="s1")
    add(recent, "b", worker=None)
    add(recent, "c", model="other")
    for _ in range(3):
        add(recent, "d")

    def found(limit: int, **wanted: Any) -> list[str]:
        return [entry.id for entry in recent.newest(limit, RequestFilter(**wanted))]

    assert found(1, worker="s1") == ["a"]
    assert found(1, reason=Reason.QUEUE_FULL) == ["b"]
    assert found(1, model="other") == ["c"]
    assert found(9, status=429) == ["b"]
    assert found(9, worker="s0", model="tiny") == ["d"] * 3
    assert not found(9, worker="s1", status=429)
    [refused] = recent.newest(1, RequestFilter(status=429))
    assert (refused.worker, refused.predicted_ttft_s) == (None, None)


def test_long_texts_are_cut() -> None:
    recent = ring()
    add(recent, "x" * 50_000, model="m" * 50_000)
    (entry,) = recent.newest(1)
    assert len(entry.id) == len(entry.model) == MAX_TEXT


@pytest.mark.parametrize(
    ("transferred_s", "whether", "verdict"),
    [(None, "", None), (0.25, "not_worth_it", "not_worth_it")],
)
def test_handover_entry_has_both_workers_times_and_verdict(
    transferred_s: float | None, whether: str, verdict: str | None
) -> None:
    recent = ring()
    handover = HandoverDecision(WORKERS["s1"], 0, 700, prefill_s=0.4, transfer_s=0.2)
    handover.transferred_s = transferred_s
    decision = Decision(WORKERS["s0"], Reason.HANDOVER, 0.7, handover=handover, verdict=whether)
    recent.add(make_info(), decision, finished(reason=Reason.HANDOVER, size="long"))
    (entry,) = recent.newest(1)
    assert (entry.prefill_worker, entry.worker, entry.size) == ("s1", "s0", "long")
    times = entry.prefill_s, entry.transfer_s, entry.transferred_s
    assert times == (0.4, 0.2, transferred_s)
    assert entry.handover == verdict
