"""Requests that bring the first tokens of their output."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
from vllm.v1.request import Request, RequestStatus

from tests.engine.schedulers import answer, drain, make_request, make_scheduler
from vllm_sched import PolicyScheduler, SyncPolicyScheduler
from vllm_sched.engine.continuation import output_so_far
from vllm_sched.engine.journal.scheduler import journal_of

SO_FAR = [11, 12, 13, 14, 15]


class Grammar:
    """A grammar that accepts any token but one."""

    def __init__(self, rejected: int = -1) -> None:
        self.seen: list[int] = []
        self._rejected = rejected

    def accept_tokens(self, _: str, tokens: list[int]) -> bool:
        self.seen += tokens
        return self._rejected not in tokens


def continued(prompt: int = 40, output: int = 20, tokens: object = SO_FAR, **more: Any) -> Request:
    """Return a request that brings five tokens."""
    return make_request(prompt, output=output, extra_args={"output_so_far": tokens}, **more)


def outputs_of(scheduler: Any, request: Request) -> list[list[int]]:
    """Run to the end; return the tokens of each step."""
    found = []
    while scheduler.has_unfinished_requests():
        output = scheduler.schedule()
        for of_client in scheduler.update_from_output(output, answer(scheduler, output)).values():
            found += [
                each.new_token_ids
                for each in of_client.outputs
                if each.request_id == request.request_id and each.new_token_ids
            ]
    return found


@pytest.mark.parametrize(
    ("kind", "policies"),
    [(PolicyScheduler, None), (PolicyScheduler, {"long_prompt": {}}), (SyncPolicyScheduler, None)],
)
def test_the_tokens_are_computed_and_returned_with_the_first_new_one(
    kind: type, policies: dict[str, Any] | None
) -> None:
    scheduler = make_scheduler(policies, scheduler_cls=kind, budget=16)
    request = continued(prompt=40, output=8)
    scheduler.add_request(request)
    assert request.num_tokens == 45
    assert outputs_of(scheduler, request) == [[*SO_FAR, 7], [7], [7]]
    assert request.status is RequestStatus.FINISHED_LENGTH_CAPPED
    # Of another request, only one token is missing.
    scheduler.add_request(request := continued(output=6))
    assert outputs_of(scheduler, request) == [[*SO_FAR, 7]]
    assert scheduler._continued.returned == {}


def test_the_cached_tokens_are_reused() -> None:
    scheduler = make_scheduler(prefix_caching=True, budget=256)
    first = continued(prompt=100, tokens=[7] * 30, output=64)
    whole = make_request(list(first.prompt_token_ids or ()), output=60)
    scheduler.add_request(whole)
    drain(scheduler)
    scheduler.add_request(first)
    output = scheduler.schedule()
    assert output.scheduled_new_reqs[0].num_computed_tokens == 128
    assert output.scheduled_new_reqs[0].prompt_token_ids == list(first.all_token_ids)


@pytest.mark.parametrize("cached", [0, 64, 128])
def test_the_counts_of_the_prompt_are_without_the_tokens(cached: int) -> None:
    """The client's usage shows them."""
    scheduler = make_scheduler(prefix_caching=True, budget=256)
    request = continued(prompt=101, tokens=[7] * 50, output=64)
    if cached:
        prompt = [*(request.prompt_token_ids or ()), *[7] * 50][: cached + 1]
        scheduler.add_request(make_request(prompt, output=1))
        drain(scheduler)
    scheduler.add_request(request)
    output = scheduler.schedule()
    assert output.scheduled_new_reqs[0].num_computed_tokens == cached
    outputs = scheduler.update_from_output(output, answer(scheduler, output))
    stats = outputs[0].outputs[0].prefill_stats
    assert stats is not None
    assert (stats.num_prompt_tokens, stats.num_cached_tokens) == (101, min(cached, 96))
    assert stats.num_computed_tokens == 101 - min(cached, 96)
    assert getattr(stats, "num_cache_creation_tokens", 0) <= 96 - min(cached, 96)


def test_min_tokens_counts_all_output() -> None:
    scheduler = make_scheduler()
    request = continued(min_tokens=7)
    given: Any = request.sampling_params
    scheduler.add_request(request)
    own: Any = request.sampling_params
    assert (given.min_tokens, own.min_tokens) == (7, 2)


