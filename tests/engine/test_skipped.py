"""Waiting requests that vLLM skips begin when they can, and cost little."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future
from typing import Any
from unittest.mock import Mock

from tests.policies.making import Bench, add
from vllm_sched.engine.waiting.queue import MAX_RETRIES

MANY = 1_000


class SkipCountingBench(Bench):
    """A bench that counts the checks of skipped requests."""

    def __init__(self, policies: dict[str, dict[str, object]] | None = None, **engine: Any) -> None:
        super().__init__(policies or {"long_prompt": {}}, budget=4_096, max_num_seqs=64, **engine)
        self.checks: Counter[str] = Counter()
        ask = self.scheduler._handle_blocked_waiting_request

        def counting(request: Any) -> bool:
            self.checks[request.request_id] += 1
            return bool(ask(request))

        self.scheduler._handle_blocked_waiting_request = counting
        self.decode("d", output=2_000)
        self.checks.clear()


def test_requests_without_an_adapter_slot_are_checked_once() -> None:
    bench = SkipCountingBench(max_loras=1)
    bench.abort("d")
    bench.play(add("first", 5, output=100, adapter=1), 1)
    names = [f"r{number}" for number in range(MANY)]
    bench.add_all(dict.fromkeys(names, 5), output=1, adapter=2, hashed=False)
    bench.steps(10)
    assert bench.checks == Counter([*names, "first"])
    assert len(bench.scheduler.waiting) == MANY
    bench.until(lambda: "first" not in bench.running)
    assert len(bench.step()) == 64


def test_request_is_not_checked_while_its_grammar_compiles() -> None:
    bench = SkipCountingBench()
    grammars: list[Future[Any]] = [Future() for _ in range(MANY)]
    for number, grammar in enumerate(grammars):
        bench.add(f"g{number}", 5, output=1, grammar=grammar, hashed=False)
    bench.steps(5)
    assert set(bench.checks.values()) == {1}
    bench.play(add("plain", 5, output=1), {"d": 1, "plain": 5})
    for number in (700, 3):
        grammars[number].set_result(Mock())
    assert list(bench.step()) == ["d", "g3", "g700"]
    # A request with an invalid grammar ends at once.
    grammars[5].set_exception(ValueError("no such rule"))
    bench.step()
    assert "g5" not in bench.scheduler.requests


def add_with_pending_lookups(bench: SkipCountingBench, names: list[str]) -> set[str]:
    """Add requests with pending lookups in the KV connector; return their names."""
    pending = set(names)
    bench.scheduler.connector.get_num_new_matched_tokens = lambda request, _: (
        (None, False) if request.request_id in pending else (0, False)
    )
    bench.add_all(dict.fromkeys(names, 5), output=1, hashed=False)
    return pending


def test_many_pending_lookups_are_checked_in_turns() -> None:
    bench = SkipCountingBench(connector="SimulatedConnector")
    names = [f"r{number}" for number in range(MANY)]
    pending = add_with_pending_lookups(bench, names)
    bench.step()
    assert bench.checks == Counter(names)
    turns = -(-MANY // MAX_RETRIES)
    for _ in range(turns):
        bench.checks.clear()
        bench.step()
        assert bench.checks.total() <= MAX_RETRIES
    bench.checks.clear()
    bench.steps(turns)
    assert set(bench.checks) == set(names)
    pending -= {"r5", "r600"}
    entered = {name for step in bench.steps(turns) for name in step}
    assert entered == {"d", "r5", "r600"}


def test_few_pending_lookups_are_checked_in_each_step() -> None:
    bench = SkipCountingBench(connector="SimulatedConnector")
    pending = add_with_pending_lookups(bench, [f"r{number}" for number in range(MAX_RETRIES)])
    bench.steps(5)
    assert set(bench.checks.values()) == {5}
    pending.remove("r40")
    assert bench.step().keys() == {"d", "r40"}


def test_aborted_requests_leave_no_state() -> None:
    bench = SkipCountingBench(max_loras=1, connector="SimulatedConnector")
    bench.play(add("first", 5, output=500, adapter=1), 1)
    add_with_pending_lookups(bench, [f"r{number}" for number in range(200)])
    for number in range(200):
        bench.add(f"a{number}", 5, adapter=2, hashed=False)
        bench.add(f"g{number}", 5, grammar=Future(), hashed=False)
    bench.steps(3)
    queue = bench.scheduler.waiting
    assert len(queue) == 600
    bench.abort(*(r.request_id for r in queue))
    assert len(queue) == 0
    assert not queue
    bench.steps(2)
    assert not queue._heaps.set_aside
    assert not queue._turned_away
    assert not +queue.lane_counts.waiting
    assert not any(+sizes for sizes in queue._heaps._group_sizes.values())
    by_policy = queue.lane_counts.by_policy
    assert all(not count.requests for counts in by_policy for count in counts.values())
    assert not bench.scheduler._planner.admission.lora_slots._skipped_adapters
