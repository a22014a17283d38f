"""LoRA adapters under policies: slots are respected, and each adapter is served in time."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from tests.engine.schedulers import make_request, until
from tests.policies.making import Bench, add
from vllm_sched.engine.waiting.heaps import MAX_DEAD_ENTRIES
from vllm_sched.engine.waiting.lora_slots import MAX_KEPT_STEPS, MAX_WAIT_S
from vllm_sched.policies import registry

WORLDS_PER_SET = 12
STEP_S = 0.05
MAX_STEPS = 6_000
SINGLE = list(registry.POLICIES)
PAIRS = [list(pair) for pair in itertools.combinations(SINGLE, 2) if pair not in registry.CONFLICTS]
LARGEST = [
    ["lanes", "long_prompt", "deferred_prefill", "rotation", "chunk_budget"],
    ["static_batching", "lanes", "long_prompt", "rotation", "chunk_budget"],
    ["static_batching", "prefill_first", "lanes"],
    ["prefill_first", "lanes", "deferred_prefill"],
]
SETS = [*([name] for name in SINGLE), *PAIRS, *LARGEST]
# Settings that leave running requests out of a step more often than the defaults do.
EAGER: dict[str, list[dict[str, Any]]] = {
    "static_batching": [{}, {"size": 3}],
    "prefill_first": [{}, {"max_pause_s": 0.2}],
    "lanes": [{}, {"batch_share": 0.05}],
    "long_prompt": [{}, {"max_long_partial_prefills": 2}, {"long_prefill_token_threshold": 100}],
    "deferred_prefill": [{}, {"departures": 2}],
    "rotation": [{}, {"chunk": 16}],
    "chunk_budget": [{}, {"chunk": 8}],
}


class World(Bench):
    """A bench with random requests, adapters and events."""

    def __init__(self, names: list[str], seed: int) -> None:
        rng = self.rng = random.Random(f"{names}{seed}")
        self.max_loras = rng.choice([1, 2, 4])
        self.transfers = rng.random() < 0.3
        super().__init__(
            {name: rng.choice(EAGER[name]) for name in names},
            ahead=rng.choice([False, True]),
            budget=rng.choice([32, 64, 256]),
            max_num_seqs=rng.choice([3, 6, 16]),
            # The smallest holds two of the longest requests: running requests are preempted.
            num_blocks=rng.choice([60, 100, 450]),
            priority=rng.random() < 0.3,
            max_loras=self.max_loras,
            connector="SimulatedConnector" if self.transfers else None,
        )
        self.fetching: list[str] = []
        self.coming = rng.randrange(4, 9)

    def run(self) -> None:
        for _ in range(MAX_STEPS):
            if self.coming and self.rng.random() < 0.7:
                self.arrive()
            self.step(STEP_S)
            self.have_events()
            if not (self.coming or self.scheduler.requests):
                self.drain()
                assert self.scheduler.kv_cache_manager.usage == 0
                return
        raise AssertionError(f"requests never finished: {sorted(self.scheduler.requests)}")

    def arrive(self) -> None:
        rng = self.rng
        self.coming -= 1
        request = make_request(
            rng.choice([3, 20, 60, 90, 200, 400]),
            output=rng.choice([1, 4, 12]),
            priority=rng.choice([-1, 0, 0, 1]),
            adapter=rng.choice([0, rng.randrange(1, self.max_loras + 3)]),
            hashed=False,
        )
        if self.transfers and rng.random() < 0.5:
            request.kv_transfer_params = {"do_remote_prefill": True}
        self.scheduler.add_request(request)

    def have_events(self) -> None:
        """Check the slots, finish some KV transfers and abort a request."""
        scheduler, rng = self.scheduler, self.rng
        assert len(adapters_running(self)) <= self.max_loras
        if self.transfers:
            self.fetching += scheduler.connector.new_fetches
            scheduler.connector.new_fetches = {}
            fetched = {name for name in self.fetching if rng.random() < 0.2}
            self.fetching = [name for name in self.fetching if name not in fetched]
            self.receive(*fetched & scheduler.requests.keys())
        if scheduler.requests and rng.random() < 0.02:
            self.abort(rng.choice(sorted(scheduler.requests)))


def adapters_running(bench: Bench) -> set[int]:
    return {r.lora_request.lora_int_id for r in bench.scheduler.running if r.lora_request}


@pytest.mark.parametrize("names", SETS, ids="+".join)
def test_adapters_never_exceed_their_slots_and_all_requests_finish(names: list[str]) -> None:
    for seed in range(WORLDS_PER_SET):
        World(names, seed).run()


def test_running_request_without_tokens_keeps_its_adapter_slot() -> None:
    bench = Bench({"rotation": {}}, max_loras=1)
    for name in ("one", "other"):
        bench.add(name, 300, adapter=1)
        bench.step()
    bench.add("waits", 300, adapter=2)
    for _ in range(4):  # each prompt has every second step
        assert len(bench.step()) == 1
        assert bench.running == {"one", "other"}
    bench.until(lambda: "waits" in bench.running)
    assert bench.running == {"waits"}
    bench.drain()


def test_requests_enter_in_order_after_waiting_for_an_adapter_slot() -> None:
    bench = Bench({"long_prompt": {}}, max_loras=1)
    bench.play(add("first", 10, output=20, adapter=2), 2)
    names = [f"r{number}" for number in range(6)]
    for name in names:
        bench.play(add(name, 30, output=1, adapter=1), 1)
    bench.add("plain", 10, output=1)
    assert "plain" in bench.step()
    assert bench.running == {"first"}
    bench.until(lambda: "first" not in bench.running)
    assert list(dict.fromkeys(name for step in bench.steps(6) for name in step)) == names


class Streams:
    """Adapters with endless requests, so that they keep their slots."""

    def __init__(self, max_loras: int = 1, **engine: Any) -> None:
        self.bench = Bench({"long_prompt": {}}, max_loras=max_loras, **engine)
        self.adapters = range(1, max_loras + 1)
        self.sent = 0

    def step(self) -> dict[str, int]:
        """Run a step of a tenth of a second, with two waiting requests of each adapter."""
        waiting = [r.lora_request.lora_int_id for r in self.bench.scheduler.waiting]
        for adapter in self.adapters:
            if waiting.count(adapter) < 2:
                self.sent += 1
                self.bench.add(f"s{self.sent}", 20, output=20 * adapter, adapter=adapter)
        return self.bench.step(0.1)

    def steps(self, count: int) -> list[dict[str, int]]:
        return [self.step() for _ in range(count)]

    def seconds_until(self, adapter: int) -> float:
        """Return the time until a request of this adapter runs."""
        begun = self.bench.now
        until(self, lambda: adapter in adapters_running(self.bench), 2_000, Streams.step)
        return self.bench.now - begun


@pytest.mark.parametrize("max_loras", [1, 2, 4])
def test_adapter_gets_a_slot_within_its_bound(max_loras: int) -> None:
    streams = Streams(max_loras)
    streams.steps(50)
    streams.bench.add("x", 20, output=5, adapter=9)
    # The bound, the time that an adapter keeps its slot, and an answer.
    assert streams.seconds_until(9) <= 2 * MAX_WAIT_S + 20 * max_loras * 0.1
    # The adapter that made room has its turn again.
    assert streams.seconds_until(1) <= MAX_WAIT_S + 10.0


def test_adapters_take_turns_with_a_slot() -> None:
    streams = Streams(max_loras=1)
    streams.adapters = range(1, 4)
    ran: list[int] = []  # adapters in the order of their turns
    begun: list[float] = []
    while len(ran) < 8:
        streams.step()
        for adapter in adapters_running(streams.bench):
            if ran[-1:] != [adapter]:
                ran.append(adapter)
                begun.append(streams.bench.now)
    assert ran[2:] == [*ran[2:5], *ran[2:5]]
    assert set(ran[2:5]) == {1, 2, 3}
    # A turn is longer than one answer.
    turns = [end - start for start, end in itertools.pairwise(begun)]
    assert min(turns) >= MAX_WAIT_S / 2


def test_wait_for_an_adapter_slot_with_kv_blocks_is_bounded() -> None:
    streams = Streams(connector="SimulatedConnector")
    bench = streams.bench
    remote = bench.add("remote", 100, output=5, adapter=2)
    remote.kv_transfer_params = {"do_remote_prefill": True}
    bench.steps(2)
    assert remote.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    streams.steps(20)
    bench.receive("remote")
    assert MAX_WAIT_S <= streams.seconds_until(2) <= MAX_WAIT_S + 3.0


def test_slot_is_kept_briefly_for_a_blocked_request() -> None:
    streams = Streams()
    streams.steps(20)
    streams.bench.add("stuck", 20, adapter=2)
    streams.steps(20)
    streams.bench.turn_away("stuck")
    idle = streams.steps(1_000).count({})
    assert 0 < idle <= 1_000 * 0.1 / MAX_WAIT_S * (MAX_KEPT_STEPS + 1)


def test_one_free_slot_is_kept_for_the_overdue_adapter() -> None:
    bench = Bench({"long_prompt": {}}, max_loras=3)
    for adapter in (1, 2, 3):
        bench.add(f"first {adapter}", 20, output=2_000, adapter=adapter)
    bench.steps(2)
    bench.add("stuck", 20, adapter=4)
    for _ in range(int(MAX_WAIT_S)):
        bench.step(1.1)
    bench.turn_away("stuck")
    bench.abort("first 1", "first 2")
    bench.add("next", 20, output=100, adapter=5)
    assert "next" in bench.step()
    bench.add("last", 20, adapter=6)
    assert not any("last" in step for step in bench.steps(MAX_KEPT_STEPS // 2))


def test_free_slot_is_not_kept_for_an_adapter_before_its_bound() -> None:
    bench = Bench({"long_prompt": {}}, max_loras=2)
    for adapter in (1, 2):
        bench.add(f"first {adapter}", 20, output=2_000, adapter=adapter)
    bench.steps(2)
    bench.add("stuck", 20, adapter=3)
    bench.step(MAX_WAIT_S / 2)
    bench.turn_away("stuck")
    bench.abort("first 1")
    bench.add("next", 20, adapter=4)
    assert "next" in bench.step()


def test_unused_adapters_leave_no_state() -> None:
    bench = Bench({"long_prompt": {}}, max_loras=1)
    bench.add("first", 20, output=10_000, adapter=1, hashed=False)
    bench.step()
    for adapter in range(2, 302):
        bench.add(f"r{adapter}", 20, adapter=adapter, hashed=False)
        bench.step()
        bench.abort(f"r{adapter}")
    assert len(bench.scheduler.waiting._heaps._group_sizes) <= 2 * MAX_DEAD_ENTRIES
    assert len(bench.scheduler.waiting._heaps.lanes) <= 2 * MAX_DEAD_ENTRIES


def test_adapter_without_requests_claims_no_slot() -> None:
    streams = Streams()
    streams.steps(20)
    streams.bench.add("x", 20, adapter=2)
    streams.step()
    streams.bench.abort("x")
    assert all(streams.steps(500))
