"""The chunk budget, on an engine whose step times follow a cost model."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from vllm.v1.core.sched.output import SchedulerOutput

from tests.cost.linear_times import LINEAR_70B_FASTER
from tests.engine.schedulers import make_request
from tests.policies.closed_loop import FakeRequest
from tests.policies.making import Bench
from vllm_sched.cost.step_time import Chunk, StepShape, StepTime
from vllm_sched.policies import registry
from vllm_sched.policies.types import EngineFacts, Step, StepResult

# A decode step of four takes 5 ms, a prefill token 50 us at first and 90 us after 10k tokens.
MACHINE = StepTime(
    decode_fixed_s=4e-3, decode_s=2e-4, prefill_fixed_s=4e-3, prefill_s=5e-5, pair_s=4e-9,
    mixed_s=1e-3,
)  # fmt: skip


class Run(Bench):
    """A bench whose steps take modelled times, and which records the gaps of decodes."""

    def __init__(
        self,
        settings: dict[str, object],
        *,
        machine: StepTime = MACHINE,
        noise: Callable[[], float] = lambda: 1.0,
        between: float = 0.0,  # from one step's result until the next one is scheduled
        beside: Mapping[str, Mapping[str, object]] | None = None,  # other policies
        **engine: Any,
    ) -> None:
        options = {"budget": 2048, "max_model_len": 60_000, "num_blocks": 5_000} | engine
        super().__init__({**(beside or {}), "chunk_budget": settings}, **options)
        self.policy = self["chunk_budget"]
        self.machine, self.noise, self.between = machine, noise, between
        self.gaps: list[float] = []  # of mixed steps
        self.prefills: list[int] = []  # tokens in those steps
        self.count = 0  # computed prompts

    def scheduled(self, output: SchedulerOutput, _: float) -> float:
        """Return the step's time, and record it."""
        chunks, contexts = [], []
        for name, tokens in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            before = request.num_computed_tokens - tokens
            if before < request.num_prompt_tokens:
                chunks.append(Chunk(tokens, before))
            else:
                contexts.append(before)
        shape = StepShape.from_chunks(chunks, len(contexts), sum(contexts))
        seconds = self.machine.seconds(shape) * self.noise()
        if shape.kind == "mixed":
            self.gaps.append(seconds + self.between)
            self.prefills.append(shape.prefill_tokens)
        return seconds

    def step(self, _: float = 0.0) -> dict[str, int]:
        self.now += self.between
        return super().step()

    def decodes(self, count: int = 4, output: int = 10_000) -> None:
        for number in range(count):
            self.add(f"d{number}", 16, output=output)
        self.step()

    def until_decoding(self, name: str, max_steps: int = 2000) -> int:
        """Run steps until the prompt is computed; return their number."""
        for count in range(max_steps):
            self.step()
            request = self.scheduler.requests[name]
            if request.num_output_tokens:
                return count
        raise AssertionError(f"{name} was never done")

    def compute(self, *prompts: int, **more: Any) -> float:
        """Compute prompts one after the other; return the seconds."""
        start = self.now
        for tokens in prompts:
            self.count += 1
            self.add(f"long{self.count}", tokens, output=2, **more)
            self.until_decoding(f"long{self.count}")
        return self.now - start

    def late(self, target_s: float) -> float:
        """Return the share of gaps beyond the target."""
        return sum(gap > target_s for gap in self.gaps) / len(self.gaps)


def jitter(seed: int, spread: float) -> Callable[[], float]:
    rng = random.Random(seed)
    return lambda: rng.lognormvariate(0.0, spread)


def stalling(seed: int, spread: float, every: float) -> Callable[[], float]:
    """Return factors around one, and a stall every `every` steps."""
    usual, steps = jitter(seed, spread), itertools.count(1)
    return lambda: usual() * (1.0 if next(steps) % every else 1.6)


