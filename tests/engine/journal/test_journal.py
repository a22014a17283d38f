"""The messages of a journal that follows vLLM's own schedulers."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from tests.engine.journal.reader import CacheReader
from tests.engine.schedulers import (
    BLOCK,
    answer,
    full_attention,
    make_request,
    make_scheduler,
    sliding_window,
)
from vllm_sched import PolicyScheduler, SyncPolicyScheduler
from vllm_sched.engine.journal import journal_requests
from vllm_sched.engine.journal.journal import Journal, StepMessage
from vllm_sched.engine.journal.scheduler import journal_of


class CachedTokens(Sequence[int]):
    """A request's tokens, other numbers for each adapter and salt: they share no blocks."""

    def __init__(self, request: Any) -> None:
        self._request = request
        adapter = request.lora_request.lora_int_id if request.lora_request else 0
        self._first = 1_000_000 * (10 * adapter + sum(map(ord, request.cache_salt or "")))

    def __len__(self) -> int:
        return len(self._request._all_token_ids)

    def __getitem__(self, which: Any) -> Any:
        return [self._first + token for token in self._request._all_token_ids[which]]


class Journaled:
    """A scheduler, its journal without a socket, and all its messages."""

    def __init__(
        self, policies: Mapping[str, Mapping[str, object]] | None = None, **options: Any
    ) -> None:
        options = {"prefix_caching": True, **options}
        self.scheduler = make_scheduler(policies, **options)
        self.journal: Journal = journal_of(self.scheduler)
        self.messages: list[StepMessage] = []
        self.tokens: dict[str, Any] = {}
        self.reader = CacheReader(self.tokens)
        free = self.scheduler._free_request

        def noted(request: Any, *args: Any, **kwargs: Any) -> Any:
            self.journal.record_end(request)
            return free(request, *args, **kwargs)

        self.scheduler._free_request = noted

    def add(self, tokens: Any, output: int = 4, **options: Any) -> Any:
        request = make_request(tokens, output=output, **options)
        self.tokens[request.request_id] = CachedTokens(request)
        self.journal.record_arrival(request)
        self.scheduler.add_request(request)
        return request

    def step(self) -> StepMessage | None:
        output = self.scheduler.schedule()
        self.journal.record_schedule(output)
        return self.take(self.scheduler.update_from_output(output, answer(self.scheduler, output)))

    def take(self, *outputs: Any) -> StepMessage | None:
        if (message := self.journal.pop_step(*outputs)) is not None:
            self.messages.append(message)
            self.reader.apply(message)
        return message

    def message(self) -> StepMessage:
        """Return what happened since the last message."""
        assert self.take() is not None
        return self.messages[-1]

    def all_of(self, field: str) -> list[Any]:
        """Return the values of a field in all messages, without empty ones."""
        return [value for message in self.messages if (value := getattr(message, field))]

    def drain(self) -> None:
        while self.scheduler.has_unfinished_requests():
            self.step()

    def hit(self, request: Any) -> int:
        """Return what vLLM would reuse for a new request."""
        found: int = self.scheduler.kv_cache_manager.get_computed_blocks(request)[1]
        return found


def test_messages_of_one_request() -> None:
    bench = Journaled(budget=64)
    request = bench.add(100, output=3)
    name = request.request_id
    assert [tuple(message) for _ in range(4) if (message := bench.step())] == [
        ([(1, name, 100)], [], False, [], [1, 64], [], [], [], [], [], [], [1, 0]),
        ([], [], False, [], [1, 96], [1], [], [7], [], [], [], []),
        ([], [], False, [], [], [1], [], [7], [], [], [], []),
        ([], [], False, [], [], [1], [], [7], [], [(1, "length")], [], []),
    ]
    assert bench.take() is None


def test_a_request_without_own_blocks_is_forgotten_at_its_end() -> None:
    bench = Journaled()
    for _ in range(2):
        bench.add([9] * 65, output=2)
        bench.drain()
    assert bench.messages[-1].forgotten == [2]
    assert [resident for resident in bench.all_of("resident") if resident[0] == 2] == [[2, 64]]
    assert bench.all_of("found") == [[1, 0], [2, 64]]


