"""What a tenant's request takes of its limits and its share, on every way out of the router."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.core.fleet.leases import Attempts, Lease
from proxy.core.model.role import Role
from proxy.core.model.specs import Gauges
from proxy.core.model.types import Outcome, Reason, RequestInfo, Usage
from proxy.core.queue.fairness import FairnessSettings
from proxy.core.router import Router
from proxy.core.tenants.limits import Limits
from proxy.core.tenants.tenants import Rank, Tenant, TenantSpec
from tests.present import present
from tests.proxy.core.making import (
    ask,
    chat,
    idle,
    placed,
    refused,
    route,
    router_of,
    spec,
    waits,
    worker_of,
)


def tenant(name: str = "t", rank: Rank = Rank.STANDARD, **limits: int) -> Tenant:
    return Tenant(TenantSpec(name, rank, limits=Limits(**limits)))


def of(who: Tenant, prompt: int = 100, output: int = 50, **fields: Any) -> RequestInfo:
    made = ask(prompt, output, **fields)
    made.tenant, made.rank = who, who.spec.rank
    return made


def tokens_left(who: Tenant) -> int:
    """Read what is left of the minute."""
    _, tokens = who.ledger.left(0.0)
    return present(tokens)[1]


def one_place() -> Router:
    return router_of(spec("w", most=1))


def test_a_limit_is_said_in_openais_words() -> None:
    router, who = router_of(spec("w")), tenant(requests_per_minute=1, tokens_per_minute=1000)
    placed(router.submit(of(who), 0.0))
    refusal = refused(router.submit(of(who), 0.0))
    assert (refusal.status, refusal.reason) == (429, Reason.LIMITED)
    assert refusal.code == "rate_limit_exceeded"
    assert refusal.retry_after_s == pytest.approx(60)
    assert "requests per minute (RPM): Limit 1" in refusal.message
    assert dict(refusal.headers) == {
        "x-ratelimit-limit-requests": "1",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "60.000s",
        "x-ratelimit-limit-tokens": "1000",
        "x-ratelimit-remaining-tokens": "850",
        "x-ratelimit-reset-tokens": "9.000s",
    }
    assert who.totals.limited == {"requests_per_minute": 1}


def test_a_prompt_may_be_too_long_for_a_key() -> None:
    router, who = router_of(spec("w")), tenant(max_prompt_tokens=100)
    refusal = refused(router.submit(of(who, 101), 0.0))
    assert (refusal.status, refusal.code, refusal.param) == (
        400, "context_length_exceeded", "messages",
    )  # fmt: skip
    assert refusal.retry_after_s is None
    placed(router.submit(of(who, 110, error=10), 0.0))  # the benefit of the doubt
    placed(router.submit(of(who, 100), 0.0))


@pytest.mark.parametrize("cut", [None, -1, 101, "x"])
def test_to_ask_for_less_than_all_of_it_is_no_way_around(cut: object) -> None:
    router, who = router_of(spec("w")), tenant(max_prompt_tokens=100)
    for path in ("/v1/chat/completions", "/v1/messages"):
        body = json.dumps(chat("x" * 4000, max_tokens=1) | {"truncate_prompt_tokens": cut}).encode()
        asked = router.read(route(path), body, b"application/json", "id", who)
        assert isinstance(asked, RequestInfo)
        assert refused(router.submit(asked, 0.0)).code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("outcome", "seen", "usage", "used"),
    [
        (Outcome.DONE, 0, Usage(80, 20), 100),
        (Outcome.DONE, 30, None, 130),
        (Outcome.DONE, 0, None, 150),
        (Outcome.CLIENT_GONE, 0, None, 100),
        (Outcome.CLIENT_GONE, 7, None, 107),
        (Outcome.FAILED, 7, None, 107),
        (Outcome.FAILED, 0, None, 0),
        (Outcome.REFUSED, 0, None, 0),
        (Outcome.BUSY, 0, None, 0),
    ],
)
def test_one_pays_for_what_one_got(
    outcome: Outcome, seen: int, usage: Usage | None, used: int
) -> None:
    router, who = router_of(spec("w")), tenant(tokens_per_minute=1000)
    lease = placed(router.submit(of(who), 0.0))
    assert tokens_left(who) == 850
    assert who.virtual == 200
    if seen:
        router.leases.first_token(lease, 0.0)
        router.leases.tokens(lease, seen)
    router.leases.finish(lease, 0.0, outcome, usage)
    assert tokens_left(who) == 1000 - used
    assert who.ledger.running == 0
    prompt = 80 if usage else 100
    output = max(used - prompt, 0)
    assert who.virtual == (prompt + 2 * output if used else 0)
    assert who.totals.prompt_tokens + who.totals.output_tokens == used
    router.leases.finish(lease, 0.0, outcome, usage)
    assert tokens_left(who) == 1000 - used, "once"


@pytest.mark.parametrize(
    ("after_s", "output", "samples", "written"),
    [
        (0.0, 50, 1, 0),
        (-0.01, 50, 1, 0),  # before its first token
        (0.51, 50, 1, 25),
        (0.51, 50, 3, 75),
        (60.0, 50, 1, 50),
        (60.0, 50, 3, 150),
        (0.51, None, 1, 25),
        (60.0, None, 1, 900),  # what its worker has left
    ],
)
@pytest.mark.parametrize("outcome", [Outcome.CLIENT_GONE, Outcome.UNFINISHED])
def test_who_has_no_end_of_an_answer_that_comes_whole_pays_for_what_was_written(
    after_s: float, output: int | None, samples: int, written: int, outcome: Outcome
) -> None:
    router, who = router_of(spec("w", limit=1000)), tenant(tokens_per_minute=10_000)
    pace = worker_of(router, "w").pace
    pace.base_s, pace.each_s = 0.02, 0.0
    asked = of(who, 100, output, samples=samples, stream=False)
    lease = placed(router.submit(asked, 0.0))
    router.leases.finish(lease, pace.first_token_s(100) + after_s, outcome)
    assert who.totals.output_tokens == written
    assert who.virtual == pytest.approx(100 + 2 * written)
    assert idle([worker_of(router, "w")])


# A stream of which no usage is known: events, and how long it was decoded.


def streamed(
    outcome: Outcome,
    *,
    after_s: float,
    seen: int,
    shows_s: float = 0.0,
    begins_s: float | None = 0.0,
    output: int | None = 500,
    samples: int = 1,
    path: str = "chat/completions",
) -> int:
    """Stream for so long from its first token on, at 20 ms a step; return what was charged for it.

    It begins after `begins_s`, and the router sees tokens from `shows_s` on.
    """
    router, who = router_of(spec("w", limit=2000)), tenant()
    pace = worker_of(router, "w").pace
    pace.base_s, pace.each_s = 0.02, 0.0
    asked = of(who, 100, output, samples=samples)
    asked.route = path
    lease = placed(router.submit(asked, 0.0))
    first = pace.first_token_s(100)
    if begins_s is not None:
        router.leases.began(lease, first + begins_s)
    if seen:
        router.leases.first_token(lease, first + shows_s)
        router.leases.tokens(lease, seen)
    router.leases.finish(lease, first + after_s + 0.001, outcome)
    assert who.virtual == pytest.approx(100 + 2 * who.totals.output_tokens)
    assert idle([worker_of(router, "w")])
    return who.totals.output_tokens


ENDS = [Outcome.DONE, Outcome.CLIENT_GONE, Outcome.UNFINISHED]


@pytest.mark.parametrize("outcome", ENDS)
def test_many_tokens_in_an_event_are_not_one(outcome: Outcome) -> None:
    """As an engine writes them that is asked for intervals, speculates, or calls a tool."""
    assert streamed(outcome, after_s=6.0, seen=3) == 300
    assert streamed(outcome, after_s=60.0, seen=3) == 500, "no more than it may write"
    assert streamed(outcome, after_s=2.0, seen=3, samples=4) == 400
    assert streamed(outcome, after_s=60.0, seen=3, output=None) == 1900, "what its worker has left"


def test_what_is_not_shown_is_charged_from_where_an_answer_begins() -> None:
    """A chat's role comes with its first token, whatever of it is hidden then."""
    for output in (500, None):
        gone = streamed(Outcome.CLIENT_GONE, after_s=4.0, seen=0, output=output)
        late = streamed(Outcome.CLIENT_GONE, after_s=4.0, seen=1, shows_s=4.0, output=output)
        assert gone == late == 200
    assert streamed(Outcome.CLIENT_GONE, after_s=4.0, begins_s=3.0, seen=0) == 50
    early = streamed(Outcome.CLIENT_GONE, after_s=4.0, begins_s=-0.01, seen=0, path="responses")
    assert early == 200, "an event that comes before the engine has begun is no token"
    unseen = streamed(Outcome.CLIENT_GONE, after_s=4.0, begins_s=None, seen=0)
    assert unseen == 0, "who has waited in vain"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("pages", "written"),
    [
        ([], 1950),
        ([(0.4, 10), (2.501, 200)], 1950),  # nothing was seen since
        ([(0.4, 10), (2.501, 200), (30.0, 200)], 100),
        ([(0.4, 10), (2.501, 200), (30.0, 900)], 1950),
        ([(-2.0, 10), (-1.0, 200), (0.4, 200)], 1950),  # it was idle before
    ],
)
def test_nobody_pays_for_the_time_in_which_a_worker_hangs(
    stream: bool, pages: list[tuple[float, int]], written: int
) -> None:
    router, who = router_of(spec("w")), tenant()
    pace = worker_of(router, "w").pace
    pace.base_s, pace.each_s, pace.fixed_s, pace.token_s = 0.02, 0.0, 0.5, 0.0
    lease = placed(router.submit(of(who, 100, 5000, stream=stream), 0.0))
    if stream:
        router.leases.first_token(lease, 0.5)
        router.leases.tokens(lease, 1)
    for at, computed in pages:
        router.fleet.health.set_gauges("w", Gauges(at=at, generation_tokens_total=computed))
    router.leases.finish(lease, 39.501, Outcome.CLIENT_GONE)
    assert who.totals.output_tokens == written


