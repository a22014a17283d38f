"""A fleet in virtual time: the router core in front of simulated workers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.sim.making import Listed, fleet_of
from vllm_sched.bench.results.outcome import Outcome
from vllm_sched.bench.traffic.catalogue import find
from vllm_sched.bench.traffic.schedule import Schedule
from vllm_sched.bench.traffic.types import Request
from vllm_sched.sim.engines.exact_engine import ExactEngine
from vllm_sched.sim.fleet.fleet import PlayedFleet, SimulatedFleet

LONG, SHORT = 20_000, 100


def play(
    fleet: SimulatedFleet, *requests: Request, told: Any = None, **settings: Any
) -> PlayedFleet:
    return fleet.play(Schedule(source=Listed(*requests), **settings), told)


def simulated(*workers: dict[str, Any], timeout_s: float = 600.0, **blocks: Any) -> SimulatedFleet:
    return SimulatedFleet(*fleet_of(*workers, **blocks), ExactEngine, timeout_s=timeout_s)


def mixed(count: int = 60) -> list[Request]:
    return [
        Request(n * 0.05, "long", LONG, 20)
        if n % 10 == 0
        else Request(n * 0.05, "short", SHORT, 20)
        for n in range(count)
    ]


def assert_whole(outcomes: tuple[Outcome, ...], count: int) -> None:
    """Each request ended once, with all of its tokens, in the order of time."""
    assert len(outcomes) == count
    for each in outcomes:
        assert each.error == ""
        assert each.completed == len(each.ticks) == each.output_tokens
        assert each.ticks == sorted(each.ticks)
        assert each.ticks[0] > each.at
        assert each.worker


def at_rest(fleet: SimulatedFleet) -> None:
    """Nothing is charged to anybody, and nobody holds anything."""
    for worker in fleet.router.fleet:
        left = (worker.requests, worker.sequences, worker.prefill_tokens, worker.kv_tokens)
        assert (*left, worker.decoding) == (0, 0, 0, 0, 0)
    for engine in fleet.engines.values():
        assert engine.gauges(0.0).kv_usage == 0


@pytest.mark.parametrize("policy", ["adaptive", "length", "least_loaded", "round_robin"])
def test_every_request_ends_once_under_every_rule(policy: str) -> None:
    fleet = simulated({"role": "short"}, {"role": "long"}, {}, routing={"policy": policy})
    played = play(fleet, *mixed())
    assert_whole(played.outcomes, 60)
    at_rest(fleet)
    assert played.duration == max(each.end for each in played.outcomes)
    assert sum(played.facts["decisions"].values()) == 60


def test_the_same_seed_gives_the_same_outcomes() -> None:
    def once(seed: int) -> list[Outcome]:
        schedule = Schedule(source=find("azure-conv"), rate=8.0, count=20, seed=seed)
        return [*simulated({}, {}).play(schedule).outcomes]

    assert once(1) == once(1)
    assert once(1) != once(2)


def test_a_closed_loop_keeps_so_many_under_way() -> None:
    schedule = Schedule(source=find("1000x20"), concurrency=4, count=20)
    outcomes = simulated({}).play(schedule).outcomes
    assert_whole(outcomes, 20)
    edges = sorted([(o.at, 1) for o in outcomes] + [(o.end, -1) for o in outcomes])
    alive, most = 0, 0
    for _, change in edges:
        alive += change
        most = max(most, alive)
    assert most == 4
    assert sum(each.at == 0 for each in outcomes) == 4
    assert {each.at for each in outcomes[4:]} <= {each.end for each in outcomes}


def test_a_closed_loop_ends_with_its_time() -> None:
    schedule = Schedule(source=find("1000x20"), concurrency=2, duration_s=3.0)
    outcomes = simulated({}).play(schedule).outcomes
    assert 3.0 - 1.0 < max(each.at for each in outcomes) < 3.0


def test_what_nobody_holds_is_cut_and_counted() -> None:
    played = play(simulated({"max_model_len": 4000}), Request(0, "a", 9000, 10))
    assert (played.cut, played.outcomes[0].prompt_tokens) == (1, 3990)
    assert_whole(played.outcomes, 1)


def test_what_is_held_is_what_the_router_would_tell_of_the_model() -> None:
    """Neither another model's context, nor that of who only prefills."""
    fleet = simulated(
        {"max_model_len": 4000, "role": "decode"},
        {"max_model_len": 5000, "role": "prefill"},
        {"max_model_len": 6000, "model": "other"},
        transfer="nixl",
    )
    assert fleet.longest == 4000
    played = play(fleet, Request(0, "a", 9000, 10))
    assert (played.cut, played.outcomes[0].prompt_tokens) == (1, 3990)
    assert_whole(played.outcomes, 1)