@pytest.mark.parametrize(("skips", "found"), [(False, [1, 16]), (True, [])])
def test_only_what_was_looked_up_in_the_cache_is_found(skips: bool, found: list[int]) -> None:
    bench = Journaled()
    request = bench.add(65)
    request.skip_reading_prefix_cache = skips
    output = bench.scheduler.schedule()
    [new] = output.scheduled_new_reqs
    new.num_computed_tokens = 64
    request.prefill_stats.set(65, num_local_cached_tokens=16, num_external_cached_tokens=48)
    bench.journal.record_schedule(output)
    assert bench.message().found == found


def test_abort_of_a_waiting_and_of_a_running_request() -> None:
    bench = Journaled(max_num_seqs=1)
    running, waiting = bench.add(20, output=9), bench.add(20)
    bench.step()
    for request in (running, waiting):
        bench.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
    message = bench.message()
    assert message.ended == [(1, "abort"), (2, "abort")]
    assert message.forgotten == [2]


def test_an_id_that_is_used_again_right_after_an_abort() -> None:
    bench = Journaled()
    bench.add(20, name="same", output=9)
    bench.step()
    bench.scheduler.finish_requests("same", RequestStatus.FINISHED_ABORTED)
    bench.add(40, name="same", output=2)
    bench.drain()
    assert bench.all_of("arrived") == [[(1, "same", 20)], [(2, "same", 40)]]
    assert bench.all_of("ended") == [[(1, "abort")], [(2, "length")]]
    assert bench.reader.output["same"] == [7, 7]


def test_a_reset_of_the_prefix_cache() -> None:
    bench = Journaled()
    request = bench.add(100)
    bench.drain()
    assert bench.scheduler.reset_prefix_cache()
    message = bench.message()
    assert (message.cleared, message.forgotten) == (True, [1])
    assert bench.reader.cached(request.prompt_token_ids) == 0
    bench.add(list(request.prompt_token_ids))
    bench.drain()
    assert bench.reader.cached(request.prompt_token_ids) == 96


def test_several_tokens_in_a_step() -> None:
    bench = Journaled()
    request = bench.add(20, output=30)
    while not request.num_output_tokens:
        bench.step()
    bench.scheduler.num_spec_tokens = 4
    request.spec_token_ids = [7, 7, 7, 7]
    output = bench.scheduler.schedule()
    bench.journal.record_schedule(output)
    update = bench.scheduler.update_from_output(output, answer(bench.scheduler, output))
    message = bench.take(update)
    assert message is not None
    assert message.tokens == [7, 7, 7]
    assert message.counts == [3]


def test_without_prefix_caching_nothing_is_resident() -> None:
    bench = Journaled(prefix_caching=False)
    bench.add(100)
    bench.drain()
    assert bench.all_of("resident") == bench.all_of("found") == []
    assert bench.messages[-1].ended == [(1, "length")]


def test_the_full_attention_group_counts() -> None:
    bench = Journaled(groups=(sliding_window(64), full_attention()), budget=256)
    bench.add(160, output=2)
    bench.drain()
    assert bench.all_of("resident") == [[1, 160]]


SCENES: dict[str, dict[str, Any]] = {
    "no policy": {},
    "long_prompt": {"policies": {"long_prompt": {}}},
    "synchronous": {"scheduler_cls": SyncPolicyScheduler},
    "two groups": {"groups": (full_attention(), full_attention())},
    "adapters": {"max_loras": 3},
    "salts": {},
}
# Of the requests in a scene.
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "adapters": [{"adapter": number} for number in range(3)],
    "salts": [{"salt": salt} for salt in (None, "a", "b")],
}


