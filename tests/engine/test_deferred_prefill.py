"""`deferred_prefill` on real scheduler objects: its definition, and closed loops on a set clock."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.schedulers import answer, drain, make_request, make_scheduler, step
from vllm_sched import PolicyScheduler
from vllm_sched.cost.step_time import StepShape, StepTime
from vllm_sched.engine.scheduler import PolicySteps


def loaded(options: dict[str, Any], outputs: list[int], prompt: int = 8, **engine: Any) -> Any:
    """Make a scheduler of four slots with requests named 0, 1, ... waiting."""
    config = {"deferred_prefill": options}
    scheduler = make_scheduler(config, **{"max_num_seqs": 4, "budget": 256, **engine})
    for name, output in enumerate(outputs):
        scheduler.add_request(make_request(prompt, output=output, name=str(name)))
    return scheduler


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Let the test set the time: the one item of the list."""
    now = [1000.0]
    monkeypatch.setattr(PolicySteps, "clock", lambda _: now[0])
    return now


def admissions(scheduler: Any, steps: int, clock: list[float] | None = None) -> list[set[str]]:
    """Run steps and return who was prefilled in each."""
    seen: set[str] = set()
    entered = []
    for _ in range(steps):
        new = set(step(scheduler)) - seen
        seen |= new
        entered.append(new)
        if clock is not None:
            clock[0] += 0.010
    return entered


def test_the_next_batch_enters_once_two_have_departed(clock: list[float]) -> None:
    scheduler = loaded({"departures": 2}, [2, 4, 6, 8, 5, 5, 5, 5])
    entered = admissions(scheduler, 6, clock)
    assert entered[0] == {"0", "1", "2", "3"}
    # The first leaves after two steps, the second after four: only then do two enter.
    assert entered[1:4] == [set(), set(), set()]
    assert entered[4] == {"4", "5"}
    assert entered[5] == set()


def test_upstream_would_have_let_each_in_at_once(clock: list[float]) -> None:
    scheduler = loaded({"departures": 1}, [2, 4, 6, 8, 5, 5, 5, 5])
    entered = admissions(scheduler, 5, clock)
    assert entered[2] == {"4"}
    assert entered[4] == {"5"}


def test_a_hold_ends_in_time(clock: list[float]) -> None:
    scheduler = loaded({"departures": 4, "max_delay_ms": 50}, [2, 90, 90, 90, 5, 5, 5, 5])
    entered = admissions(scheduler, 12, clock)
    late = next(n for n, new in enumerate(entered[1:], 1) if new)
    assert 3 <= late <= 7


def test_the_last_ones_are_not_held_for_company_that_never_comes(clock: list[float]) -> None:
    scheduler = loaded({"departures": 3}, [2, 9, 9, 9, 5, 5])
    assert admissions(scheduler, 3, clock)[2] == {"4"}


def test_a_full_cache_is_full_too(clock: list[float]) -> None:
    # Seven blocks of 16 tokens, one of which is upstream's own: three requests of two blocks.
    scheduler = loaded(
        {"departures": 2}, [2, 4, 14, 4, 4, 4], prompt=18, max_num_seqs=16, num_blocks=7
    )
    entered = admissions(scheduler, 5, clock)
    assert entered[0] == {"0", "1", "2"}
    assert entered[1:4] == [set(), set(), set()]
    assert entered[4] == {"3", "4"}


def test_one_who_is_held_is_looked_up_now_and_then(clock: list[float]) -> None:
    scheduler = loaded({"departures": 3}, [2, 40, 40, 40, 9, 9, 9, 9], prefix_caching=True)
    admissions(scheduler, 4, clock)
    lookups: list[str] = []
    prefixes = scheduler._planner.prefixes
    ask = prefixes.tokens
    prefixes.tokens = lambda r: lookups.append(r.request_id) or ask(r)
    assert "4" not in set().union(*admissions(scheduler, 12, clock))
    assert len(lookups) <= 3