def test_what_is_refused_says_why() -> None:
    fleet = simulated({"max_requests": 1}, router={"queue": {"max_requests": 1}})
    played = play(fleet, *(Request(0.0, "a", 1000, 50) for _ in range(4)))
    assert [bool(each.error) for each in played.outcomes] == [False, False, True, True]
    assert "queue" in played.outcomes[3].error.lower()
    at_rest(fleet)


def test_who_waits_in_the_router_is_served_or_told() -> None:
    queue = {"queue": {"max_wait_s": 0.3}}
    fleet = simulated({"max_requests": 1}, router=queue)
    played = play(fleet, *(Request(0.0, "a", 1000, 30) for _ in range(4)))
    assert [bool(each.error) for each in played.outcomes] == [False, False, True, True]
    first, second = played.outcomes[:2]
    assert second.ticks[0] > first.end
    at_rest(fleet)


@pytest.mark.parametrize("workers", [({},), ({"role": "prefill"}, {"role": "decode"})])
def test_clients_that_wait_too_long_leave_nothing_behind(workers: Any) -> None:
    blocks = {"transfer": "nixl", "routing": {"disaggregate_above": 10}} if workers[1:] else {}
    fleet = simulated(*workers, timeout_s=0.5, **blocks)
    played = play(fleet, Request(0.0, "a", 1000, 20), Request(0.0, "b", 1000, 3000))
    assert played.outcomes[0].error == ""
    assert played.outcomes[1].error == "no complete response within 0.5 s"
    for name, engine in fleet.engines.items():
        while (at := engine.next_at()) < float("inf"):
            engine.advance(at)
        assert engine.gauges(9.0).kv_usage == 0, name
    assert all(not worker.requests for worker in fleet.router.fleet)


@pytest.mark.parametrize("wait_s", [0.0, 0.3])
def test_a_refused_client_of_a_closed_loop_comes_again_later(wait_s: float) -> None:
    queue = {"max_requests": 1, "max_wait_s": wait_s} if wait_s else {"max_requests": 0}
    fleet = simulated({"max_requests": 1}, router={"queue": queue})
    schedule = Schedule(source=find("500x20"), concurrency=6, duration_s=2.0)
    outcomes = fleet.play(schedule).outcomes
    good = [each for each in outcomes if not each.error]
    assert len(good) > 3
    # Time went on: nobody asked more often than each tenth of a second.
    assert len(good) < len(outcomes) < 6 * 2.0 / 0.1 + len(good) + 6
    assert max(each.at for each in outcomes) < 2.0


def test_front_time_comes_on_top() -> None:
    config, models = fleet_of({})
    request = Request(0.0, "a", 1000, 5)
    plain = play(SimulatedFleet(config, models, ExactEngine), request).outcomes[0]
    slow = {name: replace(model, front_s=0.25) for name, model in models.items()}
    later = play(SimulatedFleet(config, slow, ExactEngine), request).outcomes[0]
    assert later.ttft == pytest.approx(plain.ttft + 0.25)
    assert later.itls == pytest.approx(plain.itls)


def test_prompts_are_handed_over() -> None:
    fleet = simulated(
        {"role": "prefill"},
        {"role": "decode"},
        transfer="nixl",
        routing={"disaggregate_above": 500},
    )
    played = play(fleet, *mixed(30))
    assert_whole(played.outcomes, 30)
    at_rest(fleet)
    by_class = {each.klass: each.worker for each in played.outcomes}
    assert by_class == {"long": "w0>w1", "short": "w1"}
    assert played.facts["transfers"] == {"w0>w1": 3}
    # What decodes is never beside a long prompt's prefill.
    assert max(gap for each in played.outcomes for gap in each.itls) < 0.05
    assert max(gap for each in play(simulated({}), *mixed(30)).outcomes for gap in each.itls) > 0.2


