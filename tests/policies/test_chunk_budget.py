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

from tests.cost.linear_times import LINEAR_70B_FASTER
from tests.engine.schedulers import answer, make_request
from tests.policies.closed_loop import FakeRequest
from tests.policies.making import Bench
from vllm_sched import SyncPolicyScheduler
from vllm_sched.cost.step_time import Chunk, StepShape, StepTime
from vllm_sched.policies import registry
from vllm_sched.policies.types import EngineFacts, Step, StepResult

# A decode step of four takes 5 ms, a prefill token 50 us at first and 90 us after 10k tokens.
MACHINE = StepTime(
    decode_fixed_s=4e-3, decode_s=2e-4, prefill_fixed_s=4e-3, prefill_s=5e-5, pair_s=4e-9,
    mixed_s=1e-3,
)  # fmt: skip


class Run:
    """Run steps with modelled durations, and record the gaps of decodes."""

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
        options = {"budget": 2048, "max_model_len": 20_000, "num_blocks": 20_000} | engine
        self.bench = Bench({**(beside or {}), "chunk_budget": settings}, **options)
        self.machine, self.noise, self.between = machine, noise, between
        self.gaps: list[float] = []  # of mixed steps
        self.prefills: list[int] = []  # tokens in those steps

    @property
    def policy(self) -> Any:
        return self.bench["chunk_budget"]

    def step(self) -> dict[str, int]:
        scheduler = self.bench.scheduler
        self.bench.now += self.between
        before = {r.request_id: r.num_computed_tokens for r in scheduler.running}
        decoding = {r.request_id for r in scheduler.running if not r.is_prefill_chunk}
        output = scheduler.schedule()
        result = answer(scheduler, output)
        tokens = dict(output.num_scheduled_tokens)
        prefill = {n: t for n, t in tokens.items() if n not in decoding}
        shape = StepShape(
            sum(prefill.values()),
            sum(t * (before.get(n, 0) + t / 2) for n, t in prefill.items()),
            len(tokens) - len(prefill),
            sum(before[n] for n in tokens if n in decoding),
            len(prefill),
            sum(before.get(n, 0) for n in prefill),
        )
        seconds = self.machine.seconds(shape) * self.noise()
        if shape.mixed:
            self.gaps.append(seconds + self.between)
            self.prefills.append(shape.prefill_tokens)
        self.bench.now += seconds
        scheduler.update_from_output(output, result)
        return tokens

    def stall(self, factor: float) -> None:
        """Run one step that is `factor` times as long."""
        usual, self.noise = self.noise, lambda: factor
        self.step()
        self.noise = usual

    def decodes(self, count: int = 4, output: int = 10_000) -> None:
        """Start `count` decodes."""
        for number in range(count):
            self.bench.add(f"d{number}", 16, output=output)
        self.step()

    def wall(self) -> float:
        """Return the wall clock, which stamps arrivals."""
        return time.time()

    def until_decoding(self, name: str, max_steps: int = 2000) -> int:
        """Run steps until the prompt is computed; return their number."""
        for count in range(max_steps):
            self.step()
            request = self.bench.scheduler.requests[name]
            if request.num_output_tokens:
                return count
        raise AssertionError(f"{name} was never done")


