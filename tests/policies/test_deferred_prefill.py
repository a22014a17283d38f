"""Deferred prefill: single holds, the scheduler's part, and the gain in a simulated closed loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from tests.policies.closed_loop import ClosedLoop, FakeRequest
from tests.policies.making import Bench
from vllm_sched.cost.backlog_model import BacklogModel
from vllm_sched.cost.recursion import Recursion
from vllm_sched.cost.step_time import StepShape, StepTime
from vllm_sched.errors import UsageError
from vllm_sched.policies import registry
from vllm_sched.policies.deferral import threshold
from vllm_sched.policies.deferred_prefill import DEFERRABLE, DIRECT, DeferredPrefill
from vllm_sched.policies.kv_cache import KvCache, KvGroup
from vllm_sched.policies.types import EngineFacts, Gate, LaneCount, Step, StepResult

FACTS = EngineFacts(max_model_len=32_768, max_num_batched_tokens=2048, max_num_seqs=32)
HEAD = FakeRequest("head")
OPEN, CLOSED = Gate.OPEN, Gate.CLOSED
PAUSES: dict[str, dict[str, object]] = {"prefill_first": {}}


def built(**settings: object) -> DeferredPrefill:
    return built_after({}, **settings)


def built_after(others: Mapping[str, Mapping[str, object]], **settings: object) -> DeferredPrefill:
    """Build the policy in a stack with other policies."""
    *_, policy = registry.build({**others, "deferred_prefill": settings}, FACTS)
    assert isinstance(policy, DeferredPrefill)
    return policy


class Driver:
    """Steps a policy by hand; times in milliseconds."""

    def __init__(self, policy: DeferredPrefill) -> None:
        self.policy = policy
        self.index = 0
        self.ms = 0.0

    def step(
        self,
        *,
        free: int,
        waiting: int = 100,
        departed: int = 0,
        kv_free: float = 1.0,
        refused: bool = False,
        running: int | None = None,
        head: FakeRequest = HEAD,
        took_ms: float = 10.0,
    ) -> Gate:
        self.index += 1
        self.ms += took_ms
        step = Step(
            index=self.index,
            now=self.ms / 1000,
            budget=2048,
            decode_tokens=32 - free,
            prefills=(),
            free_slots=free,
            kv_blocked="head" if refused else None,
            num_running=32 - free if running is None else running,
            num_waiting=waiting,
            num_departed=departed,
            kv_free=kv_free,
        )
        self.policy.begin_step(step, {DEFERRABLE: LaneCount(waiting, 0, 0.0)})
        return self.policy.gate(DEFERRABLE, head, 0.0)

    def admit(self, count: int) -> None:
        for number in range(count):
            self.policy.admitted(FakeRequest(f"in-{self.index}-{number}"))

    def fill(self) -> None:
        assert self.step(free=32) is OPEN
        self.admit(32)


def holding(**settings: object) -> Driver:
    """Return a filled engine after one departure, which holds admissions."""
    driver = Driver(built(**{"departures": 4, **settings}))
    driver.fill()
    assert driver.step(free=1, departed=1) is CLOSED
    return driver


# In the cache, twelve requests leave too little for the head.
FULL_CACHE = {"free": 20, "running": 12, "kv_free": 0.04, "refused": True}


@pytest.mark.parametrize(
    ("settings", "step", "end"),
    [
        pytest.param({}, {"free": 4, "departed": 3}, "departures", id="departures"),
        pytest.param({}, {"free": 1, "waiting": 3}, "few", id="too few requests wait"),
        pytest.param({}, {"free": 31, "running": 0}, "idle", id="nothing runs"),
        pytest.param({"max_delay_ms": 100}, {"free": 0, "took_ms": 100}, "overdue", id="bound"),
    ],
)
def test_end_of_a_hold_for_slots(
    settings: dict[str, object], step: dict[str, float], end: str
) -> None:
    driver = holding(**settings)
    assert driver.step(free=3) is CLOSED
    assert driver.step(**step) is OPEN  # type: ignore[arg-type]
    counted = driver.policy.counters()
    assert counted[f"holds_ended_{end}"] == 1
    assert counted["starvation_releases"] == (end == "overdue")


@pytest.mark.parametrize(
    ("steps", "end"),
    [
        pytest.param(
            [(22, 10, 0.1, 2, CLOSED), (24, 8, 0.2, 2, OPEN)], "departures", id="departures"
        ),
        # The departed request held as much KV as four typical ones.
        pytest.param([(21, 11, 0.37, 1, OPEN)], "room", id="freed tokens"),
    ],
)
def test_end_of_a_hold_for_a_full_cache(
    steps: list[tuple[int, int, float, int, Gate]], end: str
) -> None:
    driver = Driver(built(departures=4))
    assert driver.step(**FULL_CACHE) is CLOSED  # type: ignore[arg-type]
    for free, running, kv_free, departed, gate in steps:
        found = driver.step(
            free=free, running=running, kv_free=kv_free, departed=departed, refused=True
        )
        assert found is gate
    assert driver.policy.counters()[f"holds_ended_{end}"] == 1


@pytest.mark.parametrize("departures", [1, "auto"])
def test_threshold_of_one_departure_never_holds(departures: object) -> None:
    """Without measurements it is one."""
    driver = Driver(built(departures=departures))
    driver.fill()
    assert driver.step(free=1, departed=1) is OPEN
    assert driver.policy.gauges()["k"] == 1


# Bounds


def test_fewer_departures_end_a_hold_in_its_second_half() -> None:
    driver = holding(departures=8, max_delay_ms=1000)
    assert driver.step(free=4, took_ms=490) is CLOSED
    assert driver.step(free=4, took_ms=200) is CLOSED  # 8 * 2 * 0.31, rounded up: 5
    assert driver.step(free=4, took_ms=80) is OPEN


def test_passed_request_does_not_release_the_next_request() -> None:
    driver = holding(max_delay_ms=100)
    assert driver.step(free=4, departed=3) is OPEN
    driver.admit(4)  # other requests, which are ahead of it now
    driver.step(free=4, waiting=0, head=FakeRequest("urgent"), took_ms=500)
    driver.admit(4)
    gates = [driver.step(free=1, head=FakeRequest("urgent")) for _ in range(5)]
    assert gates == [CLOSED] * 5


def test_released_request_is_not_held_again_and_counts_once() -> None:
    driver = Driver(built(departures=8, max_delay_ms=100))
    gates = [  # the cache stays too full for the head
        driver.step(free=20, running=12, kv_free=0.02, refused=True, took_ms=21) for _ in range(20)
    ]
    assert gates == [CLOSED] * 5 + [OPEN] * 15
    assert driver.policy.counters()["starvation_releases"] == 1


def test_longest_held_of_two_heads_is_released() -> None:
    # Two lanes of other policies have a head each, and their gates are asked in turn.
    driver = holding(max_delay_ms=100)
    other = FakeRequest("other")
    driver.step(free=4, departed=3, took_ms=61)  # the first hold is over
    driver.admit(3)
    gates = []
    for _ in range(8):
        first = driver.step(free=0, head=HEAD, took_ms=10)
        gates.append(first is driver.policy.gate(DEFERRABLE, other, 0.0) is CLOSED)
    assert gates == [True] * 3 + [False] * 5


# Requests that are never held


def test_remote_and_preempted_requests_are_not_held() -> None:
    policy = holding().policy
    assert policy.lane(FakeRequest("new"), lambda: 0) == DEFERRABLE
    assert policy.lane(FakeRequest("cached"), lambda: 99) == DEFERRABLE
    assert policy.lane(FakeRequest("remote"), lambda: 100) == DIRECT
    assert policy.lane(FakeRequest("back", num_preemptions=1), lambda: 0) == DIRECT
    assert policy.gate(DIRECT, HEAD, 0.0) is OPEN
    assert policy.gate(DEFERRABLE, HEAD, 0.0) is CLOSED


# On real schedulers


def admissions(bench: Bench, steps: int) -> list[str]:
    """Run steps; return the names of the requests that were admitted in each."""
    seen: set[str] = set()
    entered = []
    for tokens in bench.steps(steps):
        entered.append("".join(sorted(tokens.keys() - seen)))
        seen |= tokens.keys()
    return entered


@pytest.mark.parametrize(
    ("outputs", "prompt", "engine", "entered"),
    [
        # The first request departs after two steps, the second after four.
        ([2, 4, 6, 8, 5, 5, 5, 5], 8, {"max_num_seqs": 4}, ["0123", "", "", "", "45", ""]),
        # Seven blocks of 16 tokens, one of which is upstream's own: three requests of two blocks.
        ([2, 4, 14, 4, 4, 4], 18, {"num_blocks": 7}, ["012", "", "", "", "34"]),
    ],
    ids=["slots", "KV cache"],
)
def test_next_batch_enters_after_two_departures(
    outputs: list[int], prompt: int, engine: dict[str, int], entered: list[str]
) -> None:
    bench = Bench({"deferred_prefill": {"departures": 2}}, budget=256, **engine)
    for name, output in enumerate(outputs):
        bench.add(str(name), prompt, output=output)
    assert admissions(bench, len(entered)) == entered


# Which costs a batch has


@pytest.mark.parametrize(("others", "pause"), [({}, False), (PAUSES, True)], ids=str)
def test_policy_finds_whether_decodes_pause(
    others: dict[str, dict[str, object]], pause: bool
) -> None:
    assert built_after(others).facts.decodes_pause is pause


# Auto


# The paper's machine, on which mixed steps cost nothing extra, and the same with a cost.
A100 = StepTime(decode_fixed_s=0.010, decode_s=6e-5, prefill_fixed_s=0.012, prefill_s=9.5e-5)
A100_MIXED = replace(A100, mixed_s=0.012)
SMALL = StepTime(decode_fixed_s=0.004, decode_s=1e-4, context_s=1e-7, prefill_s=2e-5)


def loop(
    time: StepTime = A100_MIXED,
    *,
    slots: int = 256,
    mean_output: float = 200,
    noise: float = 0.0,
    decodes_pause: bool = False,
    **settings: object,
) -> ClosedLoop:
    """Return a closed loop under this policy, and under `prefill_first` if decodes pause."""
    config = {**(PAUSES if decodes_pause else {}), "deferred_prefill": settings}
    policies = registry.build(config, EngineFacts(32_768, 8192, slots))
    return ClosedLoop(policies, time, slots, mean_output, 220, noise=noise)


@pytest.mark.parametrize("decodes_pause", [True, False])
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_paper_regime_reaches_nine_tenths_of_the_theoretical_gain(
    decodes_pause: bool, noise: float
) -> None:
    backlog = BacklogModel.from_step_time(
        A100_MIXED, slots=256, mean_output=200, mean_prompt=220, decodes_pause=decodes_pause
    )
    exact = Recursion(backlog)
    theory = exact.solve_for(exact.best()).throughput / exact.solve_for(1).throughput - 1
    plain, auto = (
        loop(noise=noise, decodes_pause=decodes_pause, departures=k).measured(4000, 6000)
        for k in (1, "auto")
    )
    assert auto / plain - 1 >= 0.9 * theory


@pytest.mark.parametrize(
    ("time", "slots", "mean_output", "fixed"),
    [
        pytest.param(A100, 32, 16, [1], id="free mixed steps, few slots"),
        pytest.param(A100, 256, 200, [1], id="free mixed steps"),
        *(
            pytest.param(replace(SMALL, mixed_s=cost), 32, 48, [1, 2, 4, 8, 16], id=f"mixed {cost}")
            for cost in (0.0005, 0.010, 0.050)
        ),
    ],
)
def test_auto_threshold_is_close_to_the_best_fixed_one(
    time: StepTime, slots: int, mean_output: int, fixed: list[int]
) -> None:
    auto, *rates = (
        loop(time, slots=slots, mean_output=mean_output, noise=0.1, departures=k).measured(
            1000, 3000
        )
        for k in ("auto", *fixed)
    )
    assert auto >= 0.98 * max(rates)


@pytest.mark.parametrize(("prompt", "delta"), [(0.007, 0.0), (0.003, 0.003)])
def test_fixed_cost_per_prompt_causes_no_holds(prompt: float, delta: float) -> None:
    time = StepTime(
        decode_fixed_s=0.008, decode_s=1e-4, prefill_s=2e-5, mixed_s=delta, prompt_fixed_s=prompt
    )
    auto, *rates = (
        loop(time, slots=32, mean_output=50, noise=0.05, departures=k).measured(500, 3000)
        for k in ("auto", 1, 2, 4)
    )
    assert auto >= 0.985 * max(rates)


@pytest.mark.parametrize(
    ("settings", "decodes_pause"),
    [
        ({"itl_ms": 120.0}, False),
        ({"itl_ms": 200.0}, True),
        ({"itl_ms": 120.0, "departures": 26}, False),
        ({"itl_ms": 120.0, "departures": 1}, False),
    ],
    ids=str,
)
def test_no_batch_of_prefills_exceeds_the_itl_target(
    settings: dict[str, Any], decodes_pause: bool
) -> None:
    busy = loop(decodes_pause=decodes_pause, **settings)
    busy.run(3000).gaps.clear()
    busy.run(1500)
    # A single prompt is never held for its length.
    over = [prompts for gap, prompts in busy.gaps if gap > settings["itl_ms"] / 1000]
    assert set(over) <= {1}
    assert len(over) < 0.1 * len(busy.gaps)
    assert max(prompts for _, prompts in busy.gaps) > 2


@pytest.mark.parametrize("departures", ["auto", 26])
def test_itl_target_caps_the_departures(departures: object) -> None:
    backlog = BacklogModel.from_step_time(A100_MIXED, slots=256, mean_output=200, mean_prompt=220)
    found = {}
    for itl_ms in (60.0, 120.0, 200.0, None):
        busy = loop(departures=departures, itl_ms=itl_ms).run(1500)
        k = found[itl_ms] = busy.policy.gauges()["k"]
        # Computed with the recent mean prompt; the minimum is one.
        pause_s = backlog.batch_seconds(0.8 * k) + backlog.decode_seconds(backlog.slots)
        assert itl_ms in (None, 60.0) or pause_s <= itl_ms / 1000
    assert found[60.0] == 1 < found[120.0] < found[200.0] < found[None]


class DriverWithItlTarget(Driver):
    """A driver whose fit says 10 ms per decode step and 0.1 ms per prompt token."""

    def __init__(
        self, others: Mapping[str, Mapping[str, object]] | None = None, **settings: object
    ) -> None:
        super().__init__(built_after(others or {}, **{"departures": 1, "itl_ms": 52.0, **settings}))
        self.policy.fit._model = StepTime(decode_fixed_s=0.010, prefill_s=1e-4)
        self.policy.fit.spread = 0.02

    def enter(self, name: str, tokens: int = 100) -> None:
        request = FakeRequest(name, tokens)
        self.policy.chunk(request, 0, tokens)
        self.policy.admitted(request)

    def gate_for(self, name: str, tokens: int = 100) -> Gate:
        return self.policy.gate(DEFERRABLE, FakeRequest(name, tokens), 0.0)


def test_request_beyond_the_itl_target_enters_with_the_next_step() -> None:
    driver = DriverWithItlTarget()  # four prompts of 100 tokens take 50 ms
    assert driver.step(free=8) is OPEN
    for number in range(3):
        driver.enter(str(number))
        assert driver.gate_for("next") is OPEN
    driver.enter("3")
    assert driver.gate_for("next") is CLOSED
    assert driver.policy.held_reason(DEFERRABLE) == "itl"
    assert driver.step(free=4) is OPEN


def test_first_request_of_a_step_enters_at_any_length() -> None:
    driver = DriverWithItlTarget()
    assert driver.step(free=8, head=FakeRequest("long", 2000)) is OPEN
    driver.enter("long", 2000)
    assert driver.gate_for("small", 1) is CLOSED
    assert driver.step(free=7, head=FakeRequest("long too", 2000)) is OPEN
    driver.enter("small", 1)
    assert driver.gate_for("long too", 2000) is CLOSED


def test_itl_target_does_not_apply_without_decodes() -> None:
    driver = DriverWithItlTarget()
    assert driver.step(free=32) is OPEN
    for number in range(20):
        driver.enter(str(number))
    assert driver.gate_for("next") is OPEN


def test_itl_holds_respect_max_delay_ms() -> None:
    driver = DriverWithItlTarget(max_delay_ms=100)
    opened = []
    for number in range(14):  # a request ahead of it takes all time of each step
        driver.step(free=8, head=FakeRequest(f"first {number}"))
        driver.enter(f"first {number}", 500)
        opened.append(driver.gate_for("held") is OPEN)
    assert opened == [False] * 10 + [True] * 4


def test_requests_that_arrive_in_a_pause_do_not_prolong_it() -> None:
    policy = DriverWithItlTarget(PAUSES).policy
    for paused_s, enters in ((0.0, True), (0.010, True), (0.029, True), (0.031, False)):
        step = Step(
            index=1, now=paused_s, budget=2048, decode_tokens=8, prefills=(), free_slots=4,
            num_running=8, paused_s=paused_s,
        )  # fmt: skip
        policy.begin_step(step, {DEFERRABLE: LaneCount(10, 0, 0.0)})
        # Decodes resume after 10 ms for the prompt and 10 ms for their own step.
        assert (policy.gate(DEFERRABLE, HEAD, 0.0) is OPEN) is enters


def test_threshold_rises_only_after_several_equal_estimates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = [9, 9, 9, 1, 9, 7, 9, 9, 2]
    monkeypatch.setattr(threshold, "recommended", lambda *_, **__: found.pop(0))
    busy = loop(slots=64, mean_output=100)
    policy = busy.policy
    assert isinstance(policy, DeferredPrefill)
    thresholds = []
    while found:
        left = len(found)
        busy.step()
        if len(found) < left:
            thresholds.append(policy.threshold)
    assert thresholds == [1] * 7 + [7, 2]


@pytest.mark.parametrize(("slots", "decodes_pause"), [(32, False), (64, False), (64, True)])
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_estimate_of_a_slow_start_is_corrected_soon(
    slots: int, decodes_pause: bool, noise: float
) -> None:
    """With batches of one size, their fixed cost is hard to separate from prompts."""
    slow = {"prefill_fixed_s": 0.050} if decodes_pause else {"mixed_s": 0.020}
    busy = loop(
        replace(A100, **slow), slots=slots, mean_output=100, noise=noise,
        decodes_pause=decodes_pause,
    )  # fmt: skip
    busy.run(1000)
    assert busy.policy.gauges()["k"] > 1
    busy.time = replace(A100, prefill_fixed_s=0.0)
    busy.run(1000)
    assert busy.policy.gauges()["k"] == 1


def test_gauges_show_the_fit_and_the_means() -> None:
    busy = loop(slots=64, mean_output=100)
    busy.run(2000)
    shown = busy.policy.gauges()
    assert shown["fit_mixed_s"] == pytest.approx(0.012, rel=0.2)
    assert shown["mean_output_tokens"] == pytest.approx(100, rel=0.4)
    assert shown["mean_prompt_tokens"] == pytest.approx(220, rel=0.4)
    counted = busy.policy.counters()
    assert counted["held_seconds"] > 0
    assert all(value >= 0 for value in counted.values())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"departures": 0}, "departures=0: Input should be greater than or equal to 1"),
        ({"departures": 33}, "departures=33 is out of range: at most max_num_seqs=32 can"),
        ({"departures": "many"}, "departures='many'"),
        ({"itl_ms": 0}, "itl_ms=0"),
        ({"max_delay_ms": -1}, "max_delay_ms=-1"),
        ({"max_delay_steps": 0}, "max_delay_steps=0"),
    ],
)
def test_invalid_setting_is_refused_in_one_line(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError) as error:
        built(**settings)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_step_that_waits_for_another_rank_is_not_learned_as_decode() -> None:
    policy = built()
    other = StepShape(1_000, 5e5, 8, 4_000, 1)
    for _ in range(8):
        policy.observe(StepResult(0.1, [], 8, 8, 4_000, others=[other]))
    assert policy.fit.count_of("mixed") == 8
    assert policy.fit.count_of("decode") == 0


@pytest.mark.parametrize("departures", ["auto", 2])
def test_ended_requests_count_in_the_means_and_leave_no_state(departures: object) -> None:
    bench = Bench({"deferred_prefill": {"departures": departures}}, budget=256)
    for number in range(60):
        bench.add(str(number), 8, output=1 if number % 2 else 21)
    bench.drain()
    policy = bench["deferred_prefill"]
    assert policy.gauges()["mean_output_tokens"] == pytest.approx(10, rel=0.4)
    assert policy._lanes == policy._held_since == {}


def test_time_in_holds_is_counted() -> None:
    driver = holding()
    for _ in range(3):
        assert driver.step(free=1, took_ms=20.0) is CLOSED
    assert driver.policy.counters()["held_seconds"] == pytest.approx(0.06)
    driver.step(free=4, departed=3, took_ms=20.0)  # the end of the hold
    driver.admit(4)
    driver.step(free=0, took_ms=500.0)
    assert driver.policy.counters()["held_seconds"] == pytest.approx(0.08)


def test_requests_that_enter_in_a_hold_share_what_was_free() -> None:
    """A request of another lane than the refused one has room until the others have taken it."""
    facts = replace(FACTS, kv_cache=KvCache(100, [KvGroup(16, 100)]))
    [policy] = registry.build({"deferred_prefill": {"departures": 4}}, facts)
    assert isinstance(policy, DeferredPrefill)
    driver = Driver(policy)
    large, small = FakeRequest("large", 16 * 20), FakeRequest("small", 16 * 6)
    full = {"free": 20, "running": 12, "kv_free": 0.1, "refused": True}
    assert driver.step(**full) is CLOSED  # type: ignore[arg-type]
    assert policy.gate(DEFERRABLE, large, 0.0) is CLOSED
    assert policy.gate(DEFERRABLE, small, 0.0) is OPEN
    policy.admitted(small)
    assert policy.gate(DEFERRABLE, replace(small, request_id="another"), 0.0) is CLOSED
