"""`deferred_prefill` on real scheduler objects, with a set clock."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.engine.schedulers import answer, drain, make_request, make_scheduler, step
from vllm_sched import PolicyScheduler
from vllm_sched.cost.step_time import StepShape, StepTime
from vllm_sched.engine.scheduler import PolicySteps

PAUSES: dict[str, dict[str, object]] = {"prefill_first": {}}


def loaded(
    options: dict[str, Any],
    outputs: list[int],
    prompt: int = 8,
    others: Mapping[str, dict[str, object]] | None = None,
    **engine: Any,
) -> Any:
    """Return a scheduler of four slots with waiting requests named 0, 1, ..."""
    config = {**(others or {}), "deferred_prefill": options}
    scheduler = make_scheduler(config, **{"max_num_seqs": 4, "budget": 256, **engine})
    for name, output in enumerate(outputs):
        scheduler.add_request(make_request(prompt, output=output, name=str(name)))
    return scheduler


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a list whose item is the time."""
    now = [1000.0]
    monkeypatch.setattr(PolicySteps, "clock", lambda _: now[0])
    return now


def admissions(scheduler: Any, steps: int, clock: list[float] | None = None) -> list[set[str]]:
    """Run steps; return the requests that were admitted in each."""
    seen: set[str] = set()
    entered = []
    for _ in range(steps):
        new = set(step(scheduler)) - seen
        seen |= new
        entered.append(new)
        if clock is not None:
            clock[0] += 0.010
    return entered


def test_next_batch_enters_after_two_departures(clock: list[float]) -> None:
    scheduler = loaded({"departures": 2}, [2, 4, 6, 8, 5, 5, 5, 5])
    entered = admissions(scheduler, 6, clock)
    assert entered[0] == {"0", "1", "2", "3"}
    # The first departs after two steps, the second after four; then two enter.
    assert entered[1:4] == [set(), set(), set()]
    assert entered[4] == {"4", "5"}
    assert entered[5] == set()


def test_threshold_of_one_admits_each_at_once(clock: list[float]) -> None:
    scheduler = loaded({"departures": 1}, [2, 4, 6, 8, 5, 5, 5, 5])
    entered = admissions(scheduler, 5, clock)
    assert entered[2] == {"4"}
    assert entered[4] == {"5"}


def test_hold_ends_after_max_delay_ms(clock: list[float]) -> None:
    scheduler = loaded({"departures": 4, "max_delay_ms": 50}, [2, 90, 90, 90, 5, 5, 5, 5])
    entered = admissions(scheduler, 12, clock)
    late = next(n for n, new in enumerate(entered[1:], 1) if new)
    assert 3 <= late <= 7


def test_last_requests_are_not_held_for_a_full_batch(clock: list[float]) -> None:
    scheduler = loaded({"departures": 3}, [2, 9, 9, 9, 5, 5])
    assert admissions(scheduler, 3, clock)[2] == {"4"}


def test_full_kv_cache_holds_like_full_slots(clock: list[float]) -> None:
    # Seven blocks of 16 tokens, one of which is upstream's own: three requests of two blocks.
    scheduler = loaded(
        {"departures": 2}, [2, 4, 14, 4, 4, 4], prompt=18, max_num_seqs=16, num_blocks=7
    )
    entered = admissions(scheduler, 5, clock)
    assert entered[0] == {"0", "1", "2"}
    assert entered[1:4] == [set(), set(), set()]
    assert entered[4] == {"3", "4"}


def test_held_request_is_looked_up_rarely(clock: list[float]) -> None:
    scheduler = loaded({"departures": 3}, [2, 40, 40, 40, 9, 9, 9, 9], prefix_caching=True)
    admissions(scheduler, 4, clock)
    lookups: list[str] = []
    prefixes = scheduler._planner.prefixes
    ask = prefixes.tokens
    prefixes.tokens = lambda r: lookups.append(r.request_id) or ask(r)
    assert "4" not in set().union(*admissions(scheduler, 12, clock))
    assert len(lookups) <= 1


def test_cached_requests_share_the_fixed_cost_too(clock: list[float]) -> None:
    scheduler = loaded({"departures": 3}, [2, 40, 40, 40], prefix_caching=True)
    shared = list(range(100, 164))
    scheduler.add_request(make_request(shared, output=40, name="first"))
    for name in ("x", "y", "z"):
        scheduler.add_request(make_request(8, name=name))
    twin = make_request(shared, output=2, name="twin")
    manager = scheduler.kv_cache_manager
    assert manager.allocate_slots(twin, len(shared)) is not None
    twin.num_computed_tokens = len(shared)
    manager.cache_blocks(twin, len(shared))
    admissions(scheduler, 12, clock)
    assert scheduler._policies[0].holding
    assert "first" not in [request.request_id for request in scheduler.running]


def test_steps_with_paused_decodes_have_prefill_only(clock: list[float]) -> None:
    scheduler = loaded({"departures": 2}, [3, 4, 6, 8, 5, 5, 5, 5], others=PAUSES)
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
    ("options", "others", "enter"),
    [
        ({}, {}, [0, 0, 4, 0, 0, 0]),
        ({"itl_ms": 80.0}, {}, [0, 0, 2, 2, 0, 0]),
        ({"itl_ms": 80.0}, PAUSES, [0, 0, 2, 0, 2, 0]),
    ],
    ids=str,
)
def test_itl_target_splits_a_batch(
    options: dict[str, Any],
    others: dict[str, dict[str, object]],
    enter: list[int],
    clock: list[float],
) -> None:
    options = {"departures": 4, **options}
    outputs = [40, 40, 40, 40, 3, 3, 3, 3]
    scheduler = loaded(options, outputs, others=others, max_num_seqs=8)
    step(scheduler)
    fit = scheduler._policies[-1].fit
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
    """Return the requests per second of 32 busy slots with modelled step times."""
    policies = None if options is None else {"deferred_prefill": options}
    scheduler = make_scheduler(
        policies, max_num_seqs=32, budget=2048, scheduler_cls=PolicyScheduler
    )
    outputs = [1 + (17 * n * n + 29 * n) % 95 for n in range(1500)]
    done = sent = 0
    begun = clock[0]
    counted_from = 0
    while done < 700:
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
def test_auto_learns_whether_deferring_pays(delta: float, least: float, clock: list[float]) -> None:
    time = StepTime(decode_fixed_s=0.004, decode_s=1e-4, prefill_s=2e-5, mixed_s=delta)
    plain = closed_loop(None, time, clock)
    with_policy = closed_loop({}, time, clock)
    assert with_policy >= least * plain