def test_who_leaves_a_hand_over_pays_for_its_decode_alone() -> None:
    router = router_of(*SIDES, transfer=True, disaggregate_above=1)
    written = []
    for prefilled in (False, True):
        who = tenant()
        lease = placed(router.submit(of(who, 5000, 500, stream=False), 0.0))
        if prefilled:
            router.leases.prefilled(lease, 60.0, None)
        decode_s = 100.5 * lease.worker.pace.step_s(1)
        now = 60.0 + present(lease.decision.handover).transfer_s + decode_s
        router.leases.finish(lease, now, Outcome.CLIENT_GONE)
        written.append(who.totals.output_tokens)
    assert written == [0, 100]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("leaves", [False, True])
def test_to_leave_before_the_end_or_to_show_few_events_wins_no_places(
    leaves: bool, streams: bool
) -> None:
    router = router_of(spec("w", most=8))
    held: dict[str, float] = {}
    ends: list[tuple[float, Lease, bool]] = []
    tenants = [tenant("stays"), tenant("other")]

    def took(lease: Lease, now: float) -> None:
        name = present(lease.ask.tenant).name
        gone = leaves and name == "other"
        seconds = 0.95 if gone else 1.0
        if lease.ask.stream:
            router.leases.first_token(lease, now)
            router.leases.tokens(lease, 1)
        ends.append((now + seconds, lease, gone))
        held[name] = held.get(name, 0.0) + seconds

    for tick in range(1200):
        now = tick / 20
        for end in [each for each in ends if each[0] <= now]:
            ends.remove(end)
            if end[2]:
                router.leases.finish(end[1], now, Outcome.CLIENT_GONE)
            else:
                usage = None if end[1].ask.stream else Usage(20, 500)
                router.leases.finish(end[1], now, Outcome.DONE, usage)
        for _, answer in router.due(now):
            assert isinstance(answer, Lease)
            took(answer, now)
        for who in tenants:
            while who.waiting < 10:
                stream = streams and who.name == "other"
                entered = router.submit(of(who, 20, 500, stream=stream), now)
                if isinstance(entered, Lease):
                    took(entered, now)
    assert held["other"] == pytest.approx(held["stays"], rel=0.15)


