"""What requests take of a worker's KV cache together."""

from __future__ import annotations

from itertools import permutations

import pytest

from proxy.core.fleet.charges import Fleet
from proxy.core.fleet.kv_usage import MAX_PAGE_AGE_S, SHARING_LEARNING_RATE, learn, more
from proxy.core.fleet.leases import Decision, HandoverDecision, Lease
from proxy.core.fleet.worker import Worker
from proxy.core.fleet.worker_load import NO_LOAD, WorkerLoad
from proxy.core.learned.prefix_index import COVERED
from proxy.core.model.role import Role
from proxy.core.model.specs import Gauges
from proxy.core.model.types import Outcome, Reason
from proxy.core.queue.ticket import Ticket
from proxy.core.router import Router
from proxy.core.routing.adaptive import kv_wait_s
from tests.proxy.core.making import (
    ask,
    chat,
    fleet_of,
    idle,
    members,
    placed,
    router_of,
    sized,
    spec,
    waits,
    worker_of,
)

CACHE = 400_000
PROMPT, OUTPUT = 30_000, 300
BLOCKS = 62  # of 115 KB
SHARED = tuple(range(1, BLOCKS + 1))


def page(here: Router, at: float, usage: float = 0.0, running: int = 1, waiting: int = 0) -> Worker:
    """Let the worker say how full it is."""
    told = Gauges(at, running, waiting, kv_usage=usage, kv_capacity_tokens=CACHE)
    here.fleet.health.set_gauges("a", told)
    return worker_of(here, "a")


def one(**settings: object) -> Router:
    """Make a router for one worker, with a cache of known size."""
    here = router_of(spec("a"), **settings)
    page(here, 0.0).pace.missing = 0.0
    return here