def jitter(seed: int, spread: float) -> Callable[[], float]:
    """Return factors around one."""
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
    for number in range(5):
        run.bench.add(f"long{number}", 12_000, output=4)
        run.until_decoding(f"long{number}")
    gaps = run.gaps[20:]
    late = sum(gap > itl_ms / 1000 for gap in gaps)
    assert late <= max(0.01 * len(gaps), 1)
    full = sorted(gaps)[len(gaps) // 2]
    assert full >= min(0.75 * itl_ms / 1000, 0.9 * MACHINE.seconds(StepShape(2044, 2e6, 4)))


@pytest.mark.parametrize("pair_s", [4e-9, 2e-8, 4e-8])
@pytest.mark.parametrize("spread", [0.0, 0.03])
def test_client_gaps_stay_within_the_target_for_the_longest_prompts_yet(
    pair_s: float, spread: float
) -> None:
    """The policy learns on short prompts, then long prompts arrive."""
    machine = replace(MACHINE, prefill_s=1e-4, pair_s=pair_s)
    run = Run({"itl_ms": 328.0}, machine=machine, noise=jitter(1, spread), between=0.020)
    run.decodes()
    for number in range(2):
        run.bench.add(f"warm{number}", 2000, output=4)
        run.until_decoding(f"warm{number}")
    for number in range(10):
        run.bench.add(f"long{number}", 12_000, output=4)
        run.until_decoding(f"long{number}")
    late = sum(gap > 0.328 for gap in run.gaps)
    assert late <= 0.01 * len(run.gaps) + 1
    assert sorted(run.gaps)[len(run.gaps) // 2] >= 0.7 * 0.328


def test_decodes_behind_a_prefill_get_their_tokens() -> None:
    """With vLLM's own limit on chunks, requests enter behind a prefill."""
    run = Run({"chunk": 100}, budget=512, long_prefill_token_threshold=256)
    run.bench.add("A", 19_000, output=3)
    run.bench.add("d", 10, output=500)
    run.step()
    assert all(run.step().get("d") == 1 for _ in range(20))


def test_late_waiting_request_spends_slack() -> None:
    run = Run({"itl_ms": 20.0, "ttft_ms": 600.0}, max_num_seqs=6)
    run.decodes()
    for request in run.bench.scheduler.running:
        request.arrival_time = run.wall()
    run.bench.add("long", 16_000, output=2, arrival=run.wall() + 1e6)  # not late
    for _ in range(20):
        run.step()
    assert run.policy.counters()["slack_steps"] == 0
    run.bench.add("late", 50, output=2, arrival=run.wall() - 10.0)
    for _ in range(3):
        run.step()
    assert run.policy.counters()["slack_steps"] > 0


def test_chunks_recover_soon_after_one_stall() -> None:
    run = Run({"itl_ms": 40.0})
    run.decodes()
    for number in range(6):
        run.bench.add(f"warm{number}", 12_000, output=2)
        run.until_decoding(f"warm{number}")
    run.prefills.clear()
    run.bench.add("long", 16_000, output=2)
    run.step()
    run.noise = lambda: 6.0
    run.step()
    run.noise = lambda: 1.0
    for _ in range(15):
        run.step()
    # A chunk with more context is a little smaller anyway.
    assert run.prefills[-1] > 0.6 * run.prefills[0]


def test_chunks_recover_from_a_stall_if_decodes_take_half_of_the_target() -> None:
    """Otherwise almost no time is left for prefill."""
    run = Run(
        {"itl_ms": 30.0}, machine=LINEAR_70B_FASTER, noise=jitter(1, 0.02),
        max_model_len=60_000, num_blocks=60_000, budget=8192, max_num_seqs=64,
    )  # fmt: skip
    run.decodes(16)
    for number in range(4):
        run.bench.add(f"warm{number}", 12_000, output=2)
        run.until_decoding(f"warm{number}")
    took = []
    for name, stall in (("quiet", 1.0), ("stalled", 1.6), ("next", 1.0)):
        start = run.bench.now
        run.bench.add(name, 20_000, output=2)
        for _ in range(10):
            run.step()
        run.stall(stall)
        run.until_decoding(name)
        took.append(run.bench.now - start)
    assert max(took) < 1.25 * took[0]
    assert sum(gap > 0.030 for gap in run.gaps) <= 0.01 * len(run.gaps)


def test_rare_stalls_cost_little_if_decodes_take_half_of_the_target() -> None:
    """A margin as large as the stalls would leave almost no time for prompts."""
    took = []
    for every in (math.inf, 150):
        run = Run(
            {"itl_ms": 30.0}, machine=LINEAR_70B_FASTER, max_model_len=60_000,
            num_blocks=60_000, budget=8192, max_num_seqs=64,
        )  # fmt: skip
        run.noise = stalling(1, 0.02, every)
        run.decodes(16)
        for number in range(10):
            if number == 2:
                start, _ = run.bench.now, run.gaps.clear()
            run.bench.add(f"long{number}", 12_000, output=2)
            run.until_decoding(f"long{number}")
        took.append(run.bench.now - start)
        assert sum(gap > 0.030 for gap in run.gaps) <= 0.01 * len(run.gaps)
    assert took[1] < 1.1 * took[0]


def test_batch_prompt_with_read_cost_does_not_slow_down_over_time() -> None:
    """Chats take most of each step; reading the context takes half of the rest."""
    machine = replace(MACHINE, pair_s=1e-9, mixed_s=0.0, read_s=1.2e-6)
    run = Run(
        {"itl_ms": 60.0}, machine=machine, noise=jitter(1, 0.02), beside={"lanes": {}},
        max_model_len=40_000, num_blocks=40_000, max_num_seqs=32,
    )  # fmt: skip
    run.decodes()
    for number in range(4):
        run.bench.add(f"warm{number}", 14_000, output=2, lane="batch")
        run.until_decoding(f"warm{number}")
    run.bench.add("far", 30_000, output=2, lane="batch")
    for number in range(80):
        if number % 16 == 0:
            for chat in "abc":
                run.bench.add(f"{chat}{number}", 400, output=2, lane="urgent")
        run.step()
    run.until_decoding("far", 120)


def test_margin_grows_with_noise() -> None:
    margins = []
    for spread in (0.01, 0.3):
        run = Run({"itl_ms": 30.0}, noise=jitter(2, spread))
        run.decodes()
        for number in range(8):
            run.bench.add(f"long{number}", 12_000, output=4)
            run.until_decoding(f"long{number}")
        margins.append(run.policy.error.margin)
    assert margins[1] > margins[0] + 0.1


def test_policy_is_as_fast_as_the_best_fixed_chunk_with_equal_gaps() -> None:
    def measure(settings: dict[str, object]) -> tuple[float, float]:
        run = Run(settings)
        run.decodes()
        for number in range(4 if "itl_ms" in settings else 0):  # to learn from
            run.bench.add(f"warm{number}", 12_000, output=2)
            run.until_decoding(f"warm{number}")
        run.gaps.clear()
        start = run.bench.now
        run.bench.add("long", 16_000, output=2)
        run.until_decoding("long")
        return run.bench.now - start, max(run.gaps)

    took, gap = measure({"itl_ms": 40.0})
    assert gap <= 0.040
    fixed = [measure({"chunk": chunk}) for chunk in range(100, 900, 100)]
    assert took <= 1.1 * min(seconds for seconds, longest in fixed if longest <= 0.040)


def test_prefill_without_decodes_gets_the_whole_budget() -> None:
    run = Run({"itl_ms": 10.0})
    run.bench.add("long", 12_000)
    assert [run.step() for _ in range(2)] == [{"long": 2048}, {"long": 2048}]


def test_fixed_chunk_applies_only_beside_decodes() -> None:
    run = Run({"chunk": 100})
    run.bench.add("d", 16)
    run.bench.add("long", 12_000)
    assert run.step() == {"d": 16, "long": 2032}
    assert run.step() == {"d": 1, "long": 100}
    assert run.policy.gauges()["chunk_budget_tokens"] == 100


@pytest.mark.parametrize("settings", [{"chunk": 100}, {"itl_ms": 1000.0}])
def test_tokens_of_absent_drafts_are_not_given_to_prefill(
    settings: dict[str, object],
) -> None:
    run = Run(settings, scheduler_cls=SyncPolicyScheduler)
    run.bench.scheduler.num_spec_tokens = 3
    run.bench.add("d", 16)
    run.bench.add("long", 12_000)
    run.step()
    assert run.step() == {"d": 1, "long": 100 if "chunk" in settings else 256}


@pytest.mark.parametrize("settings", [{"chunk": 5000}, {"itl_ms": 10_000.0}, {"min_chunk": 5000}])
def test_shown_chunk_never_exceeds_the_step_budget(settings: dict[str, object]) -> None:
    run = Run(settings)
    run.decodes()
    run.bench.add("long", 19_000)
    shown = []
    while run.bench.scheduler.requests["long"].num_computed_tokens < 18_000:
        tokens = run.step()
        shown.append(run.policy.gauges()["chunk_budget_tokens"])
        assert shown[-1] >= tokens["long"]
    assert max(shown) == 2048 - 4


def test_decodes_that_fill_a_step_leave_prefill_one_token() -> None:
    policy = Run({"itl_ms": 30.0}).policy
    assert policy.budget(Step(0, 0.0, budget=8, decodes=8, prefills=[FakeRequest("a")])) == 8 + 1


def test_first_chunks_are_small_and_grow() -> None:
    run = Run({"itl_ms": 200.0})
    run.decodes()
    run.bench.add("long", 12_000)
    for _ in range(4):
        run.step()
    assert run.prefills == [256, 384, 576, 864]


def test_decodes_slower_than_the_target_leave_the_minimum_chunk() -> None:
    slow = StepTime(decode_fixed_s=0.05, prefill_fixed_s=0.05, prefill_s=1e-4)
    run = Run({"itl_ms": 20.0, "min_chunk": 48}, machine=slow)
    run.decodes()
    run.bench.add("long", 4000)
    run.until_decoding("long")
    assert min(run.prefills[:-1]) == 48


def test_several_prompts_share_the_time_of_a_step() -> None:
    run = Run({"itl_ms": 40.0})
    run.decodes()
    for number in range(4):
        run.bench.add(f"warm{number}", 12_000, output=2)
        run.until_decoding(f"warm{number}")
    run.gaps.clear()
    run.bench.add("far", 16_000)
    for _ in range(30):
        run.step()
    for number in range(20):
        run.bench.add(f"near{number}", 100, output=1)
    for _ in range(30):
        run.step()
    assert max(run.gaps) <= 0.040


def test_late_prompt_spends_the_slack_of_decodes() -> None:
    took = {}
    for ttft_ms in (None, 600.0):
        run = Run({"itl_ms": 20.0} if ttft_ms is None else {"itl_ms": 20.0, "ttft_ms": ttft_ms})
        # Arrival times are by the wall clock; here both clocks are the bench's.
        run.decodes()
        for request in run.bench.scheduler.running:
            request.arrival_time = run.wall()
        for _ in range(200):
            run.step()  # steps of 5 ms: ahead by 15 ms each
        run.bench.add("warm", 12_000, output=2, arrival=run.wall())
        run.until_decoding("warm")
        start = run.bench.now
        run.bench.add("long", 12_000, output=2, arrival=run.wall())
        run.until_decoding("long")
        took[ttft_ms] = run.bench.now - start
        assert max(run.gaps) <= 4 * 0.020 * 1.01
        assert (run.policy.counters()["slack_steps"] > 0) is (ttft_ms is not None)
    assert took[600.0] < 0.95 * took[None]


def test_decodes_without_slack_spend_none() -> None:
    run = Run({"itl_ms": 20.0, "ttft_ms": 1.0})
    run.decodes()
    for request in run.bench.scheduler.running:
        request.arrival_time = run.wall() - 1e6
    run.bench.add("long", 12_000, output=2, arrival=run.wall())
    run.until_decoding("long")
    assert run.policy.counters()["slack_steps"] == 0


def test_long_step_is_judged_by_its_own_allowance() -> None:
    """With steps in flight, another step's allowance is current when the result comes."""
    facts = EngineFacts(32_768, 2048, 32)
    (policy,) = registry.build({"chunk_budget": {"itl_ms": 10.0, "ttft_ms": 100.0}}, facts)
    ahead, late = FakeRequest("ahead", arrival_time=5.0), FakeRequest("late", arrival_time=0.0)
    for index, prefills in ((1, [late]), (2, [])):
        step = Step(index=index, now=5.0, budget=2048, decodes=1, prefills=prefills)
        step.decoding = [ahead]
        policy.begin_step(step, {})
        policy.budget(step)
    assert policy.counters()["slack_steps"] == 1
    for index, long in ((1, 0), (2, 1)):
        policy.observe(StepResult(0.03, [Chunk(64, 0)], 1, 1, 10, index))
        assert policy.counters()["long_steps"] == long


@pytest.mark.parametrize(("left", "slack"), [(10, 0), (1_000_000, 1)])
def test_only_remaining_tokens_make_a_prompt_late(left: int, slack: int) -> None:
    """The tokens that a newcomer has in a cache or a KV tier do not count."""
    facts = EngineFacts(2_000_000, 2048, 32)
    (policy,) = registry.build({"chunk_budget": {"itl_ms": 10.0, "ttft_ms": 100.0}}, facts)
    head = FakeRequest("head", 1_000_000, arrival_time=5.0, cached=1_000_000 - left)
    step = Step(index=1, now=5.0, budget=2048, decodes=1, prefills=[])
    step.decoding = [FakeRequest("ahead", arrival_time=5.0)]
    step.may_enter, step.cached_of = lambda: head, lambda _: head.cached
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
        step = Step(index=1, now=0.0, budget=2048, decodes=len(names), prefills=(),
                    decoding=decoding)  # fmt: skip
        return policy._allowed_s(step)

    assert allowed_s("slow") == 0.4
    assert allowed_s("slow", "plain") == allowed_s("slow", "odd") == 0.05
    assert allowed_s("slow", "plain", "quick") == 0.02
    policy.departed(requests["slow"], 0.0)
    assert allowed_s("slow") == 0.05


def test_gauges_show_the_fit() -> None:
    run = Run({"itl_ms": 40.0})
    run.decodes()
    run.bench.add("long", 12_000, output=2)
    run.until_decoding("long")
    shown = run.policy.gauges()
    assert shown["fit_prefill_s"] > 0
    assert shown["predicted_step_seconds"] > 0
    assert run.policy.counters()["long_steps"] <= 2


def test_prompt_ends_add_no_error_samples_if_decodes_take_half_of_the_target() -> None:
    run = Run({"itl_ms": 30.0}, machine=LINEAR_70B_FASTER, max_num_seqs=64)
    run.decodes(16)
    for number in range(3):
        run.bench.add(f"warm{number}", 12_000, output=2)
        run.until_decoding(f"warm{number}")
    before = list(run.policy.error._errors)
    assert len(before) >= 64
    for number in range(5):
        run.bench.add(f"s{number}", 20, output=2)
        run.step()
    assert list(run.policy.error._errors) == before


def test_prompt_with_an_empty_chunk_takes_no_time() -> None:
    run = Run({"itl_ms": 40.0})
    policy = run.policy
    policy.fit._model = replace(MACHINE, read_s=1.2e-6)
    run.decodes()
    run.bench.add("far", 16_000)
    run.step()
    (far,) = (r for r in run.bench.scheduler.running if r.request_id == "far")
    policy._prefill.seconds, policy._prefill.min_tokens = 0.030, 0
    alone = policy.chunk(far, 200, 2000)
    assert alone > 0
    policy._prefill.seconds = 0.030
    assert policy.chunk(far, 20_000, 0) == 0
    assert policy.chunk(far, 200, 2000) == alone


def test_short_last_chunk_does_not_shrink_the_measured_chunk() -> None:
    run = Run({"itl_ms": 40.0})
    run.decodes()
    run.bench.add("long", 12_000, output=2)
    run.until_decoding("long")
    before = run.policy._measured.tokens
    for number in range(5):
        run.bench.add(f"s{number}", 20, output=2)
        run.step()
    assert run.policy._measured.tokens == before


def long_run(lane: str, read_s: float, beside: Mapping[str, Mapping[str, object]]) -> Run:
    """Return a run with decodes and a prompt of this lane, 20,000 tokens into its prefill."""
    machine = replace(MACHINE, pair_s=1e-9, mixed_s=0.0, read_s=read_s)
    run = Run(
        {"itl_ms": 40.0}, machine=machine, beside=beside, max_model_len=40_000, num_blocks=40_000
    )
    run.decodes()
    for number, tokens in enumerate((9000, 300, 300, 9000, 150, 300, 9000, 150)):
        run.bench.add(f"warm{number}", tokens, output=2)
        run.until_decoding(f"warm{number}")
    run.bench.add("far", 36_000, output=2, lane=lane)
    far = run.bench.scheduler.requests["far"]
    for _ in range(2000):
        if far.num_computed_tokens >= 20_000:
            break
        run.step()
    else:
        pytest.fail("the prompt does not progress")
    run.gaps.clear()
    return run


@pytest.mark.parametrize("beside", [{"lanes": {}}, {"lanes": {}, "long_prompt": {}}], ids="+".join)
def test_step_without_the_long_prompt_is_not_sized_for_it(
    beside: Mapping[str, Mapping[str, object]],
) -> None:
    """All chats fit into a few steps; each step holds 140 tokens of the long prompt."""
    run = long_run("batch", 1.2e-6, beside)
    chats = [run.bench.add(f"chat{number}", 190, output=4, lane="urgent") for number in range(4)]
    steps = 0
    while not all(chat.num_output_tokens for chat in chats):
        assert "far" not in run.step()
        steps += 1
    assert steps <= 4
    assert max(run.gaps) <= 0.040


def test_entering_urgent_request_finds_time_in_the_step() -> None:
    """Running prefills are scheduled before entering requests."""
    run = long_run("normal", 0.0, {"lanes": {}})
    run.bench.add("chat", 300, output=4, lane="urgent")
    tokens = run.step()
    assert tokens["chat"] == 300
    assert tokens["far"] > 32
    assert max(run.gaps) <= 0.040


def test_turn_without_time_left_is_not_lost() -> None:
    """Reading the long context takes more time than the other prompts leave."""
    run = long_run("normal", 1.2e-6, {"rotation": {"chunk": 64}})
    for name in ("near1", "near2"):
        run.bench.add(name, 15_000, output=2)
    steps = [run.step() for _ in range(40)]
    for name in ("far", "near1", "near2"):
        assert sum(name in tokens for tokens in steps) >= 12, name