def test_streams_stand_still_for_no_long_prompt_though_two_come_at_once() -> None:
    """Three times: by then much is learnt, and it must not be that a decode worker is quick."""
    fleet = simulated(
        {"role": "prefill"}, {"role": "decode"}, transfer="nixl", profile="h100-70b-tp4"
    )
    streams = [Request(0.1 * n, "stream", 100, 2000) for n in range(4)]
    longs = [Request(5.0 + 10 * n, "long", 24_000, 20) for n in range(3) for _ in range(2)]
    shorts = [Request(1.0 + n / 2, "short", 100, 20) for n in range(60)]
    asked = sorted((*streams, *longs, *shorts), key=lambda request: request.at)
    played = play(fleet, *asked)
    assert_whole(played.outcomes, len(asked))
    assert {each.worker for each in played.outcomes if each.klass == "long"} == {"w0>w1"}
    assert max(gap for each in played.outcomes for gap in each.itls) < 0.1


@pytest.mark.parametrize("seats", [8, 256])
def test_what_a_decode_worker_has_no_seat_for_now_may_be_prefilled_meanwhile(seats: int) -> None:
    """Answers go on while others are prefilled: few seats must not mean idle prefill workers."""
    args = {"launch": {"args": [f"--max-num-seqs={seats}"]}}
    fleet = simulated({"role": "prefill"}, {"role": "decode", **args}, transfer="nixl")
    longs = [Request(2.0 * n, "long", 24_000, 200) for n in range(20)]
    shorts = [Request(0.35 * n, "short", 100, 200) for n in range(100)]
    asked = sorted((*longs, *shorts), key=lambda request: request.at)
    played = play(fleet, *asked)
    assert_whole(played.outcomes, len(asked))
    waits = [each.ttft for each in played.outcomes if each.klass == "long"]
    assert sum(waits) / len(waits) < 2.0


def test_a_prefix_draws_requests_to_whom_has_it() -> None:
    shared = (("system", 8000),)
    asked = [Request(n * 1.0, "a", 8100, 5, shared=shared) for n in range(6)]
    played = play(simulated({}, {}, {}), *asked)
    assert_whole(played.outcomes, 6)
    assert len({each.worker for each in played.outcomes}) == 1
    first, *others = (each.ttft for each in played.outcomes)
    assert max(others) < 0.3 * first


def tenants(**of_second: Any) -> Any:
    return [{"name": "a", "keys_env": "A"}, {"name": "b", "keys_env": "B", **of_second}]


def test_a_tenants_limit_refuses() -> None:
    fleet = simulated({}, tenants=tenants(limits={"concurrency": 2}))
    asked = [Request(0.0, "x", 1000, 10, tenant=name) for name in "aaabbb"]
    errors = [each.error for each in play(fleet, *asked).outcomes]
    assert [bool(error) for error in errors] == [False] * 5 + [True]


def test_caches_may_be_kept_apart() -> None:
    shared = (("system", 8000),)
    asked = [Request(n * 1.0, "x", 8100, 5, tenant=t, shared=shared) for n, t in enumerate("aab")]

    def ttfts(**router: Any) -> list[float]:
        fleet = simulated({}, tenants=tenants(), router=router)
        return [each.ttft for each in play(fleet, *asked).outcomes]

    together, apart = ttfts(isolate_caches=False), ttfts(isolate_caches=True)
    assert together[2] < 0.3 * together[0]
    assert apart[1] < 0.3 * apart[0]
    assert apart[2] == pytest.approx(apart[0], rel=0.05)


def test_workers_are_told_the_class_where_the_fleet_file_says_so() -> None:
    """More batch than the engine has slots for, and then somebody who waits for an answer."""
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
        assert_whole(played.outcomes, 31)
        return max(each.ttft for each in played.outcomes if each.tenant == "b")

    assert wait(pass_priority=True) < 0.2 * wait()


def test_progress_is_told() -> None:
    heard: list[tuple[float, int, int]] = []
    play(simulated({}), *mixed(), told=lambda *all_three: heard.append(all_three))
    assert heard == sorted(heard)
    assert all(done <= sent for _, sent, done in heard)