def test_tokens_beyond_what_was_likely_are_charged_as_they_pass() -> None:
    router, who = router_of(spec("w")), tenant()
    lease = placed(router.submit(of(who, 100, 10), 0.0))
    assert who.virtual == 120
    router.leases.first_token(lease, 0.0)
    seen = []
    for _ in range(4):
        router.leases.tokens(lease, 5)
        seen.append(who.virtual)
    assert seen == [120, 120, 130, 140]
    router.leases.finish(lease, 0.0, Outcome.DONE)
    assert who.virtual == 140


@pytest.mark.parametrize("told", [2000, 1000, 1])
def test_what_should_be_cached_is_no_part_of_that(told: int) -> None:
    router, who = router_of(spec("w")), tenant()
    prefix = tuple(range(8))
    router.leases.finish(
        placed(router.submit(of(who, 1024, 0, prefix=prefix), 0.0)), 0.0, Outcome.DONE
    )
    before = who.virtual
    lease = placed(router.submit(of(who, 1024, 0, prefix=prefix), 1.0))
    assert (cached := lease.decision.cached_tokens) > 0
    router.leases.finish(lease, 1.0, Outcome.DONE, Usage(told, 0))
    assert who.virtual - before == max(told - cached, 0)


def test_what_is_cached_is_not_charged() -> None:
    router = router_of(spec("w"), fairness=FairnessSettings(cached_weight=0.5))
    who = tenant()
    prefix = tuple(range(8))
    router.leases.finish(
        placed(router.submit(of(who, 1024, 0, prefix=prefix), 0.0)), 0.0, Outcome.DONE
    )
    first = who.virtual
    lease = placed(router.submit(of(who, 1024, 0, prefix=prefix), 1.0))
    assert lease.decision.cached_tokens > 0
    assert who.virtual - first == 1024 - lease.decision.cached_tokens / 2


