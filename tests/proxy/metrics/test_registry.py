"""The metrics registry and its page."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from importlib import metadata
from typing import Any

import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text

from grafana import declared
from proxy.core.fleet.breaker import FAILURES_TO_OPEN, MIN_OPEN_S
from proxy.core.fleet.charges import Fleet
from proxy.core.fleet.leases import Decision, HandoverDecision, Lease
from proxy.core.fleet.remote_load import own_load, set_remote_load
from proxy.core.model.role import Role
from proxy.core.model.specs import Gauges
from proxy.core.model.types import Reason, RequestInfo
from proxy.core.queue.latency_admission import AdmissionSettings
from proxy.core.router import Router, RouterSettings
from proxy.core.routing.handover_cost import HandoverVerdict
from proxy.core.tenants.tenants import Rank, TenantSpec
from proxy.metrics import page
from proxy.metrics import registry as metrics_module
from proxy.metrics.exposition import SLICE_LINES
from proxy.metrics.journal_counts import JournalCount
from proxy.metrics.page import write_page
from proxy.metrics.registry import BATCH, LONG, MAX_MODELS, SHORT, Metrics, class_of
from tests.prometheus.tools import promtool
from tests.proxy.core import making
from tests.proxy.core.making import spec, worker_of
from tests.proxy.metrics.finished import finished
from tests.proxy.metrics.scraped import scraped

CHAT = "chat/completions"


@pytest.fixture
def router() -> Router:
    """Return a router with a short and a long worker."""
    fleet = Fleet()
    fleet.roster.add(spec("s0", Role.SHORT, model="tiny"))
    fleet.roster.add(spec("l0", Role.LONG, model="tiny"))
    return Router(RouterSettings(), fleet)


@pytest.fixture
def metrics(router: Router) -> Metrics:
    return Metrics(router)


def make_info(**fields: Any) -> RequestInfo:
    return making.make_info(output=20, model="tiny", **fields)


def count_request(metrics: Metrics, **more: object) -> None:
    """Count a successful request; keywords replace its fields."""
    defaults = {
        "route": CHAT, "model": "tiny", "worker": "s0", "reason": Reason.SHORT_POOL, "status": 200,
        "ttft_s": 0.03, "duration_s": 1.5, "queue_s": 0.0, "pool": Role.SHORT,
        "predicted_ttft_s": 0.02, "size": SHORT,
    }  # fmt: skip
    metrics.count_request(finished(**(defaults | more)))  # type: ignore[arg-type]


def families(metrics: Metrics, *, openmetrics: bool = False) -> dict[str, Metric]:
    read = read_openmetrics if openmetrics else read_text
    found: Iterable[Metric] = read(scraped(metrics, openmetrics=openmetrics))
    return {family.name: family for family in found}


def value(metrics: Metrics, sample_name: str, **labels: str) -> float | None:
    """Return a sample with exactly these labels, or None."""
    wanted = {f'{name}="{text}"' for name, text in labels.items()}
    for line in scraped(metrics).splitlines():
        name, _, number = line.rpartition(" ")
        family, _, given = name.partition("{")
        if family == sample_name and set(filter(None, given.rstrip("}").split(","))) == wanted:
            return float(number)
    return None


def requests_total(metrics: Metrics, **labels: str) -> float | None:
    """Return the count of successful requests; keywords replace labels."""
    defaults = {
        "route": CHAT, "model": "tiny", "worker": "s0", "reason": "short_pool", "status": "200",
        "class": "short",
    }  # fmt: skip
    return value(metrics, "proxy_requests_total", **(defaults | labels))


REFUSED = {"worker": "none", "reason": "queue_full", "status": "429", "class": "none"}


def refuse(metrics: Metrics) -> None:
    metrics.count_request(finished(CHAT, 429, Reason.QUEUE_FULL, 0.001, model="tiny"))


def test_requests_are_counted_by_all_labels(metrics: Metrics) -> None:
    count_request(metrics)
    count_request(metrics)
    count_request(metrics, status=500)
    count_request(metrics, worker="l0", pool=Role.LONG, reason=Reason.SPILL_TO_LONG)
    count_request(metrics, size=BATCH)
    refuse(metrics)
    assert requests_total(metrics) == 2
    assert requests_total(metrics, status="500") == 1
    assert requests_total(metrics, worker="l0", reason="spill_to_long") == 1
    assert requests_total(metrics, **{"class": "batch"}) == 1
    assert requests_total(metrics, **REFUSED) == 1


@pytest.mark.parametrize(
    ("pool", "size"), [(Role.SHORT, SHORT), (Role.LONG, SHORT), (Role.SHORT, LONG)]
)
def test_times_are_counted_by_pool_and_class(metrics: Metrics, pool: Role, size: str) -> None:
    count_request(metrics, ttft_s=90.0, size=BATCH)
    count_request(
        metrics, pool=pool, size=size, ttft_s=0.03, predicted_ttft_s=0.5, queue_s=0.25, tpot_s=0.125
    )
    count_request(metrics, pool=pool, size=size, ttft_s=0.5, predicted_ttft_s=None, tpot_s=None)
    count_request(metrics, pool=pool, size=size, ttft_s=None)
    labels = {"pool": pool.value, "model": "tiny", "class": size}
    assert value(metrics, "proxy_ttft_seconds_sum", **labels) == 0.53
    assert value(metrics, "proxy_ttft_seconds_bucket", le="0.04", **labels) == 1
    assert value(metrics, "proxy_ttft_seconds_bucket", le="0.02", **labels) == 0
    assert value(metrics, "proxy_predicted_ttft_seconds_sum", **labels) == 0.5
    assert value(metrics, "proxy_queue_wait_seconds_sum", **labels) == 0.25
    assert value(metrics, "proxy_time_per_output_token_seconds_sum", **labels) == 0.125
    durations = {"pool": pool.value, "route": CHAT, "class": size}
    assert value(metrics, "proxy_request_duration_seconds_sum", **durations) == 4.5
    counts = ("proxy_ttft", "proxy_predicted_ttft", "proxy_time_per_output_token")
    found = [value(metrics, f"{name}_seconds_count", **labels) for name in counts]
    assert found == [2, 1, 1]


def test_batch_requests_have_their_own_class() -> None:
    assert class_of(None) == "none"
    assert class_of(make_info()) == "short"
    assert class_of(make_info(long=True)) == "long"
    for batch in (make_info(), make_info(long=True)):
        batch.rank = Rank.BATCH
        assert class_of(batch) == "batch"


def labels_of(router: Router, name: str) -> dict[str, str]:
    worker = worker_of(router, name)
    return {"worker": name, "role": worker.role.value, "model": worker.model}


def test_cache_gauges_are_the_workers(metrics: Metrics, router: Router) -> None:
    s0 = labels_of(router, "s0")
    assert value(metrics, "proxy_worker_kv_usage_ratio", **s0) is None
    assert value(metrics, "proxy_worker_kv_capacity_tokens", **s0) is None
    router.fleet.health.set_gauges("s0", Gauges(1.0, kv_usage=0.75, kv_capacity_tokens=16000))
    assert value(metrics, "proxy_worker_kv_usage_ratio", **s0) == 0.75
    assert value(metrics, "proxy_worker_kv_capacity_tokens", **s0) == 16000


def test_seats_ratio_needs_the_number_of_seats(metrics: Metrics, router: Router) -> None:
    for name, slots in (("d0", 4), ("d1", None)):
        worker = router.fleet.roster.add(replace(spec(name, Role.DECODE), slots=slots))
        labels = labels_of(router, name)
        assert value(metrics, "proxy_worker_seats_taken_ratio", **labels) is None
        router.fleet.health.set_gauges(name, Gauges(1.0))
        for _ in range(3):
            router.fleet.charge(make_info(), Decision(worker, Reason.ONLY_CHOICE), 1.0)
        taken = value(metrics, "proxy_worker_seats_taken_ratio", **labels)
        assert taken == (0.75 if slots else 0)


def test_token_gaps_and_retries_are_counted(metrics: Metrics) -> None:
    metrics.gaps_of(Role.SHORT, LONG).observe(0.0123)
    metrics.gaps_of(Role.SHORT, LONG).observe(0.0125)
    metrics.count_retry("s0", "connect")
    metrics.count_retry("s0", "connect")
    gap = {"pool": "short", "class": "long", "le": "0.015"}
    assert value(metrics, "proxy_inter_token_latency_seconds_bucket", **gap) == 2
    assert value(metrics, "proxy_retries_total", worker="s0", why="connect") == 2


def test_charges_and_states_are_read_from_the_fleet(metrics: Metrics, router: Router) -> None:
    worker, other = router.fleet.roster
    router.fleet.charge(make_info(), Decision(worker, Reason.SHORT_POOL), now=0.0)
    router.fleet.health.probe_ok("s0", now=0.0)
    router.fleet.roster.drain("l0")
    router.fleet.health.record_failure(other, 0.0, busy=True)
    s0, l0 = labels_of(router, "s0"), labels_of(router, "l0")
    assert value(metrics, "proxy_worker_inflight_requests", **s0) == 1
    assert value(metrics, "proxy_worker_prefill_tokens", **s0) == 100
    assert value(metrics, "proxy_worker_decode_tokens", **s0) == 20
    assert value(metrics, "proxy_worker_kv_tokens", **s0) == 120
    assert value(metrics, "proxy_worker_inflight_requests", **l0) == 0
    assert value(metrics, "proxy_worker_up", **s0) == 1
    assert value(metrics, "proxy_worker_up", **l0) == 0
    router.fleet.roster.set_served("s0", ("another",))
    assert value(metrics, "proxy_worker_up", **s0) == 0
    for name, here, there in (("breaker_open", 0, 1), ("draining", 0, 1)):
        assert value(metrics, f"proxy_worker_{name}", **s0) == here
        assert value(metrics, f"proxy_worker_{name}", **l0) == there


def test_charges_of_other_replicas_are_not_shown(metrics: Metrics, router: Router) -> None:
    """The sum over replicas is what a worker has."""
    worker, _ = router.fleet.roster
    router.fleet.charge(make_info(), Decision(worker, Reason.SHORT_POOL), now=0.0)
    charged = own_load(worker)
    set_remote_load(worker, charged, now=0.0)
    assert worker.requests == 2
    s0 = labels_of(router, "s0")
    assert value(metrics, "proxy_worker_inflight_requests", **s0) == 1
    assert value(metrics, "proxy_worker_prefill_tokens", **s0) == charged.prefill_tokens
    assert value(metrics, "proxy_worker_decode_tokens", **s0) == charged.decode_tokens
    assert value(metrics, "proxy_worker_kv_tokens", **s0) == charged.kv_tokens
    assert value(metrics, "proxy_worker_held_prompts", **s0) == 0


def test_breaker_states_and_openings_are_shown(
    metrics: Metrics, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(page.time, "monotonic", lambda: now)
    s0, l0 = router.fleet.roster

    def states() -> dict[str, str]:
        found = families(metrics)["proxy_worker_breaker_state"].samples
        assert all(sample.value == 1 for sample in found)
        return {sample.labels["worker"]: sample.labels["state"] for sample in found}

    def openings(name: str, why: str) -> float | None:
        return value(metrics, "proxy_breaker_openings_total", why=why, **labels_of(router, name))

    assert states() == {}
    assert openings("s0", "failed") == openings("s0", "busy") == 0
    for _ in range(FAILURES_TO_OPEN):
        router.fleet.health.record_failure(s0, 0.0)
    router.fleet.health.record_failure(l0, 0.0, busy=True)
    assert states() == {"s0": "open", "l0": "busy"}
    assert (openings("s0", "failed"), openings("s0", "busy")) == (1, 0)
    assert (openings("l0", "failed"), openings("l0", "busy")) == (0, 1)
    now = MIN_OPEN_S
    assert states() == {"s0": "half_open", "l0": "busy"}


def test_decisions_and_queue_are_read_from_the_router(metrics: Metrics, router: Router) -> None:
    router.fleet.health.probe_ok("s0", now=0.0)
    router.submit(make_info(), 0.0)
    router.queue.push(make_info(size=500), 0.0)
    reasons = {
        sample.labels["reason"]: sample.value
        for sample in families(metrics)["proxy_decisions"].samples
    }
    assert sum(reasons.values()) == 1
    assert value(metrics, "proxy_queue_requests") == 1
    assert value(metrics, "proxy_queue_bytes") == 500
    assert value(metrics, "proxy_queue_limit_requests") == router.settings.queue_requests


def test_bytes_per_token_is_shown_once_learnt(metrics: Metrics, router: Router) -> None:
    count_request(metrics)
    assert value(metrics, "proxy_bytes_per_token", model="tiny", route=CHAT) is None
    router.sizer.learned("tiny", CHAT).learn_prompt(3000, 1000)
    learned = value(metrics, "proxy_bytes_per_token", model="tiny", route=CHAT)
    assert learned == round(router.sizer.learned("tiny", CHAT).bytes_per_token, 3)
    assert learned == pytest.approx(3, rel=0.05)


def test_values_of_other_components_are_shown(metrics: Metrics) -> None:
    assert value(metrics, "proxy_log_lines_dropped_total") == 0
    metrics.client_connections = 7
    metrics.upstream_connections = lambda: [("s0", "idle", 3), ("s0", "busy", 4)]
    metrics.discovered = lambda: [("shorts", True, 3), ("longs", False, 2)]
    metrics.log_lines_dropped = lambda: 3
    assert value(metrics, "proxy_client_connections") == 7
    assert value(metrics, "proxy_upstream_connections", worker="s0", state="busy") == 4
    assert value(metrics, "proxy_discovery_up", name="shorts") == 1
    assert value(metrics, "proxy_discovery_up", name="longs") == 0
    assert value(metrics, "proxy_discovery_workers", name="longs") == 2
    assert value(metrics, "proxy_log_lines_dropped_total") == 3
    assert value(metrics, "proxy_processes") == 1
    assert value(metrics, "proxy_build_info", version=metadata.version("vllm-sched")) == 1
    resident = value(metrics, "process_resident_memory_bytes")
    assert resident is not None
    assert resident > 1e6


def test_unknown_models_are_counted_as_other(metrics: Metrics, router: Router) -> None:
    for number in range(500):
        unknown_model = f"no-such-{number}"
        metrics.count_request(finished(CHAT, 404, Reason.UNKNOWN_MODEL, 0.001, model=unknown_model))
        router.placer.decisions[unknown_model, Reason.UNKNOWN_MODEL] = 1
    assert len(metrics.requests) == 1
    unknown = {"worker": "none", "reason": "unknown_model", "status": "404", "class": "none"}
    assert requests_total(metrics, model="other", **unknown) == 500
    decisions = {"model": "other", "reason": "unknown_model"}
    assert value(metrics, "proxy_decisions_total", **decisions) == 500
    count_request(metrics)
    assert requests_total(metrics) == 1  # the served model keeps its name


def test_models_above_the_limit_are_counted_as_other(metrics: Metrics, router: Router) -> None:
    names = [f"adapter-{number}" for number in range(MAX_MODELS + 5)]
    router.fleet.roster.set_served("s0", ["tiny", *names])
    for name in names:
        count_request(metrics, model=name)
    assert requests_total(metrics, model=names[0]) == 1
    assert requests_total(metrics, model="other") == 5


def fill_with_old_models(metrics: Metrics, router: Router, monkeypatch: pytest.MonkeyPatch) -> str:
    """Count as many models as the limit; only `tiny` and `new` are served afterwards."""
    monkeypatch.setattr(metrics_module, "CLEANUP_INTERVAL_S", 0.0)
    old = [f"adapter-{number}" for number in range(MAX_MODELS - 1)]
    router.fleet.roster.set_served("s0", ["tiny", *old])
    for name in ("tiny", *old):
        count_request(metrics, model=name)
        decide(router, name)
    router.fleet.roster.set_served("s0", ["tiny", "new"])
    return old[0]


def decide(router: Router, model: str) -> None:
    router.placer.decisions[model, Reason.SHORT_POOL] = 1
    router.placer.handovers[model, HandoverVerdict.CACHED] = 1


def test_unserved_models_make_room(
    metrics: Metrics, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = fill_with_old_models(metrics, router, monkeypatch)
    count_request(metrics, model="new")
    assert requests_total(metrics, model="new") == 1
    assert requests_total(metrics) == 1
    assert requests_total(metrics, model=old) is None
    assert {key[1] for key in metrics.ttft} == {"tiny", "new"}
    assert {key[1] for key in metrics.phases} == {"tiny", "new"}


def test_models_dropped_by_a_scrape_are_neither_shown_nor_counted_as_other(
    metrics: Metrics, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = fill_with_old_models(metrics, router, monkeypatch)
    decide(router, "new")
    router.placer.decisions[old, Reason.RETRY] = 1
    assert requests_total(metrics, model=old) is None
    assert requests_total(metrics) == 1
    assert value(metrics, "proxy_decisions_total", model="other", reason="retry") is None
    for model, count in (("other", None), ("new", 1), ("tiny", 1), (old, None)):
        decisions = {"model": model, "reason": "short_pool"}
        assert value(metrics, "proxy_decisions_total", **decisions) == count
        cached = {"model": model, "why": HandoverVerdict.CACHED}
        assert value(metrics, "proxy_handover_decisions_total", **cached) == count


def test_unknown_paths_are_counted_as_other(metrics: Metrics) -> None:
    for path in ("/etc/passwd", "../x", ""):
        count_request(metrics, route=path)
    count_request(metrics, route="responses/id")
    assert requests_total(metrics, route="other") == 3
    assert requests_total(metrics, route="responses/id") == 1


def test_removed_workers_make_room(metrics: Metrics, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_module, "MAX_SERIES", 10)
    monkeypatch.setattr(metrics_module, "CLEANUP_INTERVAL_S", 0.0)
    count_request(metrics)
    refuse(metrics)
    metrics.count_retry("gone-0", "connect")
    for number in range(100):
        count_request(metrics, worker=f"gone-{number}")
    assert len(metrics.requests) <= 10
    assert metrics.retries == {}
    assert requests_total(metrics) == 1
    assert requests_total(metrics, **REFUSED) == 1


def test_workers_above_the_limit_are_counted_as_other(
    metrics: Metrics, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_module, "MAX_SERIES", 10)
    for number in range(200):
        router.fleet.roster.add(spec(f"w{number}", Role.SHORT, model="tiny"))
        count_request(metrics, worker=f"w{number}")
    assert len(metrics.requests) == 11
    assert requests_total(metrics, worker="w0") == 1
    assert requests_total(metrics, worker="other") == 190
    refuse(metrics)
    assert requests_total(metrics, **REFUSED) == 1


def fill_families(metrics: Metrics, router: Router) -> None:
    """Put a sample into every family."""
    for status in (200, 400, 500):
        count_request(metrics, status=status, placed_s=0.0)
    count_request(metrics, status=499, ttft_s=None, stream=True)
    count_request(metrics, ttft_s=None, stream=False)
    metrics.gaps_of("short", SHORT).observe(0.01)
    metrics.count_retry("s0", "connect")
    metrics.upstream_connections = lambda: [("s0", "idle", 3)]
    router.sizer.learned("tiny", CHAT).learn_prompt(3000, 1000)
    router.placer.decisions["tiny", Reason.PREFIX] = 3
    router.placer.handovers["tiny", HandoverVerdict.HANDED_OVER] = 2
    lease = charge_handover(router)
    metrics.handovers.count_prefill(lease, 1.5, without_params=False)
    router.leases.end_prefill(lease, 1.5, None)
    metrics.handovers.observe_transfer(lease, 1.75)
    metrics.handovers.count_warmup("done")
    metrics.handovers.count_barred("s0", "l0")
    gauges = Gauges(1.0, kv_capacity_tokens=16000, extra={"kv_bytes": 4096.0})
    router.fleet.health.set_gauges("s0", gauges)
    metrics.discovered = lambda: [("shorts", True, 3)]
    metrics.loop_lag.observe(0.001)
    router.fleet.health.record_failure(lease.worker, 2.0, busy=True)
    metrics.count_continuation("w0")
    metrics.count_lost_stream("field")
    targets = AdmissionSettings({Rank.STANDARD: 2.0})
    router.tenants.replace([TenantSpec("a")], {})
    [tenant] = router.tenants
    tenant.totals.limited["concurrency"] = 1
    metrics.tenants.count(tenant, 200, 0.1, 0.0)
    metrics.targets.count(make_info(), finished(ttft_s=1.0), targets, 0.0)
    metrics.journals = lambda: [JournalCount("w0", up=True, gaps=0, bad_signatures=0, requests=1)]


def charge_handover(router: Router) -> Lease:
    prefill, decode = list(router.fleet.roster)[:2]
    handover = HandoverDecision(prefill, 0, 700, 0.4, 0.2)
    return router.fleet.charge(
        make_info(prompt=700), Decision(decode, Reason.HANDOVER, handover=handover), 1.0
    )


def test_handover_is_counted_by_leg(metrics: Metrics, router: Router) -> None:
    fill_families(metrics, router)
    decide = value(metrics, "proxy_handover_decisions_total", model="tiny", why="handed_over")
    assert decide == 2
    assert value(metrics, "proxy_handovers_total", outcome="prefilled") == 1
    assert value(metrics, "proxy_handovers_total", outcome="transferred") == 1
    assert value(metrics, "proxy_transfer_tokens_total", model="tiny") == 700
    assert value(metrics, "proxy_transfer_bytes_total", worker="s0", role="short") == 4096
    assert value(metrics, "proxy_prefill_legs_total", worker="s0") == 1
    assert value(metrics, "proxy_prefill_leg_seconds_sum", model="tiny") == pytest.approx(0.5)
    step_s = next(iter(router.fleet.roster)).pace.step_s(0)
    counts = value(metrics, "proxy_transfer_seconds_sum", model="tiny")
    assert counts == pytest.approx(0.25 - step_s)
    predicted = value(metrics, "proxy_predicted_transfer_seconds_sum", model="tiny")
    assert predicted == pytest.approx(0.2)


@pytest.mark.parametrize("openmetrics", [False, True])
def test_all_families_are_written_in_both_formats(
    metrics: Metrics, router: Router, openmetrics: bool
) -> None:
    fill_families(metrics, router)
    count = JournalCount("s0", up=True, gaps=1, bad_signatures=1, requests=1)
    metrics.journals = lambda: [count]
    found = families(metrics, openmetrics=openmetrics)
    ours = {name for name in found if name.startswith("proxy_")}
    every = {family.name for family in declared.router_families()}
    assert {name for name in every - ours if not name.startswith("proxy_batch")} == set(), (
        "write it in proxy/metrics/page.py, and give it a sample in `fill_families`"
    )
    assert ours <= every
    for name in ours:
        assert found[name].samples, name
        assert found[name].documentation, name
        assert ":" not in name
    assert found["proxy_requests"].type == "counter"
    assert found["proxy_ttft_seconds"].type == "histogram"


def test_promtool_accepts_the_page(metrics: Metrics, router: Router) -> None:
    fill_families(metrics, router)
    page = scraped(metrics)
    assert "\n\n" not in page
    checked = promtool("check", "metrics", text=page)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


async def test_writing_a_page_yields_to_the_loop(metrics: Metrics, router: Router) -> None:
    router.fleet.roster.set_served("s0", ["tiny", "late"])
    for number in range(4 * SLICE_LINES):
        count_request(metrics, worker=f"w{number}")
    fill_families(metrics, router)
    turns = 0

    async def change_metrics() -> None:
        """Change metrics in each turn of the loop."""
        nonlocal turns
        while True:
            turns += 1
            count_request(metrics, worker=f"new-{turns}", model="late", size=LONG, placed_s=0.0)
            metrics.gaps_of(f"pool-{turns}", SHORT).observe(0.01)
            metrics.count_retry("s0", str(turns))
            metrics.handovers.count_end(str(turns))
            router.placer.decisions["tiny", Reason(list(Reason)[turns % len(Reason)])] = 1
            await asyncio.sleep(0)

    changing = asyncio.create_task(change_metrics())
    page, _ = await write_page(metrics)
    changing.cancel()
    # Turns of collection and of writing.
    assert turns >= 4 + page.count(b"\n") // (2 * SLICE_LINES)
    samples = {family.name: family.samples for family in read_text(page.decode())}
    assert len(samples["proxy_requests"]) >= 4 * SLICE_LINES
    assert samples["proxy_process_restarts"]
