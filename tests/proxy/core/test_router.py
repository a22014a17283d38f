"""The public API of the router."""

from __future__ import annotations

from dataclasses import replace

import pytest

from proxy.core.fleet.charges import Fleet
from proxy.core.fleet.leases import RETRY_PAUSE_S, Attempts, Lease, LegFailure
from proxy.core.fleet.worker import MAX_UNRANKED, Worker
from proxy.core.model.types import Outcome, Reason, Refusal, Usage
from proxy.core.router import Router, RouterSettings
from tests.proxy.core.making import (
    GENERAL,
    LONG,
    MODEL,
    SHORT,
    chat,
    idle,
    make_info,
    notes,
    pinned_to,
    placed,
    pop_one,
    refused,
    router_of,
    serve,
    sized,
    spec,
    take_down,
    waits,
    worker_of,
    workers_named,
)

# Refusals


def test_explain_tells_a_request_that_would_wait_from_a_full_queue() -> None:
    router = router_of(spec("a", most=1), queue_requests=1)
    assert isinstance(router.submit(make_info(), 0.0), Lease)
    waiting = router.placer.explain(make_info(), 0.0)
    assert waits(router.submit(make_info(), 0.0))
    full = router.placer.explain(make_info(), 0.0)
    for outcome, reason, text in (
        (waiting, Reason.FLEET_FULL, "The request would wait: "),
        (full, Reason.QUEUE_FULL, "No worker takes the request now, and the queue is full: "),
    ):
        assert isinstance(outcome, Refusal)
        assert (outcome.status, outcome.reason) == (429, reason)
        assert outcome.message.startswith(text)


def learn_prose(router: Router, count: int = 300) -> None:
    """Serve uniform texts, so that the error of the bytes per token is small."""
    for n in range(count):
        info = sized(router, chat("x" * (2000 + 90 * n), max_tokens=500))
        usage = Usage(int(info.text_bytes / 4.2) + 7, 200)
        router.leases.finish(placed(router.submit(info, n)), n + 0.5, Outcome.DONE, usage)
    learned = router.sizer.learned(MODEL, "chat/completions")
    assert learned.error(20_000) < 0.1 * learned.tokens(20_000)


@pytest.mark.parametrize("per_token", [6, 12])
def test_uncertain_size_goes_to_the_largest_worker_and_teaches(per_token: int) -> None:
    """Padded tables have fewer tokens than prose of the same length."""
    router = router_of(spec("s", SHORT, 20_480), spec("l", LONG, 131_072))
    learn_prose(router)
    body = chat("x" * 90_000 * per_token, max_tokens=500)
    learned = router.sizer.learned(MODEL, "chat/completions")
    for now in range(400, 420):
        before = learned.bytes_per_token
        lease = placed(router.submit(sized(router, body), now))
        assert lease.worker.name == "l"
        assert lease.prefill_tokens <= 131_072
        router.leases.finish(lease, now + 0.5, Outcome.DONE, Usage(90_007, 200))
        assert before < learned.bytes_per_token < per_token
    take_down(router.fleet, "l")
    assert refused(router.submit(sized(router, body), 422.0)).status == 503, "no smaller worker"


def test_certainly_too_long_prompt_is_400() -> None:
    router = router_of(spec("s", SHORT, 2048), spec("l", LONG, 8192))
    learn_prose(router, 50)
    refusal = refused(router.submit(sized(router, chat("x" * 140_000)), 100.0))
    assert (refusal.status, refusal.code) == (400, "context_length_exceeded")
    assert "maximum context length is 8192 tokens" in refusal.message
    exact = sized(router, {"prompt": [1] * 8192, "max_tokens": 1}, "/v1/completions")
    assert "8193" in refused(router.submit(exact, 100.0)).message


def test_too_large_output_limit_goes_to_the_largest_worker() -> None:
    """As vLLM does with `cut_output`: clients that always send a large limit are served."""
    specs = spec("s", SHORT, 2048), spec("l", LONG, 8192), spec("t", SHORT, 2048)
    router = router_of(*specs, cut_output=True)
    info = sized(router, chat("hi", max_tokens=8190))
    assert placed(router.submit(info, 0.0)).worker.name == "l"
    router.fleet.roster.drain("l")
    assert refused(router.submit(info, 0.0)).status == 503


