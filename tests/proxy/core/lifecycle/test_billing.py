"""What a request is charged against its tenant's limits and share, for every outcome."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.core.fleet.leases import Lease, LegFailure
from proxy.core.lifecycle import billing
from proxy.core.model.role import Role
from proxy.core.model.specs import Gauges
from proxy.core.model.types import Outcome, Reason, RequestInfo, Usage
from proxy.core.queue.fairness import FairnessSettings
from proxy.core.tenants.tenants import ChangedTenants, Rank, Tenant
from tests.present import present
from tests.proxy.core.making import (
    chat,
    idle,
    info_of,
    make_info,
    placed,
    pop_one,
    refused,
    router_of,
    serve,
    sized,
    spec,
    tenant,
    waits,
    worker_of,
)


def tokens_left(owner: Tenant) -> int:
    _, tokens = owner.ledger.remaining(0.0)
    return present(tokens)[1]


def test_rate_limit_refusal_has_openai_text_and_headers() -> None:
    router, owner = router_of(spec("w")), tenant(requests_per_minute=1, tokens_per_minute=1000)
    placed(router.submit(info_of(owner), 0.0))
    refusal = refused(router.submit(info_of(owner), 0.0))
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
    assert owner.totals.limited == {"requests_per_minute": 1}


def test_prompt_above_the_tenants_limit_is_refused() -> None:
    router, owner = router_of(spec("w")), tenant(max_prompt_tokens=100)
    refusal = refused(router.submit(info_of(owner, 101), 0.0))
    assert (refusal.status, refusal.code, refusal.param) == (
        400, "context_length_exceeded", "messages",
    )  # fmt: skip
    assert refusal.retry_after_s is None
    placed(router.submit(info_of(owner, 110, error=10), 0.0))  # it may be 100 within the error
    placed(router.submit(info_of(owner, 100), 0.0))


@pytest.mark.parametrize("tokens", [0, 9000])
@pytest.mark.parametrize("most", [100, 1000])
def test_reported_beginning_decides_no_limit(tokens: int, most: int) -> None:
    router, owner = router_of(spec("w")), tenant(max_prompt_tokens=most)
    asks = []
    for _ in range(2):
        asks.append(sized(router, chat("x" * 2000, max_tokens=1), owner=owner))
        for block in asks[0].prefix:
            router.fleet.roster.prefixes.add_block(block, 0, tokens)
    assert asks[0].prompt_tokens != asks[1].prompt_tokens
    found = router.submit(asks[1], 0.0)
    if most == 1000:
        placed(found)
    else:
        assert refused(found).code == "context_length_exceeded"
    router.apply_count(asks[1], 1001)
    assert asks[1].min_prompt_size == 1001


@pytest.mark.parametrize("cut", [None, -1, 101, "x"])
def test_truncation_does_not_bypass_max_prompt_tokens(cut: object) -> None:
    router, owner = router_of(spec("w")), tenant(max_prompt_tokens=100)
    for path in ("/v1/chat/completions", "/v1/messages"):
        body = chat("x" * 4000, max_tokens=1, truncate_prompt_tokens=cut)
        request = sized(router, body, path, owner)
        assert refused(router.submit(request, 0.0)).code == "context_length_exceeded"


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
def test_finish_charges_the_tokens_delivered(
    outcome: Outcome, seen: int, usage: Usage | None, used: int
) -> None:
    router, owner = router_of(spec("w")), tenant(tokens_per_minute=1000)
    lease = placed(router.submit(info_of(owner), 0.0))
    assert tokens_left(owner) == 850
    assert owner.virtual == 200
    if seen:
        router.leases.record_first_token(lease, 0.0)
        router.leases.record_tokens(lease, seen)
    router.leases.finish(lease, 0.0, outcome, usage)
    assert tokens_left(owner) == 1000 - used
    assert owner.ledger.running == 0
    prompt = 80 if usage else 100
    output = max(used - prompt, 0)
    assert owner.virtual == (prompt + 2 * output if used else 0)
    assert owner.totals.prompt_tokens + owner.totals.output_tokens == used
    router.leases.finish(lease, 0.0, outcome, usage)
    assert tokens_left(owner) == 1000 - used, "a second finish charges nothing"


@pytest.mark.parametrize(
    ("after_s", "output", "samples", "written"),
    [
        (0.0, 50, 1, 0),
        (-0.01, 50, 1, 0),  # before the first token
        (0.51, 50, 1, 25),
        (0.51, 50, 3, 75),
        (60.0, 50, 1, 50),
        (60.0, 50, 3, 150),
        (0.51, None, 1, 25),
        (60.0, None, 1, 900),  # the rest of the worker's context
    ],
)
@pytest.mark.parametrize("outcome", [Outcome.CLIENT_GONE, Outcome.UNFINISHED])
def test_unfinished_whole_answer_charges_tokens_written(
    after_s: float, output: int | None, samples: int, written: int, outcome: Outcome
) -> None:
    router, owner = router_of(spec("w", limit=1000)), tenant(tokens_per_minute=10_000)
    pace = worker_of(router, "w").pace
    pace.base_s, pace.sequence_s = 0.02, 0.0
    request = info_of(owner, 100, output, samples=samples, stream=False)
    lease = placed(router.submit(request, 0.0))
    router.leases.finish(lease, pace.first_token_s(100) + after_s, outcome)
    assert owner.totals.output_tokens == written
    assert owner.virtual == pytest.approx(100 + 2 * written)
    assert idle([worker_of(router, "w")])


# Streams without usage: events and decode time count


def charged(
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
    """Stream for `after_s` from the first token, at 20 ms a step; return the tokens charged.

    The answer begins after `begins_s`; the router sees tokens from `shows_s`.
    """
    router, owner = router_of(spec("w", limit=2000)), tenant()
    pace = worker_of(router, "w").pace
    pace.base_s, pace.sequence_s = 0.02, 0.0
    request = info_of(owner, 100, output, samples=samples)
    request.route = path
    lease = placed(router.submit(request, 0.0))
    first = pace.first_token_s(100)
    if begins_s is not None:
        router.leases.record_begin(lease, first + begins_s)
    if seen:
        router.leases.record_first_token(lease, first + shows_s)
        router.leases.record_tokens(lease, seen)
    router.leases.finish(lease, first + after_s + 0.001, outcome)
    assert owner.virtual == pytest.approx(100 + 2 * owner.totals.output_tokens)
    assert idle([worker_of(router, "w")])
    return owner.totals.output_tokens


ENDS = [Outcome.DONE, Outcome.CLIENT_GONE, Outcome.UNFINISHED]


@pytest.mark.parametrize("outcome", ENDS)
def test_event_of_many_tokens_is_charged_by_time(outcome: Outcome) -> None:
    """An engine with stream intervals, speculation or tool calls writes such events."""
    assert charged(outcome, after_s=6.0, seen=3) == 300
    assert charged(outcome, after_s=60.0, seen=3) == 500, "no more than the output limit"
    assert charged(outcome, after_s=2.0, seen=3, samples=4) == 400
    rest_of_context = charged(outcome, after_s=60.0, seen=3, output=None)
    assert rest_of_context == 1900


def test_hidden_tokens_are_charged_from_the_begin_of_an_answer() -> None:
    """A chat's role event comes with its first token, even if that token is hidden."""
    for output in (500, None):
        gone = charged(Outcome.CLIENT_GONE, after_s=4.0, seen=0, output=output)
        late = charged(Outcome.CLIENT_GONE, after_s=4.0, seen=1, shows_s=4.0, output=output)
        assert gone == late == 200
    assert charged(Outcome.CLIENT_GONE, after_s=4.0, begins_s=3.0, seen=0) == 50
    early = charged(Outcome.CLIENT_GONE, after_s=4.0, begins_s=-0.01, seen=0, path="responses")
    assert early == 200, "an event before the engine has begun is no token"
    unseen = charged(Outcome.CLIENT_GONE, after_s=4.0, begins_s=None, seen=0)
    assert unseen == 0, "nothing was written"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("pages", "written"),
    [
        ([], 1950),
        ([(0.4, 10), (2.501, 200)], 1950),  # no page since then
        ([(0.4, 10), (2.501, 200), (30.0, 200)], 100),
        ([(0.4, 10), (2.501, 200), (30.0, 900)], 1950),
        ([(-2.0, 10), (-1.0, 200), (0.4, 200)], 1950),  # the worker was idle before
    ],
)
def test_time_in_which_a_worker_hangs_is_not_charged(
    stream: bool, pages: list[tuple[float, int]], written: int
) -> None:
    router, owner = router_of(spec("w")), tenant()
    pace = worker_of(router, "w").pace
    pace.base_s, pace.sequence_s, pace.fixed_s, pace.token_s = 0.02, 0.0, 0.5, 0.0
    lease = placed(router.submit(info_of(owner, 100, 5000, stream=stream), 0.0))
    if stream:
        router.leases.record_first_token(lease, 0.5)
        router.leases.record_tokens(lease, 1)
    for at, computed in pages:
        router.fleet.health.set_gauges("w", Gauges(at=at, generation_tokens_total=computed))
    router.leases.finish(lease, 39.501, Outcome.CLIENT_GONE)
    assert owner.totals.output_tokens == written