@pytest.mark.parametrize("itl_ms", [15.0, 40.0, 100.0])
def test_gaps_stay_within_the_target_and_use_most_of_it(itl_ms: float) -> None:
    run = Run({"itl_ms": itl_ms}, noise=jitter(1, 0.03))
    run.decodes()
    run.compute(*[12_000] * 5)
    del run.gaps[:20]
    assert run.late(itl_ms / 1000) <= max(0.01, 1 / len(run.gaps))
    full = sorted(run.gaps)[len(run.gaps) // 2]
    assert full >= min(0.75 * itl_ms / 1000, 0.9 * MACHINE.seconds(StepShape(2044, 2e6, 4)))
    shown = run.policy.gauges()
    assert shown["fit_prefill_s"] > 0
    assert shown["predicted_step_seconds"] > 0


@pytest.mark.parametrize(("pair_s", "spread"), [(4e-9, 0.03), (2e-8, 0.0), (4e-8, 0.03)])
def test_client_gaps_stay_within_the_target_for_the_longest_prompts_yet(
    pair_s: float, spread: float
) -> None:
    """The policy learns on short prompts, then long prompts arrive."""
    machine = replace(MACHINE, prefill_s=1e-4, pair_s=pair_s)
    run = Run({"itl_ms": 328.0}, machine=machine, noise=jitter(1, spread), between=0.020)
    run.decodes()
    run.compute(*[2000] * 2, *[12_000] * 10)
    assert run.late(0.328) <= 0.01 + 1 / len(run.gaps)
    assert sorted(run.gaps)[len(run.gaps) // 2] >= 0.7 * 0.328


def tight_run(noise: Callable[[], float]) -> Run:
    """Return a run whose decodes take half of the target, after four prompts."""
    run = Run(
        {"itl_ms": 30.0}, machine=LINEAR_70B_FASTER, noise=noise, budget=8192, max_num_seqs=64
    )
    run.decodes(16)
    run.compute(*[12_000] * 4)
    return run


def test_rare_stalls_cost_little_if_decodes_take_half_of_the_target() -> None:
    """A margin as large as the stalls would leave almost no time for prompts."""
    took = []
    for every in (math.inf, 150):
        run = tight_run(stalling(1, 0.02, every))
        run.gaps.clear()
        took.append(run.compute(*[12_000] * 8))
        assert run.late(0.030) <= 0.01
    assert took[1] < 1.1 * took[0]


def test_ends_of_prompts_say_nothing_about_full_chunks() -> None:
    run = tight_run(lambda: 1.0)
    before = list(run.policy.prediction_error._errors), run.policy._measured.tokens
    assert len(before[0]) >= 64
    for number in range(5):
        run.add(f"s{number}", 20, output=2)
        run.step()
    assert (list(run.policy.prediction_error._errors), run.policy._measured.tokens) == before


def test_batch_prompt_with_read_cost_does_not_slow_down_over_time() -> None:
    """Chats take most of each step; reading the context takes half of the rest."""
    machine = replace(MACHINE, pair_s=1e-9, mixed_s=0.0, read_s=1.2e-6)
    run = Run(
        {"itl_ms": 60.0}, machine=machine, noise=jitter(1, 0.02), beside={"lanes": {}},
        max_num_seqs=32,
    )  # fmt: skip
    run.decodes()
    run.compute(*[14_000] * 4, lane="batch")
    run.add("far", 30_000, output=2, lane="batch")
    for number in range(80):
        if number % 16 == 0:
            for chat in "abc":
                run.add(f"{chat}{number}", 400, output=2, lane="urgent")
        run.step()
    run.until_decoding("far", 120)


def test_prefill_without_decodes_gets_the_whole_budget() -> None:
    run = Run({"itl_ms": 10.0})
    run.add("long", 12_000)
    assert run.steps(2) == [{"long": 2048}] * 2


def test_fixed_chunk_applies_only_beside_decodes() -> None:
    run = Run({"chunk": 100})
    run.add("d", 16)
    run.add("long", 12_000)
    assert run.step() == {"d": 16, "long": 2032}
    assert run.step() == {"d": 1, "long": 100}
    assert run.policy.gauges()["chunk_budget_tokens"] == 100


@pytest.mark.parametrize("settings", [{"chunk": 5000}, {"itl_ms": 10_000.0}, {"min_chunk": 5000}])
def test_shown_chunk_never_exceeds_the_step_budget(settings: dict[str, object]) -> None:
    run = Run(settings)
    run.decodes()
    run.add("long", 19_000)
    shown = []
    while run.scheduler.requests["long"].num_computed_tokens < 18_000:
        tokens = run.step()
        shown.append(run.policy.gauges()["chunk_budget_tokens"])
        assert shown[-1] >= tokens["long"]
    assert max(shown) == 2048 - 4


def test_decodes_that_fill_a_step_leave_prefill_one_token() -> None:
    policy = Run({"itl_ms": 30.0}).policy
    assert (
        policy.budget(Step(0, 0.0, budget=8, decode_tokens=8, prefills=[FakeRequest("a")])) == 8 + 1
    )


def test_late_prompt_spends_the_slack_of_decodes() -> None:
    took = {}
    for ttft_ms in (None, 600.0):
        run = Run({"itl_ms": 20.0, "ttft_ms": ttft_ms})
        # Arrival times are by the wall clock; here both clocks are the bench's.
        run.decodes()
        for request in run.scheduler.running:
            request.arrival_time = time.time()
        run.steps(200)  # steps of 5 ms: ahead by 15 ms each
        run.compute(12_000, arrival=time.time())
        took[ttft_ms] = run.compute(12_000, arrival=time.time())
        assert max(run.gaps) <= 4 * 0.020 * 1.01
        assert (run.policy.counters()["slack_steps"] > 0) is (ttft_ms is not None)
    assert took[600.0] < 0.95 * took[None]


def test_long_step_is_judged_by_its_own_allowance() -> None:
    """With steps in flight, another step's allowance is current when the result comes."""
    facts = EngineFacts(32_768, 2048, 32)
    (policy,) = registry.build({"chunk_budget": {"itl_ms": 10.0, "ttft_ms": 100.0}}, facts)
    ahead, late = FakeRequest("ahead", arrival_time=5.0), FakeRequest("late", arrival_time=0.0)
    for index, prefills in ((1, [late]), (2, [])):
        step = Step(index=index, now=5.0, budget=2048, decode_tokens=1, prefills=prefills)
        step.decoding = [ahead]
        policy.begin_step(step, {})
        policy.budget(step)
    assert policy.counters()["slack_steps"] == 1
    for index, long in ((1, 0), (2, 1)):
        policy.observe(StepResult(0.03, [Chunk(64, 0)], 1, 1, 10, index))
        assert policy.counters()["long_steps"] == long


@pytest.mark.parametrize(
    ("left", "decode_at", "slack"),
    [
        pytest.param(1_000_000, 5.0, 1, id="late prompt"),
        pytest.param(10, 5.0, 0, id="prompt with little left"),
        pytest.param(1_000_000, -1e6, 0, id="decodes without slack"),
    ],
)
def test_only_remaining_tokens_spend_the_slack_of_decodes(
    left: int, decode_at: float, slack: int
) -> None:
    """The tokens that a newcomer has in a cache or a KV tier do not count."""
    facts = EngineFacts(2_000_000, 2048, 32)
    (policy,) = registry.build({"chunk_budget": {"itl_ms": 10.0, "ttft_ms": 100.0}}, facts)
    head = FakeRequest("head", 1_000_000, arrival_time=5.0, cached=1_000_000 - left)
    step = Step(index=1, now=5.0, budget=2048, decode_tokens=1, prefills=[])
    step.decoding = [FakeRequest("ahead", arrival_time=decode_at)]
    step.next_to_enter, step.cached_tokens_of = lambda: head, lambda _: head.cached
    policy.begin_step(step, {})
    policy.budget(step)
    assert policy.counters()["slack_steps"] == slack


def test_least_gap_that_decodes_ask_for_sizes_the_step() -> None:
    """The gap of `itl_ms` holds for a decode that asks for none."""
    policy = Bench({"chunk_budget": {"itl_ms": 50.0}})["chunk_budget"]
    asked = {"quick": 20, "slow": 400, "odd": "20"}
    requests = {name: make_request(10, name=name) for name in (*asked, "plain")}
    for name, gap_ms in asked.items():
        policy.arrived(requests[name], {"tpot_ms": gap_ms})

    def allowed_s(*names: str) -> float:
        decoding = [requests[name] for name in names]
        step = Step(index=1, now=0.0, budget=2048, decode_tokens=len(names), prefills=(),
                    decoding=decoding)  # fmt: skip
        return policy._allowed_s(step)

    assert allowed_s("slow") == 0.4
    assert allowed_s("slow", "plain") == allowed_s("slow", "odd") == 0.05
    assert allowed_s("slow", "plain", "quick") == 0.02
    policy.departed(requests["slow"], 0.0)
    assert allowed_s("slow") == 0.05


def long_run(lane: str, read_s: float, beside: Mapping[str, Mapping[str, object]]) -> Run:
    """Return a run with decodes and a prompt of this lane, 20,000 tokens into its prefill."""
    machine = replace(MACHINE, pair_s=1e-9, mixed_s=0.0, read_s=read_s)
    run = Run({"itl_ms": 40.0}, machine=machine, beside=beside)
    run.decodes()
    run.compute(9000, 300, 300, 9000, 150, 300, 9000, 150)
    run.add("far", 36_000, output=2, lane=lane)
    far = run.scheduler.requests["far"]
    while far.num_computed_tokens < 20_000:
        run.step()
        assert len(run.gaps) < 2000, "the prompt does not progress"
    run.gaps.clear()
    return run


@pytest.mark.parametrize("beside", [{"lanes": {}}, {"lanes": {}, "long_prompt": {}}], ids="+".join)
def test_step_without_the_long_prompt_is_not_sized_for_it(
    beside: Mapping[str, Mapping[str, object]],
) -> None:
    """All chats fit into a few steps; each step holds 140 tokens of the long prompt."""
    run = long_run("batch", 1.2e-6, beside)
    chats = [run.add(f"chat{number}", 190, output=4, lane="urgent") for number in range(4)]
    steps = 0
    while not all(chat.num_output_tokens for chat in chats):
        assert "far" not in run.step()
        steps += 1
    assert steps <= 4
    assert max(run.gaps) <= 0.040


def test_entering_urgent_request_finds_time_in_the_step() -> None:
    """Running prefills are scheduled before entering requests."""
    run = long_run("normal", 0.0, {"lanes": {}})
    run.add("chat", 300, output=4, lane="urgent")
    tokens = run.step()
    assert tokens["chat"] == 300
    assert tokens["far"] > 32
    assert max(run.gaps) <= 0.040