def test_smaller_worker_may_try_after_the_larger_failed() -> None:
    router = router_of(spec("s", SHORT, 8192), spec("l", LONG, 16_384, most=1))
    info = make_info(8000, 50, error=500)
    lease = placed(router.submit(info, 0.0))
    assert lease.worker.name == "l"
    waits(
        router.submit(make_info(8000, 50, error=500), 0.0)
    )  # the request waits for the full worker
    again = placed(router.submit_again(info, 0.0, Attempts(workers_named(router, "l"))))
    assert again.worker.name == "s"
    router.fleet.health.record_failure(lease.worker, 0.0, 60.0)
    assert [placed(end).worker.name for _, end in router.pop_due(0.1)] == ["s"]


def test_no_live_worker_is_503_with_retry_after() -> None:
    router = router_of(spec("a"), spec("b"), panic_threshold=0.0)
    for name, rest_s in (("a", 7.0), ("b", 9.0)):
        router.fleet.health.record_failure(worker_of(router, name), 0.0, rest_s)
    refusal = refused(router.submit(make_info(), 2.0))
    assert (refusal.status, refusal.reason, refusal.retry_after_s) == (503, Reason.NO_WORKER, 5.0)
    assert refused(Router(RouterSettings(), Fleet()).submit(make_info(), 0.0)).status == 503


def test_requests_wait_for_a_worker_not_probed_yet() -> None:
    fleet = Fleet()
    fleet.roster.add(spec("a"))
    refusal = refused(Router(RouterSettings(queue_requests=0), fleet).submit(make_info(), 0.0))
    assert (refusal.status, refusal.retry_after_s) == (503, 1.0)
    router = Router(RouterSettings(), fleet)
    ticket = waits(router.submit(make_info(), 0.0))
    assert router.pop_due(0.1) == []
    fleet.health.probe_ok("a", 0.2)
    assert [(t, placed(end).worker.name) for t, end in router.pop_due(0.2)] == [(ticket, "a")]


def test_draining_refuses_new_requests_and_serves_waiting_ones() -> None:
    router = router_of(spec("a", most=1))
    lease, ticket = placed(router.submit(make_info(), 0.0)), waits(router.submit(make_info(), 0.0))
    router.draining = True
    assert refused(router.submit(make_info(), 0.0)).reason is Reason.DRAINING
    retry = router.submit_again(make_info(), 0.0, Attempts(workers_named(router, "a")))
    assert refused(retry).status == 502
    router.leases.finish(lease, 1.0, Outcome.DONE)
    assert [(t, placed(end).worker.name) for t, end in router.pop_due(1.0)] == [(ticket, "a")]


# The queue


def test_full_queue_and_wait_timeout_are_429() -> None:
    router = router_of(spec("a", most=1), queue_wait_s=5.0, queue_requests=1)
    placed(router.submit(make_info(), 0.0))
    ticket = waits(router.submit(make_info(), 1.0))
    full = refused(router.submit(make_info(), 1.0))
    assert (full.status, full.reason, full.retry_after_s) == (429, Reason.QUEUE_FULL, 5)
    assert router.pop_due(5.9) == []
    gone, end = pop_one(router, 6.037)
    assert gone is ticket
    assert (refused(end).status, refused(end).reason) == (429, Reason.WAITED_TOO_LONG)
    assert "stayed busy for the 5 s that a request may wait" in refused(end).message
    assert router.pop_due(7.0) == []


# Retries


def test_retries_of_all_requests_are_bounded() -> None:
    router = router_of(*(spec(name) for name in "abcde"), retry_budget=0.1)

    def retry() -> list[object]:
        first = Attempts(workers_named(router, "a"))
        return [router.submit_again(make_info(), 0.0, first) for _ in range(30)]

    ends = retry()
    assert sum(isinstance(end, Lease) for end in ends) == 10
    assert all(refused(end).status == 502 for end in ends[10:])
    for _ in range(125):  # earns twelve
        serve(router, make_info())
    assert sum(isinstance(end, Lease) for end in retry()) == 12


def test_first_retry_of_a_failed_worker_s_request_needs_no_budget() -> None:
    router = router_of(*(spec(name) for name in "abcdef"), retry_budget=0.1)
    leases = [placed(router.submit(make_info(), 0.0)) for _ in range(12)]
    by_worker: dict[Worker, list[Lease]] = {}
    for lease in leases:
        by_worker.setdefault(lease.worker, []).append(lease)
    (failed, (first, second)), *_, (other, _) = by_worker.items()
    placed(router.retry(first, 0.1, LegFailure(Outcome.FAILED, failed)))
    while not isinstance(
        router.submit_again(make_info(), 0.1, Attempts(frozenset([other]))), Refusal
    ):
        pass  # until the budget is spent
    assert router.may_retry(second, 0.1, Attempts())
    assert not router.may_retry(second, 0.1, Attempts(frozenset([other]))), "its second worker"