def test_client_gone_in_a_handover_pays_for_the_decode_only() -> None:
    router = router_of(*SIDES, transfer=True, disaggregate_above=1)
    written = []
    for prefilled in (False, True):
        owner = tenant()
        lease = placed(router.submit(info_of(owner, 5000, 500, stream=False), 0.0))
        if prefilled:
            router.leases.end_prefill(lease, 60.0, None)
        decode_s = 100.5 * lease.worker.pace.step_s(1)
        now = 60.0 + present(lease.decision.handover).transfer_s + decode_s
        router.leases.finish(lease, now, Outcome.CLIENT_GONE)
        written.append(owner.totals.output_tokens)
    assert written == [0, 100]


def test_tokens_above_the_estimate_are_charged_as_they_pass() -> None:
    router, owner = router_of(spec("w")), tenant()
    lease = placed(router.submit(info_of(owner, 100, 10), 0.0))
    assert owner.virtual == 120
    router.leases.record_first_token(lease, 0.0)
    seen = []
    for _ in range(4):
        router.leases.record_tokens(lease, 5)
        seen.append(owner.virtual)
    assert seen == [120, 120, 130, 140]
    router.leases.finish(lease, 0.0, Outcome.DONE)
    assert owner.virtual == 140


@pytest.mark.parametrize("prompt_tokens", [2000, 1])
@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_expected_cached_tokens_are_charged_at_their_weight(
    prompt_tokens: int, weight: float
) -> None:
    router = router_of(spec("w"), fairness=FairnessSettings(cached_weight=weight))
    owner, prefix = tenant(), tuple(range(8))
    serve(router, info_of(owner, 1024, 0, prefix=prefix))
    before = owner.virtual
    lease = placed(router.submit(info_of(owner, 1024, 0, prefix=prefix), 1.0))
    cached = lease.decision.cached_tokens
    assert cached > 0
    free = (1 - weight) * cached
    assert owner.virtual - before == 1024 - free
    router.leases.finish(lease, 1.0, Outcome.DONE, Usage(prompt_tokens, 0))
    assert owner.virtual - before == max(prompt_tokens - free, 0)