def test_a_retry_goes_on_as_the_same_request() -> None:
    router = router_of(spec("a"), spec("b"))
    who = tenant(requests_per_minute=10, tokens_per_minute=1000, concurrency=1)
    one = of(who)
    lease = placed(router.submit(one, 0.0))
    router.leases.finish(lease, 0.0, Outcome.FAILED)
    again = router.submit(one, 0.0, Attempts(frozenset({lease.worker})), free=True)
    assert isinstance(again, Lease)
    assert who.ledger.running == 1
    assert who.virtual == 200
    refused(router.submit(of(who), 0.0))  # concurrency
    router.leases.finish(again, 0.0, Outcome.DONE, Usage(100, 50))
    assert (tokens_left(who), who.ledger.running) == (850, 0)


def test_who_waits_has_a_place_and_gives_it_back() -> None:
    router, who = one_place(), tenant(concurrency=2, tokens_per_minute=1000)
    lease = placed(router.submit(of(who), 0.0))
    ticket = waits(router.submit(of(who), 0.0))
    assert refused(router.submit(of(who), 0.0)).reason is Reason.LIMITED
    router.withdraw(ticket, 0.0)
    router.withdraw(ticket, 0.0)
    assert who.ledger.running == 1
    waits(router.submit(of(who), 0.0))
    (gone,) = router.due(31.0)
    assert refused(gone[1]).reason is Reason.WAITED_TOO_LONG
    assert who.ledger.running == 1
    router.leases.finish(lease, 31.0, Outcome.CLIENT_GONE)
    assert (who.ledger.running, who.waiting) == (0, 0)
    assert idle([worker_of(router, "w")])


def test_who_is_refused_pays_nothing() -> None:
    router = router_of(spec("w", limit=500, most=1), queue_requests=0)
    who = tenant(tokens_per_minute=1000)
    refused(router.submit(of(who, 600), 0.0))
    placed(router.submit(of(tenant("other")), 0.0))
    assert refused(router.submit(of(who), 0.0)).reason is Reason.QUEUE_FULL
    assert (tokens_left(who), who.ledger.running, who.virtual) == (1000, 0, 0)


# Batch


def batch(prompt: int = 100, **fields: Any) -> RequestInfo:
    return of(tenant("batch", Rank.BATCH), prompt, **fields)


