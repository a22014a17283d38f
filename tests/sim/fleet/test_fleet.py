"""A simulated fleet: the router core in front of simulated workers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from proxy.core.routing.registry import RULES
from tests.sim.making import Listed, fleet_of
from vllm_sched.bench.results.outcome import Outcome
from vllm_sched.bench.traffic.catalogue import find
from vllm_sched.bench.traffic.schedule import Schedule
from vllm_sched.bench.traffic.types import Request
from vllm_sched.sim.engines.exact_engine import ExactEngine
from vllm_sched.sim.fleet.fleet import PlayedFleet, SimulatedFleet

LONG, SHORT = 20_000, 100


def play(
    fleet: SimulatedFleet, *requests: Request, progress: Any = None, **settings: Any
) -> PlayedFleet:
    return fleet.play(Schedule(source=Listed(*requests), **settings), progress)


def simulated(*workers: dict[str, Any], timeout_s: float = 600.0, **blocks: Any) -> SimulatedFleet:
    return SimulatedFleet(*fleet_of(*workers, **blocks), ExactEngine, timeout_s=timeout_s)


def mixed(count: int = 60) -> list[Request]:
    return [
        Request(n * 0.05, "long", LONG, 20)
        if n % 10 == 0
        else Request(n * 0.05, "short", SHORT, 20)
        for n in range(count)
    ]


def assert_complete(outcomes: tuple[Outcome, ...], count: int) -> None:
    """Check that each request ended once, with all its tokens in order."""
    assert len(outcomes) == count
    for each in outcomes:
        assert each.error == ""
        assert each.completed == len(each.ticks) == each.output_tokens
        assert each.ticks == sorted(each.ticks)
        assert each.ticks[0] > each.at
        assert each.worker


def assert_idle(fleet: SimulatedFleet) -> None:
    """Check that no charge and no KV block is left."""
    for worker in fleet.router.fleet.roster:
        left = (worker.requests, worker.sequences, worker.prefill_tokens, worker.kv_tokens)
        assert (*left, worker.num_decoding) == (0, 0, 0, 0, 0)
    for engine in fleet.engines.values():
        assert engine.gauges(0.0).kv_usage == 0


@pytest.mark.parametrize("policy", RULES)
def test_every_request_ends_once_under_every_routing_rule(policy: str) -> None:
    fleet = simulated({"role": "short"}, {"role": "long"}, {}, routing={"policy": policy})
    reports: list[tuple[float, int, int]] = []
    played = play(fleet, *mixed(), progress=lambda *report: reports.append(report))
    assert_complete(played.outcomes, 60)
    assert reports == sorted(reports)
    assert all(done <= sent for _, sent, done in reports)
    assert_idle(fleet)
    assert played.duration == max(each.end for each in played.outcomes)
    assert sum(played.facts["decisions"].values()) == 60


def test_closed_loop_keeps_the_concurrency() -> None:
    schedule = Schedule(source=find("1000x20"), concurrency=4, count=20)
    outcomes = simulated({}).play(schedule).outcomes
    assert_complete(outcomes, 20)
    edges = sorted([(o.at, 1) for o in outcomes] + [(o.end, -1) for o in outcomes])
    alive, highest = 0, 0
    for _, change in edges:
        alive += change
        highest = max(highest, alive)
    assert highest == 4
    assert sum(each.at == 0 for each in outcomes) == 4
    assert {each.at for each in outcomes[4:]} <= {each.end for each in outcomes}


def test_longest_context_is_that_of_the_models_decode_worker() -> None:
    """Contexts of other models and of prefill workers do not count."""
    fleet = simulated(
        {"max_model_len": 4000, "role": "decode"},
        {"max_model_len": 5000, "role": "prefill"},
        {"max_model_len": 6000, "model": "other"},
        transfer="nixl",
    )
    assert fleet.longest == 4000
    played = play(fleet, Request(0, "a", 9000, 10))
    assert (played.cut, played.outcomes[0].prompt_tokens) == (1, 3990)
    assert_complete(played.outcomes, 1)


@pytest.mark.parametrize(
    ("limit", "reason"), [({"max_requests": 1}, "queue"), ({"max_wait_s": 0.3}, "stayed busy")]
)
def test_request_in_the_router_queue_is_served_or_refused(
    limit: dict[str, Any], reason: str
) -> None:
    fleet = simulated({"max_requests": 1}, router={"queue": limit})
    played = play(fleet, *(Request(0.0, "a", 1000, 30) for _ in range(4)))
    assert [bool(each.error) for each in played.outcomes] == [False, False, True, True]
    assert reason in played.outcomes[3].error.lower()
    first, second = played.outcomes[:2]
    assert second.ticks[0] > first.end
    assert_idle(fleet)


@pytest.mark.parametrize("workers", [({},), ({"role": "prefill"}, {"role": "decode"})])
def test_timed_out_clients_leave_no_state(workers: Any) -> None:
    blocks = {"transfer": "nixl", "routing": {"disaggregate_above": 10}} if workers[1:] else {}
    fleet = simulated(*workers, timeout_s=0.5, **blocks)
    played = play(fleet, Request(0.0, "a", 1000, 20), Request(0.0, "b", 1000, 3000))
    assert played.outcomes[0].error == ""
    assert played.outcomes[1].error == "no complete response within 0.5 s"
    for name, engine in fleet.engines.items():
        while (at := engine.next_at()) < float("inf"):
            engine.advance(at)
        assert engine.gauges(9.0).kv_usage == 0, name
    assert all(not worker.requests for worker in fleet.router.fleet.roster)


@pytest.mark.parametrize("wait_s", [0.0, 0.3])
def test_refused_client_of_a_closed_loop_retries_later(wait_s: float) -> None:
    queue = {"max_requests": 1, "max_wait_s": wait_s} if wait_s else {"max_requests": 0}
    fleet = simulated({"max_requests": 1}, router={"queue": queue})
    schedule = Schedule(source=find("500x20"), concurrency=6, duration_s=2.0)
    outcomes = fleet.play(schedule).outcomes
    good = [each for each in outcomes if not each.error]
    assert len(good) > 3
    # A client retries at most every tenth of a second.
    assert len(good) < len(outcomes) < 6 * 2.0 / 0.1 + len(good) + 6
    assert max(each.at for each in outcomes) < 2.0


def test_front_time_is_added_to_ttft() -> None:
    config, models = fleet_of({})
    request = Request(0.0, "a", 1000, 5)
    plain = play(SimulatedFleet(config, models, ExactEngine), request).outcomes[0]
    slow = {name: replace(model, front_s=0.25) for name, model in models.items()}
    later = play(SimulatedFleet(config, slow, ExactEngine), request).outcomes[0]
    assert later.ttft == pytest.approx(plain.ttft + 0.25)
    assert later.itls == pytest.approx(plain.itls)


def test_long_prompts_are_handed_over() -> None:
    fleet = simulated(
        {"role": "prefill"},
        {"role": "decode"},
        transfer="nixl",
        routing={"disaggregate_above": 500},
    )
    played = play(fleet, *mixed(30))
    assert_complete(played.outcomes, 30)
    assert_idle(fleet)
    by_class = {each.klass: each.worker for each in played.outcomes}
    assert by_class == {"long": "w0>w1", "short": "w1"}
    assert played.facts["transfers"] == {"w0>w1": 3}
    # No decode shares a worker with a long prefill.
    assert max(gap for each in played.outcomes for gap in each.itls) < 0.05
    assert max(gap for each in play(simulated({}), *mixed(30)).outcomes for gap in each.itls) > 0.2


def test_simultaneous_long_prompts_do_not_stall_streams() -> None:
    """Three times, so that learned estimates do not move prefill to the decode worker."""
    fleet = simulated(
        {"role": "prefill"}, {"role": "decode"}, transfer="nixl", profile="h100-70b-tp4"
    )
    streams = [Request(0.1 * n, "stream", 100, 2000) for n in range(4)]
    longs = [Request(5.0 + 10 * n, "long", 24_000, 20) for n in range(3) for _ in range(2)]
    shorts = [Request(1.0 + n / 2, "short", 100, 20) for n in range(60)]
    requests = sorted((*streams, *longs, *shorts), key=lambda request: request.at)
    played = play(fleet, *requests)
    assert_complete(played.outcomes, len(requests))
    assert {each.worker for each in played.outcomes if each.klass == "long"} == {"w0>w1"}
    assert max(gap for each in played.outcomes for gap in each.itls) < 0.1


@pytest.mark.parametrize("seats", [8, 256])
def test_full_decode_worker_does_not_stop_prefills(seats: int) -> None:
    """With few decode slots, the prefill worker must not idle."""
    args = {"launch": {"args": [f"--max-num-seqs={seats}"]}}
    fleet = simulated({"role": "prefill"}, {"role": "decode", **args}, transfer="nixl")
    longs = [Request(2.0 * n, "long", 24_000, 200) for n in range(10)]
    shorts = [Request(0.35 * n, "short", 100, 200) for n in range(50)]
    requests = sorted((*longs, *shorts), key=lambda request: request.at)
    played = play(fleet, *requests)
    assert_complete(played.outcomes, len(requests))
    waits = [each.ttft for each in played.outcomes if each.klass == "long"]
    assert sum(waits) / len(waits) < 2.0


def test_requests_with_one_prefix_go_to_one_worker() -> None:
    shared = (("system", 8000),)
    requests = [Request(n * 1.0, "a", 8100, 5, shared=shared) for n in range(6)]
    played = play(simulated({}, {}, {}), *requests)
    assert_complete(played.outcomes, 6)
    assert len({each.worker for each in played.outcomes}) == 1
    first, *others = (each.ttft for each in played.outcomes)
    assert max(others) < 0.3 * first


def tenants(**of_second: Any) -> Any:
    return [{"name": "a", "keys_env": "A"}, {"name": "b", "keys_env": "B", **of_second}]


def test_tenant_concurrency_limit_refuses_requests() -> None:
    fleet = simulated({}, tenants=tenants(limits={"concurrency": 2}))
    requests = [Request(0.0, "x", 1000, 10, tenant=name) for name in "aaabbb"]
    errors = [each.error for each in play(fleet, *requests).outcomes]
    assert [bool(error) for error in errors] == [False] * 5 + [True]


def test_isolate_caches_separates_tenants_prefixes() -> None:
    shared = (("system", 8000),)
    requests = [
        Request(n * 1.0, "x", 8100, 5, tenant=t, shared=shared) for n, t in enumerate("aab")
    ]

    def ttfts(**router: Any) -> list[float]:
        fleet = simulated({}, tenants=tenants(), router=router)
        return [each.ttft for each in play(fleet, *requests).outcomes]

    together, apart = ttfts(isolate_caches=False), ttfts(isolate_caches=True)
    assert together[2] < 0.3 * together[0]
    assert apart[1] < 0.3 * apart[0]
    assert apart[2] == pytest.approx(apart[0], rel=0.05)


def test_pass_priority_sends_the_tenant_class_to_workers() -> None:
    """More batch requests than slots, then one interactive request."""
    names = tenants(**{"class": "interactive"})
    names[0]["class"] = "batch"
    worker = {
        "max_requests": 64, "url": "http://127.0.0.1:9001",
        "launch": {"args": ["--max-num-seqs", "4"], "policies": {"lanes": {}}},
    }  # fmt: skip
    crowd = [Request(0.0, "x", 1000, 50, tenant="a") for _ in range(30)]
    guest = Request(0.2, "x", 1000, 10, tenant="b")

    def wait(**router: Any) -> float:
        played = play(simulated(worker, tenants=names, router=router), *crowd, guest)
        assert_complete(played.outcomes, 31)
        return max(each.ttft for each in played.outcomes if each.tenant == "b")

    assert wait(pass_priority=True) < 0.2 * wait()