@pytest.mark.parametrize(
    ("last", "usage"),
    [
        (Outcome.DONE, Usage(100, 50)),
        (Outcome.DONE, None),
        (Outcome.CLIENT_GONE, None),
        (Outcome.FAILED, None),
    ],
)
@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.MOOT])
def test_a_continued_stream_is_charged_once(
    outcome: Outcome, last: Outcome, usage: Usage | None
) -> None:
    router = router_of(spec("a"), spec("b"), retry_budget=1.0)
    owner = tenant(requests_per_minute=10, tokens_per_minute=1000, concurrency=1)
    request = info_of(owner)
    lease = placed(router.submit(request, 0.0))
    router.leases.record_first_token(lease, 0.0)
    router.leases.record_tokens(lease, 30)
    moves = outcome is Outcome.MOOT
    failure = LegFailure(outcome, None if moves else lease.worker, free=moves)
    again = router.retry(lease, 0.0, failure)
    assert isinstance(again, Lease)
    assert again.worker is not lease.worker
    assert owner.ledger.running == 1
    assert tokens_left(owner) == 1000 - 150  # as before
    refused(router.submit(info_of(owner), 0.0))  # concurrency
    router.leases.record_first_token(again, 0.0)
    router.leases.record_tokens(again, 20)
    router.leases.finish(again, 0.0, last, usage)
    assert (tokens_left(owner), owner.ledger.running, owner.virtual) == (850, 0, 200)
    assert (owner.totals.prompt_tokens, owner.totals.output_tokens) == (100, 50)
    assert idle([worker_of(router, "a"), worker_of(router, "b")])


def test_waiting_request_holds_and_releases_a_concurrency_slot() -> None:
    router, owner = router_of(spec("w", most=1)), tenant(concurrency=2, tokens_per_minute=1000)
    lease = placed(router.submit(info_of(owner), 0.0))
    ticket = waits(router.submit(info_of(owner), 0.0))
    assert refused(router.submit(info_of(owner), 0.0)).reason is Reason.LIMITED
    router.withdraw(ticket, 0.0)
    router.withdraw(ticket, 0.0)
    assert owner.ledger.running == 1
    waits(router.submit(info_of(owner), 0.0))
    _, end = pop_one(router, 31.0)
    assert refused(end).reason is Reason.WAITED_TOO_LONG
    assert owner.ledger.running == 1
    router.leases.finish(lease, 31.0, Outcome.CLIENT_GONE)
    assert (owner.ledger.running, owner.waiting) == (0, 0)
    assert idle([worker_of(router, "w")])


def test_refused_request_is_charged_nothing() -> None:
    router = router_of(spec("w", limit=500, most=1), queue_requests=0)
    owner = tenant(tokens_per_minute=1000)
    refused(router.submit(info_of(owner, 600), 0.0))
    placed(router.submit(info_of(tenant("other")), 0.0))
    assert refused(router.submit(info_of(owner), 0.0)).reason is Reason.QUEUE_FULL
    assert (tokens_left(owner), owner.ledger.running, owner.virtual) == (1000, 0, 0)


