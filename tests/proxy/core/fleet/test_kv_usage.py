"""The KV cache usage of a worker."""

from __future__ import annotations

import pytest

from proxy.core.fleet.charges import Fleet
from proxy.core.fleet.kv_usage import (
    MAX_PAGE_AGE_S,
    SHARING_LEARNING_RATE,
    learn_from_page,
    uncharged_tokens,
)
from proxy.core.fleet.leases import Decision, HandoverDecision, Lease
from proxy.core.fleet.worker import Worker
from proxy.core.fleet.worker_load import NO_LOAD, WorkerLoad
from proxy.core.model.role import Role
from proxy.core.model.specs import Gauges
from proxy.core.model.types import Outcome, Reason
from proxy.core.queue.ticket import Ticket
from proxy.core.router import Router
from tests.proxy.core.making import (
    chat,
    fleet_of,
    idle,
    make_info,
    members,
    placed,
    router_of,
    sized,
    spec,
    worker_of,
)

CACHE = 400_000
PROMPT, OUTPUT = 30_000, 300
BLOCKS = 116  # of 115 KB
SHARED = tuple(range(1, BLOCKS + 1))


def set_page(
    router: Router, at: float, usage: float = 0.0, running: int = 1, waiting: int = 0
) -> Worker:
    gauges = Gauges(at, running, waiting, kv_usage=usage, kv_capacity_tokens=CACHE)
    router.fleet.health.set_gauges("a", gauges)
    return worker_of(router, "a")


def make_router(**settings: object) -> Router:
    """Return a router for one worker with a cache of known size."""
    router = router_of(spec("a"), **settings)
    set_page(router, 0.0).pace.evicted_share = 0.0
    return router


