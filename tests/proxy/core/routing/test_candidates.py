"""Sessions at the choice of a worker."""

from __future__ import annotations

from bisect import bisect_right

import pytest

from proxy.core.fleet.leases import Lease
from proxy.core.fleet.worker import MAX_UNRANKED
from proxy.core.learned.prefix_index import COVERED, ENDS
from proxy.core.learned.sessions import Session, Turn, Visit
from proxy.core.model.types import Outcome, RequestInfo, Usage
from proxy.core.router import Router
from proxy.core.routing.cached_tokens import with_visits
from tests.proxy.core.making import make_info, placed, router_of, sized, spec, worker_of

PROMPT = 40_000
PREFIX = tuple(range(1, 109))


def turn_info(prompt: int = PROMPT, prefix: tuple[int, ...] = PREFIX, key: int = 5) -> RequestInfo:
    info = make_info(prompt, 50, prefix=prefix)
    info.session = key
    return info


def serve(router: Router, info: RequestInfo, now: float) -> Lease:
    """Serve a request to its end."""
    lease = placed(router.submit(info, now))
    router.leases.record_first_token(lease, now + 0.5)
    router.leases.finish(lease, now + 1.0, Outcome.DONE, Usage(info.prompt_tokens, 50))
    return lease


def turn(lease: Lease) -> tuple[str, str, int]:
    return lease.worker.name, lease.decision.turn, lease.decision.cached_tokens


def three(**settings: object) -> Router:
    return router_of(*(spec(f"w{i}") for i in range(3)), **settings)


def test_session_stays_where_the_index_sees_nothing() -> None:
    router = three()
    assert turn(serve(router, turn_info(), 0.0)) == ("w0", Turn.NEW, 0)
    router.fleet.roster.prefixes.forget(0)
    for number in range(3):  # others, so that w0 is not next by turns
        serve(router, make_info(100), 2.0 + number)
    later = turn_info(PROMPT + 5000, (*PREFIX, 99))
    assert turn(serve(router, later, 9.0)) == ("w0", Turn.STAYED, PROMPT + 50)
    assert router.fleet.roster.sessions.turns == {("m", Turn.NEW): 1, ("m", Turn.STAYED): 1}


def test_image_in_a_turn_leaves_the_session_what_it_has() -> None:
    """Its bytes are many and its tokens few, so that the index expects a small part."""
    router = three()
    serve(router, turn_info(), 0.0)
    image = len(PREFIX) + 256
    later = turn_info(PROMPT + 1000, (*PREFIX, *range(1000, 1256)))
    assert later.prefix_bytes == COVERED[image] > 1_000_000
    assert turn(serve(router, later, 2.0)) == ("w0", Turn.STAYED, PROMPT + 50)


def test_session_stays_where_the_index_knows_a_common_beginning() -> None:
    """Such as the tools of all sessions, once this session's leaf was evicted."""
    router = three()
    serve(router, turn_info(), 0.0)
    prefixes = router.fleet.roster.prefixes
    prefixes.forget(0)
    prefixes.record(PREFIX[:20], 0)
    later = turn_info(PROMPT + 5000, (*PREFIX, 99))
    assert turn(serve(router, later, 2.0)) == ("w0", Turn.STAYED, PROMPT + 50)


def test_session_moves_once_the_wait_exceeds_what_the_cache_saves() -> None:
    router = three()
    serve(router, turn_info(), 0.0)
    waiting = [placed(router.submit(make_info(20_000), 2.0))]
    while waiting[-1].worker.name != "w0":
        waiting.append(placed(router.submit(make_info(20_000), 2.0)))
    assert turn(placed(router.submit(turn_info(), 2.0)))[:2] == ("w0", Turn.STAYED)
    for _ in range(3):
        router.fleet.charge(make_info(60_000), waiting[-1].decision, 2.0)
    moved = placed(router.submit(turn_info(), 2.0))
    assert (moved.worker.name != "w0", moved.decision.turn) == (True, Turn.MOVED)


def test_beginning_that_other_workers_hold_is_expected_on_all_visited() -> None:
    router = three()
    serve(router, turn_info(), 0.0)
    roster = router.fleet.roster
    roster.prefixes.record(PREFIX[:20], worker_of(router, "w2").index)
    w0 = worker_of(router, "w0")
    w0.kv_capacity, w0.total_written = PROMPT, w0.total_written + 2 * PROMPT
    scores = {s.worker: s.cached_tokens for s in router.placer.explain(turn_info(), 2.0).scores}
    assert scores["w0"] == scores["w2"] > scores["w1"] == 0


def test_journal_is_believed_instead_of_the_session() -> None:
    router = three()
    serve(router, turn_info(), 0.0)
    w0 = worker_of(router, "w0")
    w0.reports_prefixes = True
    prefixes = router.fleet.roster.prefixes
    prefixes.follow(w0.index)
    for block in PREFIX[:10]:
        prefixes.add_block(block, w0.index, 100)
    scores = {s.worker: s.cached_tokens for s in router.placer.explain(turn_info(), 2.0).scores}
    assert 0 < scores["w0"] < PROMPT // 4


@pytest.mark.parametrize("gone", ["restart", "removal", "other prompt"])
def test_session_expects_nothing_of_what_is_gone(gone: str) -> None:
    router = three()
    serve(router, turn_info(), 0.0)
    prefix, roster = PREFIX, router.fleet.roster
    if gone == "restart":
        w0 = worker_of(router, "w0")
        roster.prefixes.forget(w0.index)
        w0.up_since = 1.5
    elif gone == "removal":
        roster.remove("w0")
        roster.add(spec("w9"))
        router.fleet.health.probe_ok("w9", 1.0)
    else:
        prefix = tuple(1000 + block for block in PREFIX)
    lease = placed(router.submit(turn_info(prefix=prefix), 2.0))
    assert lease.decision.cached_tokens == 0
    assert lease.decision.turn == (Turn.NEW if gone == "other prompt" else Turn.DISPLACED)