# Batch


def batch(prompt: int = 100, **fields: Any) -> RequestInfo:
    return info_of(tenant("batch", Rank.BATCH), prompt, **fields)


def test_batch_waits_until_an_eighth_of_slots_is_free() -> None:
    router = router_of(spec("w", most=8))
    held = [placed(router.submit(info_of(tenant()), 0.0)) for _ in range(7)]
    ticket = waits(router.submit(batch(), 0.0))
    last = placed(router.submit(info_of(tenant()), 0.0))
    assert router.pop_due(0.0) == []
    router.leases.finish(last, 0.0, Outcome.DONE)
    assert router.pop_due(0.0) == [], "an eighth is left free"
    for number, lease in enumerate(held):
        router.leases.record_first_token(lease, 0.1)
        if number < 2:
            router.leases.finish(lease, 0.1, Outcome.DONE)
    gone, answer = pop_one(router, 0.1)
    assert gone is ticket
    placed(answer)


def test_batch_leaves_room_in_the_kv_cache() -> None:
    router = router_of(spec("w"))
    worker_of(router, "w").kv_capacity = 1000
    placed(router.submit(info_of(tenant(), 400, 50), 0.0))
    waits(router.submit(batch(400), 0.0))
    placed(router.submit(info_of(tenant(), 400, 50), 0.0))


SIDES = (spec("p", Role.PREFILL), spec("d", Role.DECODE))
FULL = (spec("p", Role.PREFILL, most=1), spec("d", Role.DECODE))


@pytest.mark.parametrize("above", [1, 1000])
def test_short_batch_runs_without_a_prefill_worker(above: int) -> None:
    router = router_of(*SIDES, transfer=True, disaggregate_above=above)
    first = placed(router.submit(info_of(tenant(), 500_000), 0.0))
    assert first.prefill is not None
    lease = placed(router.submit(batch(20), 0.0))
    assert (lease.worker.name, lease.prefill) == ("d", None)


def test_long_batch_waits_for_a_slot_on_a_prefill_worker() -> None:
    router = router_of(*FULL, transfer=True, disaggregate_above=1000)
    first = placed(router.submit(info_of(tenant(), 50_000), 0.0))
    for _ in range(4):
        router.leases.record_first_token(
            placed(router.submit(info_of(tenant(), 10, 1000), 0.0)), 0.0
        )
    waits(router.submit(batch(12_000), 0.0))
    router.leases.end_prefill(first, 5.0, None)
    assert placed(pop_one(router, 5.0)[1]).prefill is not None


def test_long_batch_is_served_whole_without_prefill_workers() -> None:
    router = router_of(*SIDES, transfer=True, disaggregate_above=1000)
    router.fleet.roster.drain("p")
    router.leases.record_first_token(placed(router.submit(info_of(tenant(), 10, 1000), 0.0)), 0.0)
    assert placed(router.submit(batch(12_000), 0.0)).worker.name == "d"


def test_batch_waits_for_an_idle_prefill_worker() -> None:
    router = router_of(*SIDES, transfer=True, disaggregate_above=1)
    first = placed(router.submit(info_of(tenant(), 500_000), 0.0))
    assert first.prefill is not None
    ticket = waits(router.submit(batch(5000), 0.0))
    router.leases.end_prefill(first, 30.0, None)
    router.leases.record_first_token(first, 30.0)
    gone, answer = pop_one(router, 30.0)
    assert gone is ticket
    assert placed(answer).prefill is not None


@pytest.mark.parametrize(("error", "about"), [(0, ""), (20, "about ")])
def test_refusal_marks_an_estimated_size_with_about(error: int, about: str) -> None:
    router, owner = router_of(spec("w", limit=1000)), tenant(max_prompt_tokens=100)
    request = make_info(2000, None, error=error)
    refusal = refused(router.submit(request, 0.0))
    assert f"requested {about}2000 tokens ({about}2000 in the prompt, 0 for" in refusal.message
    assert refusal.param == "messages"
    request.route = "completions"
    assert refused(router.submit(request, 0.0)).param == "prompt"
    own = refused(router.submit(info_of(owner, 500, error=error), 0.0))
    assert f"this prompt has {about}500" in own.message


def test_tenant_that_a_request_leaves_is_published() -> None:
    router, owner = router_of(spec("w")), tenant(concurrency=2)
    lease = placed(router.submit(info_of(owner), 0.0))
    changed = ChangedTenants()
    owner.watches.add(changed)
    billing.leave(lease.info, 1.0)
    assert changed.pop_all() == {owner}
