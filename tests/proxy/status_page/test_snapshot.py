"""The state on the status page, and counts of the last minute."""

from __future__ import annotations

from collections import Counter

import orjson
import pytest

from proxy.core.fleet.breaker import FAILURES_TO_OPEN
from proxy.core.learned.sessions import Turn
from proxy.core.model.finished_request import FinishedRequest
from proxy.core.model.specs import Gauges
from proxy.core.model.types import Reason
from proxy.core.tenants.tenants import Rank, TenantSpec
from proxy.metrics.histogram import Histogram
from proxy.metrics.registry import Metrics
from proxy.status_page.snapshot import MAX_LATENCY_ROWS, LiveState
from proxy.status_page.window import WINDOW_S, Window, quantile
from tests.proxy.core.making import LONG, SHORT, router_of, spec, worker_of
from tests.proxy.metrics.finished import finished

BOUNDS = (1.0, 2.0, 4.0)


@pytest.mark.parametrize(
    ("share", "counts", "expected"),
    [
        (0.5, [0, 0, 0, 0], None),
        (0.5, [10, 0, 0, 0], 0.5),
        (0.5, [0, 10, 0, 0], 1.5),
        (0.99, [50, 50, 0, 0], 1.98),
        (1.0, [5, 0, 5, 0], 4.0),
        (0.5, [0, 0, 0, 7], 4.0),  # beyond the last bound
    ],
)
def test_quantile_is_interpolated(share: float, counts: list[int], expected: float | None) -> None:
    found = quantile(share, counts, BOUNDS)
    assert found == (None if expected is None else pytest.approx(expected))


def test_window_covers_the_last_minute() -> None:
    window, histogram = Window(), Histogram(BOUNDS)
    for second in range(0, 300, 5):
        histogram.observe(0.5 if second < 200 else 3.0)
        window.copy(float(second), {"c": second}, {"h": histogram})
    assert window.since == 295 - WINDOW_S
    assert window.count("c", 300) == 65
    assert window.of("h", histogram) == [0, 0, 12, 0]


def test_new_series_count_from_zero() -> None:
    window, histogram = Window(), Histogram(BOUNDS)
    histogram.observe(1.5)
    assert window.of("h", histogram) == [0, 1, 0, 0]
    window.copy(0.0, {}, {})
    assert window.of("h", histogram) == [0, 1, 0, 0]
    assert window.count("c", 3) == 3


def served(model: str, worker: str, reason: Reason, pool: str) -> FinishedRequest:
    return finished(
        "completions", 200, reason, 2.0, model=model, worker=worker, ttft_s=0.2, pool=pool,
        predicted_ttft_s=0.1, size="short", tpot_s=0.02,
    )  # fmt: skip


def test_state_has_all_sections() -> None:
    router = router_of(spec("s0", SHORT, most=8), spec("l0", LONG))
    metrics = Metrics(router)
    state = LiveState(metrics)
    metrics.count_request(served("m", "s0", Reason.SHORT_POOL, "short"))
    router.placer.decisions["m", Reason.SHORT_POOL] = 4
    state.copy(100.0)
    metrics.count_request(served("m", "s0", Reason.SHORT_POOL, "short"))
    metrics.gaps_of("short", "long").observe(0.02)
    metrics.handovers.count_end("prefilled")
    metrics.count_retry("s0", "status")
    router.placer.decisions["m", Reason.SHORT_POOL] = 5
    router.placer.decisions["m", Reason.LONG_POOL] = 1
    router.fleet.roster.sessions.get_or_create(1, 0.0)
    router.fleet.roster.sessions.count("m", Turn.MOVED)
    worker_of(router, "s0").gauges = Gauges(running=3, waiting=2, kv_usage=0.5)
    shown = orjson.loads(orjson.dumps(state.as_json(130.0)))
    assert shown["covers_s"] == 30.0
    assert shown["answered"] == [2, 1]
    assert shown["decisions"] == [["short_pool", 5, 1], ["long_pool", 1, 1]]
    assert (shown["handovers"], shown["retries"]) == ([["prefilled", 1, 1]], [["status", 1, 1]])
    assert (shown["sessions"], shown["turns"]) == (1, [["moved", 1, 1]])
    kinds = {row["what"]: row for row in shown["latencies"]}
    assert set(kinds) == {"TTFT", "TPOT", "ITL"}
    assert kinds["TTFT"]["count"] == 1
    assert 0.15 < kinds["TTFT"]["p50_s"] < 0.25
    assert (kinds["TTFT"]["pool"], kinds["TTFT"]["size"]) == ("short", "short")
    first, second = shown["workers"]
    assert (first["name"], first["running"], first["waiting"], first["most"]) == ("s0", 3, 2, 8)
    assert (first["state"], first["breaker"], second["running"]) == ("up", "closed", None)


def test_tenants_are_summed_over_processes() -> None:
    states = []
    for tokens in (10, 5):
        router = router_of(spec("s0", SHORT))
        router.tenants.replace([TenantSpec("acme", Rank.BATCH)], {})
        state = LiveState(Metrics(router))
        state.copy(100.0)
        [tenant] = router.tenants
        tenant.totals.prompt_tokens, tenant.totals.limited = tokens, {"requests": 1}
        tenant.ledger.running, tenant.waiting = 3, 1
        states.append(state)
    shown = states[0].as_json(130.0, [state.figures(130.0) for state in states])
    assert shown["tenants"] == [
        {"name": "acme", "class": "batch", "requests": 6, "waiting": 2, "tokens": [15, 15],
         "limited": [2, 2]},
    ]  # fmt: skip


def test_failing_workers_of_a_large_fleet_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.status_page.snapshot.MAX_WORKERS", 3)
    router = router_of(*(spec(f"w{n}", SHORT if n < 2 else LONG) for n in range(6)))
    w0, _, _, _, w4, w5 = router.fleet.roster
    for _ in range(FAILURES_TO_OPEN):
        router.fleet.health.record_failure(w4, 1.0, why="reset")
        router.fleet.health.probe_failed("w5")
    w0.requests = w5.requests = 2
    shown = LiveState(Metrics(router)).as_json(2.0)
    rows = [(row["name"], row["state"], row["well"]) for row in shown["workers"]]
    assert rows == [("w4", "resting", False), ("w5", "down", False), ("w0", "up", True)]
    assert shown["workers"][0]["why"].startswith("it closed the connection")
    assert shown["more_workers"] == 3
    assert shown["pools"] == [
        {"role": "long", "workers": 4, "up": 2, "requests": 2},
        {"role": "short", "workers": 2, "up": 2, "requests": 2},
    ]


def test_latency_rows_are_of_the_busiest_models() -> None:
    metrics = Metrics(router_of(*(spec(f"w{n}", model=f"m{n}") for n in range(70))))
    state = LiveState(metrics)
    state.copy(100.0)
    for number in range(70):
        for _ in range(2 if number == 69 else 1):
            metrics.count_request(
                served(f"m{number}", f"w{number}", Reason.GENERAL_POOL, "general")
            )
    metrics.gaps_of("general", "short").observe(0.02)
    shown = state.as_json(130.0)
    assert Counter(row["what"] for row in shown["latencies"]) == {
        "TTFT": MAX_LATENCY_ROWS, "TPOT": MAX_LATENCY_ROWS, "ITL": 1,
    }  # fmt: skip
    assert shown["more_latencies"] == 2 * (70 - MAX_LATENCY_ROWS)
    assert [e["count"] for e in shown["latencies"] if e["model"] == "m69"] == [2, 2]