def test_who_is_cached_is_not_held(clock: list[float]) -> None:
    scheduler = loaded({"departures": 3}, [2, 40, 40, 40], prefix_caching=True)
    shared = list(range(100, 164))
    scheduler.add_request(make_request(shared, output=40, name="first"))
    for name in ("x", "y", "z"):
        scheduler.add_request(make_request(8, name=name))
    admissions(scheduler, 4, clock)
    policy = scheduler._policies[0]
    assert policy.holding
    running = [request.request_id for request in scheduler.running]
    assert "first" not in running
    # The same prompt has been computed by another in the meantime.
    twin = make_request(shared, output=2, name="twin")
    manager = scheduler.kv_cache_manager
    assert manager.allocate_slots(twin, len(shared)) is not None
    twin.num_computed_tokens = len(shared)
    manager.cache_blocks(twin, len(shared))
    admissions(scheduler, 8, clock)
    assert "first" in [request.request_id for request in scheduler.running]


def test_apart_no_step_does_both(clock: list[float]) -> None:
    scheduler = loaded({"departures": 2, "exclusive": True}, [3, 4, 6, 8, 5, 5, 5, 5])
    seen: set[str] = set()
    for _ in range(40):
        tokens = step(scheduler)
        clock[0] += 0.010
        kinds = {name in seen for name in tokens}
        assert len(kinds) <= 1
        seen |= set(tokens)
    assert seen == set(map(str, range(8)))
    drain(scheduler)


@pytest.mark.parametrize(
    ("options", "enter"),
    [
        ({}, [0, 0, 4, 0, 0, 0]),
        ({"itl_ms": 80.0}, [0, 0, 2, 2, 0, 0]),
        ({"itl_ms": 80.0, "exclusive": True}, [0, 0, 2, 0, 2, 0]),
    ],
    ids=str,
)
def test_a_batch_enters_in_parts_where_its_gap_would_be_too_long(
    options: dict[str, Any], enter: list[int], clock: list[float]
) -> None:
    scheduler = loaded({"departures": 4, **options}, [40, 40, 40, 40, 3, 3, 3, 3], max_num_seqs=8)
    step(scheduler)
    fit = scheduler._policies[0].fit
    fit._model, fit.spread = StepTime(decode_fixed_s=0.010, prefill_s=0.001), 0.02
    for number in range(8):
        scheduler.add_request(make_request(30, output=5, name=f"next {number}"))
    entered = []
    for _ in enter:
        new = [tokens for tokens in step(scheduler).values() if tokens > 1]
        clock[0] += 0.010 + 0.001 * sum(new)
        entered.append(len(new))
    assert entered == enter
    drain(scheduler)


def closed_loop(options: dict[str, Any] | None, time: StepTime, clock: list[float]) -> float:
    """Keep 32 slots busy by a step's cost alone; returns requests per second."""
    policies = None if options is None else {"deferred_prefill": options}
    scheduler = make_scheduler(
        policies, max_num_seqs=32, budget=2048, scheduler_cls=PolicyScheduler
    )
    outputs = [1 + (17 * n * n + 29 * n) % 95 for n in range(1500)]
    done = sent = 0
    begun = clock[0]
    counted_from = 0
    while done < 1100:
        while len(scheduler.waiting) < 64:
            scheduler.add_request(make_request(20, output=outputs[sent], name=str(sent)))
            sent += 1
        running = {r.request_id: r for r in scheduler.running}
        output = scheduler.schedule()
        result = answer(scheduler, output)
        tokens = output.num_scheduled_tokens
        decodes = [running[name] for name in tokens if name in running]
        prefilled = sum(count for name, count in tokens.items() if name not in running)
        context = sum(request.num_tokens for request in decodes)
        clock[0] += time.seconds(StepShape(prefilled, 0.0, len(decodes), context))
        before = len(scheduler.requests)
        scheduler.update_from_output(output, result)
        done += before - len(scheduler.requests)
        if done < 300:
            begun, counted_from = clock[0], done
    return (done - counted_from) / (clock[0] - begun)


@pytest.mark.parametrize(("delta", "least"), [(0.0, 0.98), (0.030, 1.25)])
def test_auto_learns_from_the_real_scheduler_whether_it_pays(
    delta: float, least: float, clock: list[float]
) -> None:
    time = StepTime(decode_fixed_s=0.004, decode_s=1e-4, prefill_s=2e-5, mixed_s=delta)
    plain = closed_loop(None, time, clock)
    ours = closed_loop({}, time, clock)
    assert ours >= least * plain