def test_continued_request_that_waits_for_the_budget_pays_once() -> None:
    router = router_of(spec("a"), spec("b"), retry_budget=0.1)
    tried = workers_named(router, "a")
    while not isinstance(router.submit_again(make_info(), 0.0, Attempts(tried)), Refusal):
        pass
    ticket = waits(
        router.submit_again(make_info(), 0.0, Attempts(tried, continues=True, any_worker=True))
    )
    assert ticket.attempts.unpaid
    assert list(router.pop_due(0.0)) == []
    gone, end = pop_one(router, 2.0)  # two retries have been added
    assert gone is ticket
    assert not placed(end).attempts.unpaid
    assert isinstance(router.submit_again(make_info(), 2.0, Attempts(tried)), Lease)
    assert isinstance(router.submit_again(make_info(), 2.0, Attempts(tried)), Refusal)


def test_moved_worker_has_its_own_failure_event() -> None:
    """The first failure there takes from the budget, the next does not."""
    router = router_of(spec("a"), spec("b"))

    def fail(at: Worker, now: float, times: int) -> list[float]:
        leases = [placed(router.submit(make_info(), now)) for _ in range(2 * times)]
        own_leases = [lease for lease in leases if lease.worker is at][:times]
        left = []
        for lease in own_leases:
            placed(router.retry(lease, now + 0.1, LegFailure(Outcome.FAILED, at)))
            left.append(router._retries._budget)
        return left

    fail(worker_of(router, "a"), 0.0, 1)
    moved = replace(spec("a"), url="http://elsewhere")
    router.reconfigure(router.settings, [moved, spec("b")])
    router.fleet.health.probe_ok("a", 0.2)
    first, second = fail(worker_of(router, "a"), 0.2, 2)
    assert first == second


# Outcomes


def test_a_request_that_outgrew_its_worker_is_released_as_it_was_charged() -> None:
    """It was short there, and is long elsewhere."""
    router = router_of(spec("a", limit=2000), spec("b", limit=9000), short_limit=1500)
    lease = placed(router.submit(make_info(900, 50, error=700), 0.0))
    first = lease.worker
    assert first.name == "a"
    larger = router.leases.enlarge_request(lease)
    answer = router.retry(lease, 0.1, LegFailure(Outcome.REFUSED, first, free=True))
    again = placed(answer)
    assert (again.worker.name, again.info) == ("b", larger)
    assert (lease.info.long, larger.long) == (False, True)
    assert first.long_tokens == 0
    assert again.worker.long_tokens == larger.prompt_tokens
    router.leases.finish(again, 0.2, Outcome.DONE)
    assert idle(router.fleet.roster)


@pytest.mark.parametrize("free", [False, True])
def test_request_dropped_by_two_workers_is_502(free: bool) -> None:
    router = router_of(*(spec(f"w{n}") for n in range(9)), max_attempts=9, queue_requests=0)
    info = make_info()
    answer = router.submit(info, 0.0)
    for dropped in (False, True, False, True):  # the other workers did not act
        lease = placed(answer)
        failure = LegFailure(Outcome.FAILED, lease.worker, free=free, dropped=dropped)
        answer = router.retry(lease, 0.1, failure)
    refusal = refused(answer)
    assert (refusal.status, refusal.code) == (502, "request_dropped")
    assert len({*lease.attempts.tried, lease.worker}) == 4
    assert refusal.retry_after_s is None
    assert idle(router.fleet.roster)


@pytest.mark.parametrize("has_queue", [True, False])
def test_request_whose_worker_closed_its_connection_pauses(has_queue: bool) -> None:
    """Other workers of the same machine are about to fail; requests that arrive do not wait."""
    router = router_of(*(spec(name) for name in "abc"), queue_requests=9 if has_queue else 0)
    lease = placed(router.submit(make_info(), 0.0))
    failure = LegFailure(Outcome.FAILED, lease.worker, dropped=True)
    answer = router.retry(lease, 1.0, failure)
    router.leases.finish(placed(router.submit(make_info(), 1.0)), 1.0, Outcome.DONE)
    if has_queue:
        assert router.pop_due(1.0 + RETRY_PAUSE_S / 2) == []
        ticket, answer = pop_one(router, 1.0 + RETRY_PAUSE_S)
        assert ticket.attempts.drops == 1
    again = placed(answer)
    assert again.worker is not lease.worker
    router.leases.finish(again, 2.0, Outcome.DONE)
    assert idle(router.fleet.roster)