def agent(here: Router, now: float, *, alone: str = "") -> Lease | Ticket:
    """Send what all agents send, and then a question; `alone`: what nobody else sends."""
    body = chat(f"{alone} tool " * (24_000 // (1 + len(alone) // 5)), "and now?", max_tokens=OUTPUT)
    answer = here.submit(sized(here, body | {"model": "m", "stream": True}), now)
    assert isinstance(answer, Lease | Ticket)
    return answer


def test_those_who_begin_alike_are_charged_for_that_once() -> None:
    here = one()
    leases = [placed(here.submit(ask(PROMPT, OUTPUT, prefix=SHARED), 0.0)) for _ in range(120)]
    worker = worker_of(here, "a")
    alone = PROMPT - COVERED[BLOCKS] // 4 + OUTPUT
    assert worker.kv_tokens == COVERED[BLOCKS] // 4 + 120 * alone
    assert worker.running_prefixes.saved == 119 * (COVERED[BLOCKS] // 4)
    assert not worker.full
    assert kv_wait_s(worker, ask(PROMPT), PROMPT) == 0.0
    here.leases.finish(leases.pop(0), 1.0, Outcome.DONE)  # who brought it is not missed
    assert worker.kv_tokens == COVERED[BLOCKS] // 4 + 119 * alone
    for lease in leases:
        here.leases.finish(lease, 2.0, Outcome.CLIENT_GONE)
    assert idle(here.fleet.roster)


def test_who_begins_as_others_do_waits_for_no_more_room_than_its_own() -> None:
    """Parted from them it would take more, and caches that are full stay so for that alone."""
    here = router_of(spec("a"), spec("b"))
    begins = {"a": tuple(range(100, 134)), "b": tuple(range(200, 234))}  # 5,120 tokens
    for name, number in (("a", 40), ("b", 38)):
        here.fleet.health.set_gauges(name, Gauges(0.0, kv_capacity_tokens=85_000))
        worker = worker_of(here, name)
        for _ in range(number):
            agents = ask(5500, 1500, prefix=begins[name])
            lease = here.fleet.charge(agents, Decision(worker, Reason.ONLY_CHOICE), 0.0)
            here.fleet.first_token(lease, 0.1)
        assert worker.kv_held > 0.9 * worker.kv_capacity
    here.fleet.roster.prefixes.record(begins["a"], worker_of(here, "a").index)
    one_more = ask(5500, 1500, prefix=begins["a"])
    told = {score.worker: score.wait_s for score in here.placer.explain(one_more, 1.0).scores}
    assert 0.0 < told["a"] < told["b"]
    assert placed(here.submit(one_more, 1.0)).worker.name == "a"
    worker_of(here, "a").kv_apart = 1.0  # what was thought to be shared is not
    assert placed(here.submit(ask(5500, 1500, prefix=begins["a"]), 1.0)).worker.name == "b"


@pytest.mark.parametrize("order", [*permutations(range(3))])
def test_in_whatever_order_they_go_nothing_stays(order: tuple[int, ...]) -> None:
    here = one()
    prompts = [SHARED[:10], SHARED, (*SHARED[:20], 999, 998)]
    sizes = [1400, 31_000, 3200]
    leases = [
        placed(here.submit(ask(size, 50, prefix=prefix), 0.0))
        for size, prefix in zip(sizes, prompts, strict=True)
    ]
    worker = worker_of(here, "a")
    assert worker.kv_tokens < sum(sizes) + 150
    for at in order:
        here.leases.finish(leases[at], 1.0, Outcome.FAILED)
        assert worker.kv_tokens >= sum(lease.kv_tokens for lease in leases)
    assert idle(here.fleet.roster)


def test_a_worker_that_keeps_no_cache_is_charged_for_all() -> None:
    here = one()
    worker_of(here, "a").pace.missing = 1.0
    answers = [agent(here, 0.0) for _ in range(40)]
    assert 20 < sum(isinstance(answer, Lease) for answer in answers) < 30


# What the worker's own page says


def test_a_page_that_says_there_is_room_is_believed_for_a_while() -> None:
    here = one(policy="least_loaded")  # it hashes nothing, so all is charged
    sent = 0
    while isinstance(answer := agent(here, 0.0), Lease):
        sent += 1
        here.leases.first_token(answer, 0.5)
    worker = worker_of(here, "a")
    assert worker.full
    assert 20 < sent < 30
    page(here, 1.0, (PROMPT + 500 * sent) / CACHE, running=sent)
    assert not worker.full
    assert worker.kv_held < 0.3 * CACHE
    [(_, after)] = here.due(1.0)
    assert isinstance(after, Lease)
    while isinstance(agent(here, 1.1), Lease):
        sent += 1
        assert sent < 60, "what was sent since is charged again"
    page(here, 2.0, 0.1, running=20)
    assert worker.kv_spare > 0
    here.fleet.charge(ask(10), Decision(worker, Reason.ONLY_CHOICE), 2.1 + MAX_PAGE_AGE_S)
    assert worker.kv_spare == 0  # nobody knows any more


def test_what_has_not_shown_a_token_may_be_missing_on_a_page() -> None:
    here = one(policy="least_loaded")
    while isinstance(agent(here, 0.0), Lease):
        pass
    worker = page(here, 1.0, 0.05)
    assert worker.full
    charged = worker.kv_tokens
    here.fleet.health.charged_elsewhere(
        worker, WorkerLoad(9, 9, kv_tokens=99_000, kv_coming=99_000), 0.0, 1.0
    )
    page(here, 2.0, 0.05)
    assert worker.kv_held == charged + 99_000
    here.fleet.health.charged_elsewhere(worker, NO_LOAD, 0.0, 2.0)


@pytest.mark.parametrize(("usage", "waiting"), [(0.5, 3), (0.0, 0)])
def test_a_page_on_which_some_wait_or_that_tells_nothing_makes_no_room(
    usage: float, waiting: int
) -> None:
    here = one(policy="least_loaded")
    while isinstance(answer := agent(here, 0.0), Lease):
        here.leases.first_token(answer, 0.5)
    assert page(here, 1.0, usage, 20, waiting).full


def test_what_was_thought_to_be_shared_is_not_where_the_page_says_so() -> None:
    here = one()
    for _ in range(40):
        here.leases.first_token(placed(here.submit(ask(PROMPT, OUTPUT, prefix=SHARED), 0.0)), 0.5)
    worker = page(here, 1.0, 1.0, running=13, waiting=27)
    assert worker.full
    assert worker.kv_apart == pytest.approx(0.5, abs=0.1)
    waits(here.submit(ask(PROMPT, OUTPUT, prefix=SHARED), 1.0))
    page(here, 2.0, 0.2, running=40)
    assert not worker.full


def test_one_whose_pages_stop_has_room_again_once_it_has_less_to_do() -> None:
    here = one()
    leases = [placed(here.submit(ask(PROMPT, OUTPUT, prefix=SHARED), 0.0)) for _ in range(40)]
    for lease in leases:
        here.leases.first_token(lease, 0.5)
    worker = page(here, 1.0, 1.0, running=13, waiting=27)
    assert worker.full
    for lease in leases[1:]:
        here.leases.finish(lease, 2.0, Outcome.DONE)
    assert worker.kv_held == worker.kv_tokens
    assert not worker.full
    placed(here.submit(ask(PROMPT, OUTPUT, prefix=SHARED), 99.0))


# Hand-overs


def handed(fleet: Fleet, now: float) -> Lease:
    """Hand one over from the first to the second."""
    first, second = members(fleet)[:2]
    halves = HandoverDecision(first, 0, PROMPT, 1.0, 0.1)
    made = Decision(second, Reason.HANDOVER, handover=halves)
    return fleet.charge(ask(PROMPT, OUTPUT, prefix=SHARED), made, now)


def test_a_decode_half_shares_from_its_first_token_on_wherever_it_is_moved() -> None:
    fleet = Fleet()
    for name, role in (("p", Role.PREFILL), ("a", Role.DECODE), ("b", Role.DECODE)):
        fleet.roster.add(spec(name, role))
        fleet.health.probe_ok(name, 0.0)
        fleet.health.set_gauges(name, Gauges(0.0, kv_capacity_tokens=CACHE))
    first, second, third = members(fleet)
    first.pace.missing = second.pace.missing = 0.0
    leases = [handed(fleet, 0.0) for _ in range(3)]
    assert first.kv_tokens < 2 * PROMPT
    assert second.kv_tokens == second.kv_coming == 3 * (PROMPT + OUTPUT)
    for lease in leases:
        fleet.hand_over(lease, 1.0)
    fleet.move(leases[2], third, 1.1)
    assert (second.kv_tokens, third.kv_tokens) == (2 * (PROMPT + OUTPUT), PROMPT + OUTPUT)
    for lease in leases:
        fleet.first_token(lease, 1.5)
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
        (0.9, 4, 2, 2, 10, 0, 300, 0.1),  # some wait, though there is room
        (0.95, 4, 2, 2, 10, 0, 350, 0.1),
        # What waits needs as much as what runs, and at most what would be charged without sharing.
        (1.0, 4, 2, 2, 3, 600 - 750, 250, 0.1 + SHARING_LEARNING_RATE * 0.15),
        (1.0, 4, 2, 2, 10, 600 - 1350, 0, 0.1 + SHARING_LEARNING_RATE * 0.75),
        (1.0, 0, 0, 1, 10, 600 - 1350, 0, 0.1 + SHARING_LEARNING_RATE * 0.75),
        (0.0, 4, 0, 0, 10, 0, 0, 0.1),
    ],
)
def test_what_a_page_says_of_a_cache(
    usage: float, running: int, waiting: int, queued: int, sequences: int,
    spare: int, more: int, apart: float,
) -> None:  # fmt: skip
    [worker] = members(fleet_of(spec("a")))
    worker.kv_capacity, worker.kv_tokens, worker.sequences = 1000, 600, sequences
    worker.decode_tokens, worker.kv_coming = 50, 30
    worker.pace.missing, worker.kv_apart, worker.running_prefixes.saved = 0.25, 0.1, 1000
    learn(worker, Gauges(0.0, running, waiting, kv_usage=usage), queued)
    assert (worker.kv_spare, worker.kv_more) == (spare, more)
    assert worker.kv_apart == pytest.approx(apart)


def test_a_page_says_what_a_cache_holds_for_so_long() -> None:
    [worker] = members(fleet_of(spec("a")))
    worker.kv_more, worker.gauges = 7, Gauges(10.0)
    assert [more(worker, 10.0 + late) for late in (0.0, MAX_PAGE_AGE_S, MAX_PAGE_AGE_S + 0.1)] == [
        7,
        7,
        0,
    ]
    worker.gauges = None
    assert more(worker, 10.0) == 0
