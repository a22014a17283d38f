"""The metrics of all processes together."""

from __future__ import annotations

from proxy.control.metrics import Metrics
from proxy.core.types import Reason
from proxy.processes.totals import Totals
from tests.proxy.core.making import router_of, spec
from tests.proxy.processes.test_pages import page


def summed(totals: Totals, found: dict[int, str]) -> dict[str, str]:
    """Add up what was said, and read the lines."""
    written, _ = totals.page(found, serving=2, restarts=4, openmetrics=False)
    lines = written.decode().splitlines()
    return dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))


def test_it_says_how_many_serve_and_began_again() -> None:
    found = summed(Totals(), {0: page({"a": 1}, 1, 1)})
    assert float(found["proxy_processes"]) == 2
    assert float(found["proxy_process_restarts_total"]) == 4


def test_one_that_is_late_counts_as_it_did_last() -> None:
    totals = Totals()
    summed(totals, {0: page({"a": 1}, 1, 1), 1: page({"a": 2}, 1, 2)})
    found = summed(totals, {0: page({"a": 5}, 1, 1)})
    assert float(found['proxy_requests_total{worker="a"}']) == 7
    assert float(found["proxy_client_connections"]) == 3


def test_one_that_is_no_more_leaves_its_counts_and_no_gauges() -> None:
    totals = Totals()
    summed(totals, {0: page({"a": 1}, 1, 1), 1: page({"a": 2}, 1, 2)})
    totals.gone(1)
    found = summed(totals, {0: page({"a": 1}, 1, 1)})
    assert float(found['proxy_requests_total{worker="a"}']) == 3
    assert float(found["proxy_client_connections"]) == 1


def process(*workers: str) -> Metrics:
    """Make what a process counts that knows these workers."""
    return Metrics(router_of(*map(spec, workers)))


def serve(counts: Metrics, worker: str, times: int = 1) -> None:
    """Count requests, a retry, a client that left and a bar of that worker's."""
    for _ in range(times):
        counts.request_done("chat/completions", "m", worker, Reason.GENERAL_POOL, 200, 0.1, 1, 0)
    counts.retried(worker, "reset")
    counts.unseen.gone(worker, "general", "m", "short", 1.0, stream=True)
    counts.handovers.barred(worker, "any")


def told(counts: Metrics) -> str:
    """Write its page."""
    return counts.render()[0].decode()


def test_pods_that_come_and_go_leave_no_series_once_who_served_them_is_dead_too() -> None:
    totals, before = Totals(), process("pod-1")
    for worker in ("pod-1", "none", "other"):
        serve(before, worker)
    summed(totals, {0: told(before), 1: told(process("pod-1"))})
    totals.gone(0)
    stays = summed(totals, {1: told(process("pod-1"))})
    assert sum("pod-1" in series for series in stays) > 10
    gone = summed(totals, {1: told(process("pod-2"))})
    assert not [series for series in gone if "pod-1" in series]
    for name in ('worker="none"', 'worker="other"'):
        kept = [series for series in gone if name in series]
        assert len(kept) > 10
        assert kept == [series for series in stays if name in series]
    assert float(gone['proxy_ttft_seconds_count{pool="none",model="m",class="none"}']) == 3


def test_a_worker_that_left_keeps_what_the_dead_counted_while_another_process_shows_it() -> None:
    """The sum would fall, which is a restart to whoever reads it."""
    totals, dead, alive = Totals(), process("pod-1"), process("pod-1")
    serve(dead, "pod-1", 100)
    serve(alive, "pod-1", 50)
    summed(totals, {0: told(dead), 1: told(alive)})
    totals.gone(0)
    alive.router.fleet.remove("pod-1")
    alive.router.fleet.add(spec("pod-2"))
    found = summed(totals, {1: told(alive)})
    counted = [float(n) for s, n in found.items() if "requests_total" in s and "pod-1" in s]
    assert counted == [150]


def test_nothing_is_forgotten_while_nobody_knows_a_worker() -> None:
    totals, dead = Totals(), process("pod-1")
    serve(dead, "pod-1")
    summed(totals, {0: told(dead)})
    totals.gone(0)
    summed(totals, {})
    summed(totals, {0: told(process())})
    found = summed(totals, {0: told(process("pod-1"))})
    assert sum("pod-1" in series for series in found) > 10


def test_what_one_process_does_not_know_yet_another_or_a_late_one_does() -> None:
    totals, dead = Totals(), process("pod-1")
    serve(dead, "pod-1")
    old = told(process("listed", "pod-1"))
    summed(totals, {0: told(dead), 1: old})
    totals.gone(0)
    for _ in range(2):
        found = summed(totals, {0: told(process("listed"))})
        assert sum("pod-1" in series for series in found) > 10


def test_a_name_with_quotes_is_one_of_the_fleet() -> None:
    name, totals = 'a,worker="b"\\', Totals()
    dead = process(name)
    serve(dead, name)
    summed(totals, {0: told(dead)})
    totals.gone(0)
    found = summed(totals, {0: told(process(name))})
    assert any("requests_total" in series for series in found if "a,worker" in series)