def agent(router: Router, now: float, *, alone: str = "") -> Lease | Ticket:
    """Send the agents' common prefix and a question; `alone` makes the prefix different."""
    body = chat(f"{alone} tool " * (24_000 // (1 + len(alone) // 5)), "and now?", max_tokens=OUTPUT)
    answer = router.submit(sized(router, body | {"model": "m", "stream": True}), now)
    assert isinstance(answer, Lease | Ticket)
    return answer


def test_request_waits_only_for_room_beyond_the_shared_prefix() -> None:
    """Apart from the others it would take more room, and full caches would stay full."""
    router = router_of(spec("a"), spec("b"))
    begins = {"a": tuple(range(100, 182)), "b": tuple(range(200, 282))}  # 5,120 tokens
    for name, number in (("a", 40), ("b", 38)):
        router.fleet.health.set_gauges(name, Gauges(0.0, kv_capacity_tokens=85_000))
        worker = worker_of(router, name)
        for _ in range(number):
            agent_request = make_info(5500, 1500, prefix=begins[name])
            lease = router.fleet.charge(agent_request, Decision(worker, Reason.ONLY_CHOICE), 0.0)
            router.fleet.record_first_token(lease, 0.1)
        assert worker.kv_held > 0.9 * worker.kv_capacity
    router.fleet.roster.prefixes.record(begins["a"], worker_of(router, "a").index)
    request = make_info(5500, 1500, prefix=begins["a"])
    waits_s = {score.worker: score.wait_s for score in router.placer.explain(request, 1.0).scores}
    assert 0.0 < waits_s["a"] < waits_s["b"]
    assert placed(router.submit(request, 1.0)).worker.name == "a"
    worker_of(router, "a").kv_unshared = 1.0  # the worker shares nothing
    assert placed(router.submit(make_info(5500, 1500, prefix=begins["a"]), 1.0)).worker.name == "b"


def test_worker_without_prefix_cache_is_charged_in_full() -> None:
    router = make_router()
    worker_of(router, "a").pace.evicted_share = 1.0
    answers = [agent(router, 0.0) for _ in range(40)]
    assert 20 < sum(isinstance(answer, Lease) for answer in answers) < 30


# The worker's metrics page


def test_page_with_free_cache_makes_room_until_it_is_old() -> None:
    router = make_router(policy="least_loaded")  # no prefixes: everything is charged
    sent = 0
    while isinstance(answer := agent(router, 0.0), Lease):
        sent += 1
        router.leases.record_first_token(answer, 0.5)
    worker = worker_of(router, "a")
    assert worker.is_full
    assert 20 < sent < 30
    set_page(router, 1.0, (PROMPT + 500 * sent) / CACHE, running=sent)
    assert not worker.is_full
    assert worker.kv_held < 0.3 * CACHE
    [(_, after)] = router.pop_due(1.0)
    assert isinstance(after, Lease)
    while isinstance(agent(router, 1.1), Lease):
        sent += 1
        assert sent < 60, "requests sent since the page are charged"
    set_page(router, 2.0, 0.1, running=20)
    assert worker.kv_overcharged > 0
    router.fleet.charge(make_info(10), Decision(worker, Reason.ONLY_CHOICE), 2.1 + MAX_PAGE_AGE_S)
    assert worker.kv_overcharged == 0  # the page is too old


def test_prefills_without_first_token_are_added_to_the_page() -> None:
    router = make_router(policy="least_loaded")
    while isinstance(agent(router, 0.0), Lease):
        pass
    worker = set_page(router, 1.0, 0.05)
    assert worker.is_full
    charged = worker.kv_tokens
    router.fleet.health.apply_remote_load(
        worker, WorkerLoad(9, 9, kv_tokens=99_000, kv_coming=99_000), 0.0, 1.0
    )
    set_page(router, 2.0, 0.05)
    assert worker.kv_held == charged + 99_000
    router.fleet.health.apply_remote_load(worker, NO_LOAD, 0.0, 2.0)


def test_worker_without_new_pages_has_room_after_finishes() -> None:
    router = make_router()
    leases = [
        placed(router.submit(make_info(PROMPT, OUTPUT, prefix=SHARED), 0.0)) for _ in range(40)
    ]
    for lease in leases:
        router.leases.record_first_token(lease, 0.5)
    worker = set_page(router, 1.0, 1.0, running=13, waiting=27)
    assert worker.is_full
    for lease in leases[1:]:
        router.leases.finish(lease, 2.0, Outcome.DONE)
    assert worker.kv_held == worker.kv_tokens
    assert not worker.is_full
    placed(router.submit(make_info(PROMPT, OUTPUT, prefix=SHARED), 99.0))


# Hand-overs


def handed(fleet: Fleet, now: float) -> Lease:
    """Hand a request over from the first worker to the second."""
    first, second = members(fleet)[:2]
    handover = HandoverDecision(first, 0, PROMPT, 1.0, 0.1)
    decision = Decision(second, Reason.HANDOVER, handover=handover)
    return fleet.charge(make_info(PROMPT, OUTPUT, prefix=SHARED), decision, now)


def test_decode_leg_shares_prefixes_from_its_first_token() -> None:
    fleet = fleet_of(spec("p", Role.PREFILL), spec("a", Role.DECODE), spec("b", Role.DECODE))
    for name in "pab":
        fleet.health.set_gauges(name, Gauges(0.0, kv_capacity_tokens=CACHE))
    first, second, third = members(fleet)
    first.pace.evicted_share = second.pace.evicted_share = 0.0
    leases = [handed(fleet, 0.0) for _ in range(3)]
    assert first.kv_tokens < 2 * PROMPT
    assert second.kv_tokens == second.kv_coming == 3 * (PROMPT + OUTPUT)
    for lease in leases:
        fleet.hand_over(lease, 1.0)
    fleet.move(leases[2], third, 1.1)
    assert (second.kv_tokens, third.kv_tokens) == (2 * (PROMPT + OUTPUT), PROMPT + OUTPUT)
    for lease in leases:
        fleet.record_first_token(lease, 1.5)
    assert second.kv_tokens < PROMPT + 2 * (OUTPUT + 2000)
    assert (second.kv_coming, third.kv_coming) == (0, 0)
    for lease in leases:
        fleet.release(lease)
    assert idle(fleet.roster)


@pytest.mark.parametrize(
    ("usage", "running", "waiting", "queued", "sequences", "spare", "more", "apart"),
    [
        (0.4, 4, 0, 0, 10, 600 - 400 - 50 - 30, 0, 0.1 - SHARING_LEARNING_RATE * 0.12),
        (0.9, 4, 0, 0, 10, 0, 300, 0.1),
        (0.9, 4, 2, 2, 10, 0, 300, 0.1),  # requests wait although there is room
        (0.95, 4, 2, 2, 10, 0, 350, 0.1),
        # A waiting request counts like a running one, up to the charge without sharing.
        (1.0, 4, 2, 2, 3, 600 - 750, 250, 0.1 + SHARING_LEARNING_RATE * 0.15),
        (1.0, 4, 2, 2, 10, 600 - 1350, 0, 0.1 + SHARING_LEARNING_RATE * 0.75),
        (1.0, 0, 0, 1, 10, 600 - 1350, 0, 0.1 + SHARING_LEARNING_RATE * 0.75),
        (0.0, 4, 0, 0, 10, 0, 0, 0.1),
    ],
)
def test_page_sets_spare_tokens_and_sharing(
    usage: float, running: int, waiting: int, queued: int, sequences: int,
    spare: int, more: int, apart: float,
) -> None:  # fmt: skip
    [worker] = members(fleet_of(spec("a")))
    worker.kv_capacity, worker.kv_tokens, worker.sequences = 1000, 600, sequences
    worker.decode_tokens, worker.kv_coming = 50, 30
    worker.pace.evicted_share, worker.kv_unshared, worker.running_prefixes.saved = 0.25, 0.1, 1000
    learn_from_page(worker, Gauges(0.0, running, waiting, kv_usage=usage), queued)
    assert (worker.kv_overcharged, worker.kv_uncharged) == (spare, more)
    assert worker.kv_unshared == pytest.approx(apart)


def test_extra_tokens_of_a_page_expire() -> None:
    [worker] = members(fleet_of(spec("a")))
    worker.kv_uncharged, worker.gauges = 7, Gauges(10.0)
    for late_s, tokens in ((0.0, 7), (MAX_PAGE_AGE_S, 7), (MAX_PAGE_AGE_S + 0.1, 0)):
        assert uncharged_tokens(worker, 10.0 + late_s) == tokens
    worker.gauges = None
    assert uncharged_tokens(worker, 10.0) == 0