@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("seed", range(3))
def test_a_reader_knows_what_vllm_will_reuse(scene: str, seed: int) -> None:
    """Shared prefixes, evictions, preemptions and aborts: each prediction is exact."""
    rng = random.Random(seed)
    bench = Journaled(
        **{"scheduler_cls": PolicyScheduler, **SCENES[scene]},
        num_blocks=rng.choice([60, 150]),
        budget=rng.choice([64, 200]),
        max_num_seqs=rng.choice([4, 16]),
    )
    most, options = 50 * BLOCK, OPTIONS.get(scene, [{}])
    prompts = [[rng.randrange(5, 999) for _ in range(rng.randrange(10, 300))] for _ in range(4)]
    predictions = preempted = evicted = 0
    for _ in range(250):
        if rng.random() < 0.35 and len(bench.scheduler.requests) < 20:
            prompt = rng.choice(prompts)
            shared = prompt[: rng.choice([len(prompt), rng.randrange(len(prompt))])]
            prompt = shared + [rng.randrange(5, 999) for _ in range(rng.randrange(1, 200))]
            prompts = [*prompts[-11:], prompt[:most]]
            bench.add(prompt[:most], output=rng.randrange(1, 40), **rng.choice(options))
        if rng.random() < 0.03 and bench.scheduler.running:
            one = rng.choice(bench.scheduler.running)
            bench.scheduler.finish_requests(one.request_id, RequestStatus.FINISHED_ABORTED)
        bench.take()
        for request in bench.scheduler.requests.values():
            if request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
                predictions += 1
                assert bench.reader.cached(CachedTokens(request)) == bench.hit(request)
        if (message := bench.step()) is not None:
            preempted += len(message.preempted)
            evicted += len(message.evicted)
    assert predictions > 50
    assert evicted
    # What a reader that joins now would know.
    late = CacheReader(bench.tokens)
    bench.take()
    late.load(bench.journal.snapshot())
    assert late.blocks <= bench.reader.blocks
    assert late.ids == bench.reader.ids
    for prompt, some in product(prompts, options):
        request = make_request(prompt, **some)
        assert late.cached(CachedTokens(request)) == bench.hit(request)
    running = {request.request_id for request in bench.scheduler.requests.values()}
    assert {name: late.output[name] for name in running} == {
        name: bench.reader.output[name] for name in running
    }
    for name in running:
        tokens = bench.scheduler.requests[name].output_token_ids
        assert bench.reader.output[name] == list(tokens)


def test_preempted_requests_are_named_once() -> None:
    bench = Journaled(num_blocks=12, budget=200, max_num_seqs=4)
    requests = [bench.add(60, output=60) for _ in range(3)]
    for _ in range(60):
        was_preempted = {r.request_id for r in requests if r.status is RequestStatus.PREEMPTED}
        message = bench.step()
        named = [] if message is None else [bench.reader.ids[n] for n in message.preempted]
        now = {r.request_id for r in requests if r.status is RequestStatus.PREEMPTED}
        assert set(named) == now - was_preempted
        assert len(set(named)) == len(named)
    assert bench.all_of("preempted")


def test_names_that_come_before_during_and_after_their_requests() -> None:
    bench = Journaled()
    bench.journal.name("early", b"one")
    bench.add(40, name="chatcmpl-early-0123abcd", output=3)
    bench.step()
    bench.journal.name("sequences", b"two")
    for sequence in range(2):
        bench.add(40, name=f"{sequence}_cmpl-sequences-0-0123abcd", output=3)
    bench.drain()
    bench.journal.name("early", b"never changed")
    late = bench.add(40, name="cmpl-late-3-0123abcd", output=1)
    bench.drain()
    assert late.is_finished()
    bench.journal.name("late", b"three")
    assert bench.message().named == [(4, b"three")]
    named = [(1, b"one"), (2, b"two"), (3, b"two"), (4, b"three")]
    assert [entry for entries in bench.all_of("named") for entry in entries] == named
    assert [(row[0], row[3]) for row in bench.journal.snapshot()] == named


def test_an_early_name_is_used_once() -> None:
    bench = Journaled()
    bench.journal.name("same", b"first")
    for number in range(2):
        bench.add(20, name=f"cmpl-same-0-0123abc{number}", output=1)
        bench.drain()
    bench.journal.name("same", b"second")
    bench.take()
    assert [row[3] for row in bench.journal.snapshot()] == [b"first", b"second"]


def test_names_of_requests_that_never_arrive_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_requests, "MAX_EARLY_NAMES", 2)
    bench = Journaled()
    for client_id in ("a", "b", "c"):
        bench.journal.name(client_id, client_id.encode())
    bench.add(40, name="cmpl-a-0-0123abcd")
    bench.add(40, name="cmpl-c-0-0123abcd")
    assert bench.message().named == [(2, b"c")]


def test_without_full_attention_the_first_group_counts() -> None:
    bench = Journaled(groups=(sliding_window(64),), budget=256)
    bench.add(160, output=2)
    bench.drain()
    assert bench.all_of("resident") == [[1, 160]]