@pytest.mark.parametrize("stream", [True, False])
def test_client_timeouts_teach_that_a_worker_is_slow(stream: bool) -> None:
    """The worker passes its probes but hangs; requests come one by one, so it looks idle."""
    router, now, hung = router_of(spec("a"), spec("b")), 0.0, 0
    for _ in range(30):
        lease = placed(router.submit(make_info(output=10, stream=stream), now))
        bad = lease.worker.name == "a"
        hung += bad
        if bad:
            router.leases.finish(lease, now + 10.0, Outcome.CLIENT_GONE)
        else:
            if stream:
                router.leases.record_first_token(lease, now + 0.1)
            router.leases.finish(lease, now + 0.2, Outcome.DONE, Usage(100, 10))
        now += 11.0
    assert 0 < hung < 6


@pytest.mark.parametrize("stream", [True, False])
def test_early_client_disconnect_teaches_nothing(stream: bool) -> None:
    router = router_of(spec("a"))
    pace = worker_of(router, "a").pace
    before = pace.first_token_s(1000)
    for at in (0.0, 1.0):
        lease = placed(router.submit(make_info(output=100, stream=stream), at))
        router.leases.finish(lease, at + before / 20, Outcome.CLIENT_GONE)
    lease = placed(router.submit(make_info(stream=True), 2.0))
    router.leases.record_first_token(lease, 2.0 + before / 20)
    at_first = pace.first_token_s(1000)
    router.leases.finish(lease, 60.0, Outcome.CLIENT_GONE)  # a long stream is no wait
    assert pace.first_token_s(1000) == at_first <= before


def test_lateness_of_a_cached_prompt_counts_uncached_tokens() -> None:
    router = router_of(spec("a"))
    pace = worker_of(router, "a").pace
    text = chat("x" * 9000, stream=True)
    router.leases.finish(placed(router.submit(sized(router, text), 0.0)), 0.1, Outcome.DONE)
    lease = placed(router.submit(sized(router, text), 1.0))
    uncached = lease.info.prompt_tokens - lease.decision.cached_tokens
    assert uncached < lease.info.prompt_tokens / 2
    before = pace.first_token_s(uncached)
    late = pace.first_token_s(lease.info.prompt_tokens)
    router.leases.finish(lease, 1.0 + late, Outcome.CLIENT_GONE)
    assert pace.first_token_s(uncached) > before


def test_simultaneous_disconnects_teach_once() -> None:
    paces = []
    for clients in (1, 100):
        router = router_of(spec("a"))
        pace = worker_of(router, "a").pace
        for i in range(60):
            lease = placed(router.submit(make_info(), float(i)))
            router.leases.record_first_token(lease, i + 0.1)
            router.leases.finish(lease, i + 0.2, Outcome.DONE)
        leases = [placed(router.submit(make_info(), 100.0)) for _ in range(clients)]
        for lease in leases:
            router.leases.finish(lease, 130.0, Outcome.CLIENT_GONE)
        paces.append(pace.first_token_s(100))
    assert paces[0] >= paces[1] > 0.1


def test_late_unstreamed_answer_raises_the_step_time() -> None:
    router = router_of(spec("a"))
    pace = worker_of(router, "a").pace
    before = pace.first_token_s(100), pace.step_s(1)
    lease = placed(router.submit(make_info(output=1000, stream=False), 0.0))
    router.leases.finish(lease, 2 * (before[0] + 1000 * before[1]), Outcome.CLIENT_GONE)
    first, step = pace.first_token_s(100) / before[0], pace.step_s(1) / before[1]
    assert 1.0 < first < 1.1 < step <= 2.0


def test_only_the_success_of_a_trial_closes_a_breaker() -> None:
    router = router_of(spec("a"))
    worker = worker_of(router, "a")
    old = placed(router.submit(make_info(), 0.0))
    router.fleet.health.record_failure(worker, 1.0, 60.0)
    router.leases.finish(old, 2.0, Outcome.DONE)
    assert not worker.breaker.closed
    serve(router, make_info(stream=False), 61.0)
    assert worker.breaker.closed
    assert router.fleet.roster.ejections.ejected == set()