@pytest.mark.parametrize("grammar", [False, True])
def test_an_abort_before_the_first_token_leaves_nothing(grammar: bool) -> None:
    scheduler = make_scheduler(budget=16)
    request = continued(grammar=Future() if grammar else None)
    scheduler.add_request(request)
    scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
    scheduler.add_request(make_request(20, output=2))
    drain(scheduler)
    assert scheduler._continued._pending == scheduler._continued.unseen_by_grammar == {}


def test_a_grammar_goes_on_behind_the_tokens() -> None:
    scheduler = make_scheduler()
    compiled: Future[Any] = Future()
    request = continued(output=8, grammar=compiled)
    scheduler.add_request(request)
    assert not scheduler.schedule().num_scheduled_tokens
    grammar = Grammar()
    compiled.set_result(grammar)
    scheduled = scheduler.schedule()
    assert grammar.seen == SO_FAR
    scheduler.update_from_output(scheduled, answer(scheduler, scheduled))
    assert outputs_of(scheduler, request) == [[7], [7]]
    assert grammar.seen == [*SO_FAR, 7, 7, 7]
    assert scheduler._continued.unseen_by_grammar == {}


class BrokenGrammar(Grammar):
    def accept_tokens(self, _: str, tokens: list[int]) -> bool:
        raise ValueError("no next state", tokens)


@pytest.mark.parametrize(
    "grammar",
    [Grammar(rejected=SO_FAR[2]), BrokenGrammar(), ValueError("no such rule")],
    ids=["rejects", "fails", "does not compile"],
)
def test_a_grammar_without_the_tokens_ends_only_its_request(grammar: Any) -> None:
    scheduler = make_scheduler()
    compiled: Future[Any] = Future()
    request = continued(output=8, grammar=compiled)
    scheduler.add_request(request)
    scheduler.add_request(other := make_request(20, output=2))
    if isinstance(grammar, Exception):
        compiled.set_exception(grammar)
    else:
        compiled.set_result(grammar)
    drain(scheduler)
    assert request.status is RequestStatus.FINISHED_ERROR
    assert other.status is RequestStatus.FINISHED_LENGTH_CAPPED
    assert request.request_id not in scheduler.requests
    assert scheduler._continued.unseen_by_grammar == scheduler._continued._pending == {}


@pytest.mark.parametrize(
    ("ended", "tokens", "goes_on"),
    [(None, 5, False), (True, 5000, True), (False, 5, True), (False, 5000, False)],
)
def test_a_grammar_after_reasoning(ended: bool | None, tokens: int, goes_on: bool) -> None:
    scheduler = make_scheduler(max_model_len=16_384)
    scheduler.structured_output_manager.reasoner_cls = object
    request = continued(output=8000, tokens=[3] * tokens, grammar=Future())
    assert request.structured_output_request is not None
    request.structured_output_request.reasoning_ended = ended
    scheduler.add_request(request)
    assert (request.num_tokens > 40) == goes_on


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": []}, {"tokens": "text"}, {"tokens": [1, "2"]}, {"tokens": [-1]},
        {"tokens": [True]}, {"tokens": [1 << 30]}, {"tokens": [1.0]}, {"output": 5},
        {"logprobs": 1}, {"prompt_logprobs": 1}, {"prompt": 1996, "output": None},
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_continued_begins_anew(change: dict[str, Any]) -> None:
    scheduler = make_scheduler()
    change = {"output": 8, **change}
    if change["output"] is None:
        change["output"] = 100
    request = continued(**change)
    before = request.num_tokens
    scheduler.add_request(request)
    assert request.num_tokens == before
    assert outputs_of(scheduler, request)[0] == [7]


def test_the_journal_has_all_tokens() -> None:
    scheduler = make_scheduler()
    journal = journal_of(scheduler)
    request = continued(prompt=40, output=10)
    journal.record_arrival(request)
    scheduler.add_request(request)
    assert journal.snapshot()[0][2:] == (40, b"", 0, True, [])
    published = []
    for _ in range(3):
        output = scheduler.schedule()
        journal.record_schedule(output)
        message = journal.pop_step(scheduler.update_from_output(output, answer(scheduler, output)))
        assert message is not None
        published += message.tokens
    assert published == [*SO_FAR, 7, 7, 7]
    assert journal.snapshot()[0][6] == published


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        ([0, 5], [0, 5]),
        ([5, -1], []),
        ([5, 1.0], []),
        ([True], []),
        ((5,), []),
        ("5", []),
        (None, []),
    ],
)
def test_only_a_list_of_token_ids_is_output_so_far(given: object, tokens: list[int]) -> None:
    assert output_so_far(continued(tokens=given)) == tokens