def test_batch_waits_while_anybody_else_does_and_others_pass_it() -> None:
    router = router_of(spec("w", most=8))
    held = [placed(router.submit(of(tenant()), 0.0)) for _ in range(7)]
    ticket = waits(router.submit(batch(), 0.0))
    last = placed(router.submit(of(tenant()), 0.0))
    assert router.due(0.0) == []
    router.leases.finish(last, 0.0, Outcome.DONE)
    assert router.due(0.0) == [], "an eighth is left free"
    for number, lease in enumerate(held):
        router.leases.first_token(lease, 0.1)
        if number < 2:
            router.leases.finish(lease, 0.1, Outcome.DONE)
    ((gone, answer),) = router.due(0.1)
    assert gone is ticket
    assert isinstance(answer, Lease)


def test_batch_leaves_room_in_the_cache() -> None:
    router = router_of(spec("w"))
    worker_of(router, "w").kv_capacity = 1000
    placed(router.submit(of(tenant(), 400, 50), 0.0))
    waits(router.submit(batch(400), 0.0))
    placed(router.submit(of(tenant(), 400, 50), 0.0))


SIDES = (spec("p", Role.PREFILL), spec("d", Role.DECODE))
FULL = (spec("p", Role.PREFILL, most=1), spec("d", Role.DECODE))


@pytest.mark.parametrize("above", [1, 1000])
def test_short_batch_needs_no_prefill_worker(above: int) -> None:
    router = router_of(*SIDES, transfer=True, disaggregate_above=above)
    first = placed(router.submit(of(tenant(), 500_000), 0.0))
    assert first.prefill is not None
    lease = placed(router.submit(batch(20), 0.0))
    assert (lease.worker.name, lease.prefill) == ("d", None)


def test_long_batch_waits_though_no_prefill_worker_has_a_place() -> None:
    router = router_of(*FULL, transfer=True, disaggregate_above=1000)
    first = placed(router.submit(of(tenant(), 50_000), 0.0))
    for _ in range(4):
        router.leases.first_token(placed(router.submit(of(tenant(), 10, 1000), 0.0)), 0.0)
    waits(router.submit(batch(12_000), 0.0))
    router.leases.prefilled(first, 5.0, None)
    ((_, answer),) = router.due(5.0)
    assert isinstance(answer, Lease)
    assert answer.prefill is not None


def test_long_batch_is_served_whole_where_nobody_prefills() -> None:
    router = router_of(*SIDES, transfer=True, disaggregate_above=1000)
    router.fleet.roster.drain("p")
    router.leases.first_token(placed(router.submit(of(tenant(), 10, 1000), 0.0)), 0.0)
    assert placed(router.submit(batch(12_000), 0.0)).worker.name == "d"


def test_batch_is_in_the_way_of_neither_side_of_hand_overs() -> None:
    sides = (spec("p", Role.PREFILL), spec("d", Role.DECODE))
    router = router_of(*sides, transfer=True, disaggregate_above=1)
    first = placed(router.submit(of(tenant(), 500_000), 0.0))
    assert first.prefill is not None
    ticket = waits(router.submit(batch(5000), 0.0))
    router.leases.prefilled(first, 30.0, None)
    router.leases.first_token(first, 30.0)
    ((gone, answer),) = router.due(30.0)
    assert gone is ticket
    assert isinstance(answer, Lease)
    assert answer.prefill is not None


def test_each_of_several_answers_is_charged() -> None:
    router, who = router_of(spec("w")), tenant(tokens_per_minute=1000)
    placed(router.submit(of(who, 100, 50, samples=3), 0.0))
    assert (tokens_left(who), who.virtual) == (750, 400)


@pytest.mark.parametrize(("error", "about"), [(0, ""), (20, "about ")])
def test_a_size_that_is_an_estimate_is_called_so(error: int, about: str) -> None:
    router, who = router_of(spec("w", limit=1000)), tenant(max_prompt_tokens=100)
    asked = ask(2000, None, error=error)
    refusal = refused(router.submit(asked, 0.0))
    assert f"requested {about}2000 tokens ({about}2000 in the prompt, 0 for" in refusal.message
    assert refusal.param == "messages"
    asked.route = "completions"
    assert refused(router.submit(asked, 0.0)).param == "prompt"
    own = refused(router.submit(of(who, 500, error=error), 0.0))
    assert f"this prompt has {about}500" in own.message