def test_abandoned_trial_allows_another_trial() -> None:
    router = router_of(spec("a"), panic_threshold=0.0)
    router.fleet.health.record_failure(worker_of(router, "a"), 0.0, 1.0)
    lease = placed(router.submit(make_info(), 1.0))
    assert refused(router.submit(make_info(), 1.1)).status == 503
    router.leases.finish(lease, 1.2, Outcome.CLIENT_GONE)
    placed(router.submit(make_info(), 1.2))


def test_stream_without_usage_teaches_by_its_events() -> None:
    router = router_of(spec("a"))
    pace = worker_of(router, "a").pace

    def stream(now: float, **fields: object) -> None:
        info = sized(router, chat("x" * 400, stream=True, n=2, **fields))
        lease = placed(router.submit(info, now))
        router.leases.record_first_token(lease, now + 0.2)
        router.leases.record_tokens(lease, 102)
        router.leases.finish(lease, now + 4.2, Outcome.DONE)

    for i in range(60):
        stream(10.0 * i)
    assert sized(router, chat("x")).expected_output == pytest.approx(51, abs=1)
    assert pace.step_s(1) == pytest.approx(0.08, rel=0.2)
    learned = pace.step_s(1), sized(router, chat("x")).expected_output
    for i in range(60, 90):  # a tool call may come in few events
        stream(10.0 * i, tools=[{"type": "function", "function": {"name": "f"}}])
    assert (pace.step_s(1), sized(router, chat("x")).expected_output) == learned


def test_reported_cache_misses_reduce_trust_in_the_cache() -> None:
    router = router_of(spec("a"))
    worker = worker_of(router, "a")
    for i in range(40):
        lease = placed(router.submit(sized(router, chat("x" * 9000, stream=True)), float(i)))
        cached = lease.decision.cached_tokens // 4
        router.leases.finish(lease, i + 0.5, Outcome.DONE, Usage(2500, 10, cached))
    assert worker.pace.evicted_share == pytest.approx(0.75, abs=0.05)


@pytest.mark.parametrize(("keeps", "missing"), [(True, 0.0), (False, 0.9)])
def test_cache_trust_is_learnt_from_times_without_reports(keeps: bool, missing: float) -> None:
    router = router_of(spec("a"))
    for i in range(200):
        letter = "xy"[i % 2]
        text = letter * 9000 if i % 4 < 2 else f"{i:09d}" * 1000  # repeated, or new
        lease = placed(router.submit(sized(router, chat(text, stream=True)), float(i)))
        tokens = lease.info.prompt_tokens
        if keeps:
            tokens -= lease.decision.cached_tokens
        router.leases.record_first_token(lease, i + 0.02 + 2e-4 * tokens)
        router.leases.finish(lease, i + 0.9, Outcome.DONE, Usage(2257, 10))
    assert worker_of(router, "a").pace.evicted_share == pytest.approx(missing, abs=0.2)


@pytest.mark.parametrize(
    ("path", "shorts"), [("/tokenize", 0), ("/v1/embeddings", 1), ("/v1/completions", 1)]
)
def test_only_computed_requests_count_as_traffic(path: str, shorts: int) -> None:
    router = router_of(spec("a"))
    info = sized(router, {"prompt": "hello world " * 20, "input": "hello world " * 20}, path)
    lease = placed(router.submit(info, 0.0))
    assert router.placer.traffic[MODEL].shorts_ever == shorts
    assert (lease.prefill_tokens > 0) == (shorts > 0)


# Explanations and counters


def test_explain_notes_why_a_worker_is_excluded() -> None:
    router = router_of(spec("a", GENERAL, 1000, most=1), spec("b", GENERAL, 100))
    assert refused(router.placer.explain(make_info(5000), 0.0)).reason is Reason.TOO_LONG
    placed(router.submit(make_info(500), 0.0))
    decision = refused(router.placer.explain(make_info(500), 0.0))
    assert decision.reason is Reason.FLEET_FULL
    assert notes(router, make_info(500), 0.0)["a"] == "full"
    router.fleet.health.record_failure(worker_of(router, "b"), 0.0, 9.0, busy=True)
    assert notes(router, make_info(50), 0.0)["b"] == "busy"