def test_nothing_is_noted_of_a_worker_that_was_removed_meanwhile() -> None:
    router = three()
    lease = placed(router.submit(turn_info(), 0.0))
    router.fleet.roster.remove("w0")
    router.leases.record_first_token(lease, 0.5)
    router.leases.finish(lease, 1.0, Outcome.DONE, Usage(PROMPT, 50))
    router.fleet.roster.expect_prefix(lease.info, lease.worker)
    assert not router.fleet.roster.prefixes.matches(PREFIX)
    session = router.fleet.roster.sessions.get(5)
    assert session is None or not session.visits


@pytest.mark.parametrize("shared", [83, 98])
def test_fork_expects_only_what_the_index_knows(shared: int) -> None:
    router = three()
    serve(router, turn_info(), 0.0)
    fork = turn_info(prefix=(*PREFIX[:shared], *range(500, 608 - shared)))
    known = COVERED[shared] * PROMPT // fork.prefix_bytes
    assert placed(router.submit(fork, 2.0)).decision.cached_tokens == known


def test_sessions_worker_is_a_candidate_in_a_large_group() -> None:
    router = router_of(*(spec(f"w{i}") for i in range(MAX_UNRANKED + 8)))
    name = serve(router, turn_info(), 0.0).worker.name
    router.fleet.roster.prefixes.forget(worker_of(router, name).index)
    for number in range(200):
        serve(router, make_info(100), 2.0 + number)
    assert turn(serve(router, turn_info(), 300.0))[:2] == (name, Turn.STAYED)


def test_failed_request_leaves_nothing() -> None:
    router = three()
    lease = placed(router.submit(turn_info(), 0.0))
    router.leases.finish(lease, 1.0, Outcome.REFUSED)
    assert placed(router.submit(turn_info(), 2.0)).decision.turn == Turn.NEW


def continued(router: Router, output: int) -> tuple[RequestInfo, RequestInfo]:
    """Serve a response; return the same request again, and one that continues the response."""
    path, body = "/v1/responses", {"model": "m", "input": "go on", "max_output_tokens": output}
    lease = placed(router.submit(sized(router, body, path), 0.0))
    router.remember("resp_1", lease.worker.name)
    router.leases.record_response_id(lease, "resp_1", 0.5)
    router.leases.finish(lease, 1.0, Outcome.DONE, Usage(PROMPT, 50))
    return sized(router, body, path), sized(
        router, {**body, "previous_response_id": "resp_1"}, path
    )


@pytest.mark.parametrize("journal", [False, True])
def test_request_that_continues_a_response_is_sized_with_it(*, journal: bool) -> None:
    """The worker has the earlier turns cached, and a body of few bytes is a long prompt."""
    router = three(short_limit=20_000)
    for worker in router.fleet.roster:
        worker.reports_prefixes = journal
    alone, later = continued(router, 50)
    assert (later.pinned, later.stored_tokens) == ("w0", PROMPT + 50)
    assert later.prompt_tokens == later.largest_prompt == alone.prompt_tokens + PROMPT + 50
    assert (alone.long, later.long) == (False, True)
    lease = placed(router.submit(later, 2.0))
    assert lease.decision.cached_tokens == PROMPT + 50
    assert lease.prefill_tokens < PROMPT // 4
    assert lease.kv_tokens > PROMPT


def test_estimate_of_a_stored_response_refuses_no_request() -> None:
    router = router_of(spec("w", limit=PROMPT + 500))
    _, later = continued(router, 600)
    assert placed(router.submit(later, 2.0)).worker.name == "w"
    assert later.edits is None, "its output limit stays"


def test_workers_with_equally_many_tokens_are_all_kept_beside_a_session() -> None:
    router, session = three(), Session(5, 0.0)
    session.add_visit(Visit(2, worker_of(router, "w2").up_since, 500, 0))
    held = with_visits([(400, 0b001), (400, 0b010)], session, router.fleet.roster, make_info(1000))
    assert held == [(500, 0b100), (400, 0b011)]


def test_conversations_with_one_id_share_their_common_beginning_only() -> None:
    """As with an application's `prompt_cache_key`."""
    whole = tuple(range(1, bisect_right(ENDS, 4 * PROMPT) + 1))
    other = (*whole[:-3], 901, 902, 903)
    served = []
    for key in (0, 5):
        router = three()
        serve(router, turn_info(prefix=whole), 0.0)
        served.append(serve(router, turn_info(prefix=other, key=key), 2.0))
    without, lease = served
    assert lease.session is not None
    assert 0 < lease.decision.cached_tokens == without.decision.cached_tokens < PROMPT - 1536


def test_worker_that_restarted_or_was_left_long_ago_has_what_the_index_knows() -> None:
    router, session = router_of(*(spec(f"w{i}") for i in range(6))), Session(5, 0.0)
    for number in range(6):
        since = worker_of(router, f"w{number}").up_since - (number == 5)
        session.add_visit(Visit(number, since, 500, 0))
    held = with_visits([(400, 0b111111)], session, router.fleet.roster, make_info(1000))
    assert held == [(500, 0b011100), (400, 0b100011)]