def test_explain_separates_reserved_from_costlier_workers() -> None:
    many = [spec(f"s{at}", SHORT, 8192) for at in range(MAX_UNRANKED + 1)]
    router = router_of(*many, spec("l", LONG, 65_536, most=1), panic_threshold=0.0)
    left_out = {*notes(router, make_info(10), 0.0).values()}
    assert left_out == {"", "higher cost than the chosen worker"}
    serve(router, make_info(20_000, long=True), 1.0)
    found = notes(router, make_info(10), 1.0)
    assert found.pop("l") == "reserved for long requests"
    assert {*found.values()} == left_out
    for worker in router.fleet.roster:
        if worker.role is SHORT:
            router.fleet.health.record_failure(worker, 1.0, 60.0)
    assert notes(router, make_info(10), 1.0)["l"] == ""
    placed(router.submit(make_info(20_000, long=True), 1.0))
    assert notes(router, make_info(10), 1.0)["l"] == "full"


def test_explain_refusal_names_the_reserve() -> None:
    router = router_of(spec("s", SHORT, 8192, most=1), spec("l", LONG, 65_536, most=1))
    serve(router, make_info(20_000, long=True), 1.0)
    placed(router.submit(make_info(10), 1.0))
    assert notes(router, make_info(10), 1.0) == {"s": "full", "l": "reserved for long requests"}
    assert (
        "reserved for long requests" in refused(router.placer.explain(make_info(10), 1.0)).message
    )


# Reloads


def test_reload_keeps_requests_in_flight() -> None:
    router = router_of(spec("a"), spec("b"))
    leases = [placed(router.submit(make_info(), 0.0)) for _ in range(4)]
    worker = worker_of(router, "a")
    router.reconfigure(
        RouterSettings(policy="round_robin", short_limit=5, queue_requests=7), [spec("a")]
    )
    assert worker_of(router, "a") is worker
    assert router.queue.max_requests == 7
    assert sized(router, chat("x" * 400)).long
    lease = placed(router.submit(make_info(), 1.0))
    assert (lease.worker.name, lease.decision.reason) == ("a", Reason.ROUND_ROBIN)
    for ended in (*leases, lease):
        router.leases.finish(ended, 2.0, Outcome.DONE, Usage(100, 50))
    assert idle({ended.worker for ended in leases})


# Pinned


def test_pinned_request_goes_to_its_draining_worker() -> None:
    router = router_of(spec("a"), spec("b", GENERAL, 1000))
    router.fleet.roster.drain("b")
    assert placed(router.submit(pinned_to("b"), 0.0)).worker.name == "b"
    assert refused(router.submit(pinned_to("b", 5000), 0.0)).reason is Reason.TOO_LONG
    take_down(router.fleet, "b")
    assert refused(router.submit(pinned_to("b"), 0.0)).status == 503


def test_pinned_request_waits_for_its_worker_only() -> None:
    router = router_of(spec("a"), spec("b", most=1))
    lease = placed(router.submit(pinned_to("b"), 0.0))
    ticket = waits(router.submit(pinned_to("b"), 0.0))
    placed(router.submit(make_info(), 0.1))
    router.leases.finish(lease, 1.0, Outcome.DONE)
    gone, end = pop_one(router, 1.0)
    assert (gone, placed(end).worker.name) == (ticket, "b")


@pytest.mark.parametrize(
    ("other", "may"),
    [("free", True), ("full", True), ("rests", False), ("down", False), ("failed it too", False)],
)
def test_request_may_be_retried_if_another_worker_may_take_it_now_or_once_free(
    other: str, may: bool
) -> None:
    router = router_of(spec("a", most=1), spec("b", most=1), panic_threshold=0.0)
    lease = placed(router.submit(make_info(), 0.0))
    [left] = [worker for worker in router.fleet.roster if worker is not lease.worker]
    if other == "full":
        placed(router.submit(make_info(), 0.0))
    elif other == "rests":
        for _ in range(3):
            router.fleet.health.record_failure(left, 0.0)
    elif other == "down":
        take_down(router.fleet, left.name)
    tried = workers_named(router, left.name) if other == "failed it too" else frozenset()
    assert router.may_retry(lease, 0.1, Attempts(tried)) is may
    assert not router.may_retry(lease, 0.1, Attempts(failures=9))
    # The attempt that would fail is the last one.
    earlier = router.settings.max_attempts - 1
    assert not router.may_retry(lease, 0.1, Attempts(tried, failures=earlier))
    assert router.may_retry(lease, 0.1, Attempts(tried, failures=earlier - 1)) is may
