# ruff: noqa: ARG002 - the probe has the protocol's whole signatures
"""Each hook of the policy protocol, on real scheduler objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import pytest
from vllm.v1.core.sched.interface import PauseState

from tests.engine.schedulers import make_request
from tests.policies.making import Bench, PinnedChunk, add
from vllm_sched import PolicyScheduler, SyncPolicyScheduler
from vllm_sched.policies import registry
from vllm_sched.policies.types import LaneCount, Policy, RequestView, Settings, Step, StepResult


class Probe(Policy):
    """A policy that records its calls and returns what the test sets."""

    name: ClassVar[str] = "probe"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.steps: list[Step] = []
        self.entered: list[bool] = []
        self.results: list[StepResult] = []
        self.arrivals: list[tuple[str, Mapping[str, object]]] = []
        self.gone: list[str] = []
        self.tokens: int | None = None
        self.cut: int | None = None
        self.pause = False

    def arrived(self, request: RequestView, extra_args: Mapping[str, object]) -> None:
        self.arrivals.append((request.request_id, extra_args))

    def begin_step(self, step: Step, lanes: Mapping[str, LaneCount]) -> None:
        self.steps.append(step)

    def budget(self, step: Step) -> int:
        self.entered.append(step.next_to_enter() is not None)
        return step.budget if self.tokens is None else self.tokens

    def pauses_decodes(self, step: Step) -> bool:
        return self.pause

    def chunk(self, request: RequestView, computed: int, tokens: int) -> int:
        return tokens if self.cut is None else min(tokens, self.cut)

    def observe(self, result: StepResult) -> None:
        self.results.append(result)

    def departed(self, request: RequestView, now: float) -> None:
        self.gone.append(request.request_id)


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Bench, Probe]]:
    """Return a function that creates a bench with a probe and requests named 0, 1, ..."""
    monkeypatch.setitem(registry.POLICIES, "probe", Probe)

    def make(*prompts: int, **options: Any) -> tuple[Bench, Probe]:
        bench = Bench({"probe": {}}, **options)
        bench.add_all({str(number): tokens for number, tokens in enumerate(prompts)})
        return bench, bench["probe"]

    return make


MakeProbed = Callable[..., tuple[Bench, Probe]]


def names(requests: Sequence[RequestView]) -> list[str]:
    return [request.request_id for request in requests]


# Step


def test_step_counts_running_decoding_and_waiting_requests(probed: MakeProbed) -> None:
    bench, probe = probed(20, 300, 10, max_num_seqs=2, num_blocks=101)
    bench.steps(3)
    seen = probe.steps[2]
    assert (seen.num_running, seen.num_waiting, seen.num_holding_kv) == (2, 1, 0)
    assert seen.free_slots == 0
    assert names(seen.decoding) == ["0"]
    assert names(seen.prefills) == ["1"]
    assert (seen.decode_tokens, seen.context_tokens) == (1, 21)
    # 22 tokens, and 64 - 20 + 63 of the second prompt, take two and seven of a hundred blocks.
    assert seen.kv_free == pytest.approx(0.91)
    assert seen.now == bench.now - 0.01
    assert seen.now == pytest.approx(seen.clock_offset + 1_700_000_000, abs=1e10)
    assert [(r.decodes, r.context_tokens) for r in probe.results[:2]] == [(0, 0), (1, 20)]
    assert [chunk.tokens for chunk in probe.results[1].chunks] == [63]


def test_waiting_requests_with_kv_blocks_are_counted_separately(probed: MakeProbed) -> None:
    bench, probe = probed(20)
    holder = make_request(20, name="holder")
    holder.num_computed_tokens = 19
    bench.scheduler.kv_holding_waiting.add_request(holder)
    bench.scheduler.requests["holder"] = holder
    bench.scheduler._planner.begin_step(bench.now, bench.now)
    assert (probe.steps[-1].num_waiting, probe.steps[-1].num_holding_kv) == (1, 1)


# Arrivals and departures


def test_extra_args_are_passed_at_the_arrival(probed: MakeProbed) -> None:
    bench, probe = probed()
    bench.play(add("asks", 20, lane="batch"), add("silent", 20))
    assert probe.arrivals == [("asks", {"lane": "batch"}), ("silent", {})]


def test_departures_include_aborts_but_not_preemptions(probed: MakeProbed) -> None:
    bench, probe = probed(20, 20, 20, max_num_seqs=2)
    bench.step()
    bench.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert probe.gone == []
    bench.step()
    assert probe.steps[-1].num_departed == 0
    for name in "12":
        bench.abort(name)
    assert probe.gone == ["1", "2"]
    bench.step()
    assert probe.steps[-1].num_departed == 1  # the other request was not running
    bench.drain()
    assert probe.gone == ["1", "2", "0"]


# The budget


def test_smallest_budget_applies_for_one_step(
    probed: MakeProbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, probe = probed(300)
    probe.tokens = 10
    bench.play({"0": 10})
    # It is also restored when upstream raises.
    monkeypatch.setattr(bench.scheduler.kv_cache_manager, "new_step_starts", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        bench.step()
    monkeypatch.undo()
    assert bench.scheduler.max_num_scheduled_tokens == 64
    probe.tokens = None
    bench.play({"0": 64})


@pytest.mark.parametrize("budget", [-5, 0, 1, 1_000_000])
def test_budget_never_starves_decodes_or_exceeds_the_engines_budget(
    probed: MakeProbed, budget: int
) -> None:
    bench, probe = probed(8, 8, 8, 300)
    bench.step()
    probe.tokens = budget
    tokens = bench.step()
    assert {name: tokens[name] for name in "012"} == dict.fromkeys("012", 1)
    assert sum(tokens.values()) <= 64


# Pausing decodes


@pytest.mark.parametrize("asynchronous", [False, True])
def test_paused_decodes_skip_the_step_and_continue(probed: MakeProbed, asynchronous: bool) -> None:
    kind = PolicyScheduler if asynchronous else SyncPolicyScheduler
    bench, probe = probed(8, scheduler_cls=kind, async_scheduling=asynchronous)
    bench.step()
    probe.pause = True
    # Decodes are not paused without prefills.
    bench.play({"0": 1}, add("new", 150), {"new": 64}, {"new": 64})
    assert probe.results[-1].decodes == 0
    probe.pause = False
    bench.play({"0": 1, "new": 22})
    bench.drain()
    assert [seen.paused_steps for seen in probe.steps[:6]] == [0, 0, 0, 1, 2, 0]


def test_decodes_paused_for_a_prompt_without_room_continue(probed: MakeProbed) -> None:
    bench, probe = probed(num_blocks=21, budget=256)
    bench.play(add("big", 200, output=100), 1, add("stuck", 250))
    probe.pause = True
    bench.play(*[{}, {"big": 1}] * 5)
    bench.drain()


# Progress


@pytest.mark.parametrize("cut", [0, -3])
def test_step_after_an_empty_one_is_not_cut(probed: MakeProbed, cut: int) -> None:
    bench, probe = probed(100)
    probe.cut = cut
    bench.play({}, {"0": 64}, {}, {"0": 36})


def test_engine_pause_does_not_lift_cuts(probed: MakeProbed) -> None:
    bench, probe = probed(100)
    probe.cut = 10
    bench.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    bench.play({})
    bench.scheduler.set_pause_state(PauseState.UNPAUSED)
    bench.play({"0": 10})


# Admission


def test_next_to_enter_considers_slots_gates_and_pauses(
    probed: MakeProbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, probe = probed(20, 20, 20, max_num_seqs=2)
    bench.steps(2)
    assert probe.entered == [True, False]  # both slots are taken
    bench.abort("1")
    monkeypatch.setattr(bench.scheduler.waiting, "_choose_offer", lambda: None)
    bench.step()
    monkeypatch.undo()
    bench.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    bench.step()
    bench.scheduler.set_pause_state(PauseState.UNPAUSED)
    bench.step()
    assert probe.entered[2:] == [False, False, True]


@pytest.mark.parametrize(("looks", "first"), [(False, ["0"]), (True, ["0", "0"])])
def test_lane_of_the_head_is_computed_once_per_step(
    probed: MakeProbed, looks: bool, first: list[str]
) -> None:
    """A lane by cached tokens is computed twice: for the probe, and for vLLM."""
    bench, _ = probed(20, 20, max_num_seqs=1)
    calls: list[str] = []

    def lane(request: RequestView, cached: Callable[[], int]) -> str:
        calls.append(request.request_id)
        return "" if not looks or cached() >= 0 else "never"

    bench.scheduler._planner.hooks.lane = [(0, lane)]
    bench.step()
    assert calls == [*first, "1"]
    bench.step()
    assert calls == [*first, "1", "1"]


# Order


def test_policy_without_hooks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Quiet(Policy):
        name: ClassVar[str] = "quiet"
        settings_type: ClassVar[type[Settings]] = Settings

    monkeypatch.setitem(registry.POLICIES, "quiet", Quiet)
    with_policy, upstream = Bench({"quiet": {}}), Bench(None)
    for bench in (with_policy, upstream):
        bench.add_all({"0": 300, "1": 20, "2": 500})
    hooks = with_policy.scheduler._planner.hooks
    assert hooks.chunk == hooks.budget == hooks.observe == []
    assert with_policy.steps(30) == upstream.steps(30)


def test_policy_that_does_not_arrange_keeps_vllms_order(probed: MakeProbed) -> None:
    bench, _ = probed(300, 10, long_prefill_token_threshold=32)
    bench.steps(2)
    assert names(bench.scheduler.running) == ["0", "1"]  # the decode stays behind the prefill


def test_results_of_steps_in_flight_are_matched(probed: MakeProbed) -> None:
    bench, probe = probed(20, 150, ahead=True)
    bench.steps(3)
    assert [r.decodes for r in probe.results] == [0, 1]


def test_decode_behind_a_preempted_answer_gets_its_token() -> None:
    bench = Bench({"chunk_budget": {"chunk": 10}}, long_prefill_token_threshold=10)
    bench.add_all({"long": 300, "back": 200, "decode": 8}, output=500)
    bench.play({"long": 10, "back": 10, "decode": 8})
    # Like a preempted answer of 20 tokens that has entered again.
    back = bench.scheduler.requests["back"]
    back.append_output_token_ids([7] * 20)
    back.num_preemptions = 1
    for _ in range(5):
        bench.play({"long": 10, "decode": 1})
        assert names(bench.scheduler.running) == ["long", "back", "decode"]


# Speculative decoding


@pytest.mark.parametrize("name", [*registry.POLICIES, "tight chunk_budget"])
def test_last_uncached_token_is_padded_as_in_upstream(name: str) -> None:
    policies = {"chunk_budget": {"chunk": 2}} if name.startswith("tight") else {name: {}}
    bench = Bench(policies, prefix_caching=True)
    bench.scheduler.num_spec_tokens = 3
    # Two blocks and a token: on repeat, all but the token is cached.
    prompt = list(range(10, 10 + 33))
    bench.add("a", prompt, output=1)
    bench.drain()
    bench.add("b", prompt, output=1)
    bench.play({"b": 4})


POLICIES_THAT_CUT: list[dict[str, dict[str, object]]] = [
    {"long_prompt": {}},
    {"rotation": {}},
    {"lanes": {}},
    {"deferred_prefill": {}},
    {"chunk_budget": {}},
    {"chunk_budget": {"chunk": 4000}},
    {"long_prompt": {}, "lanes": {}, "rotation": {}, "chunk_budget": {}},
]


@pytest.mark.parametrize("policies", POLICIES_THAT_CUT, ids="+".join)
@pytest.mark.parametrize("drafted", [0, 2])
def test_no_tokens_are_kept_for_absent_drafts(
    policies: dict[str, dict[str, object]], drafted: int
) -> None:
    """With the maximum of drafts, decodes would exceed the step."""
    bench = Bench(policies, ahead=False, budget=256, max_num_seqs=40)
    if "long_prompt" in policies:
        bench["long_prompt"].chunk_size = PinnedChunk(256)
    scheduler = bench.scheduler
    scheduler.num_spec_tokens = 7
    bench.add_all({f"d{number}": 8 for number in range(32)}, output=600)
    bench.until(lambda: len(scheduler.running) == 32)
    bench.play(1, add("prompt", 500, output=1))
    got = []
    while "prompt" in scheduler.requests:
        for request in scheduler.running:
            if not request.is_prefill_chunk:
                request.spec_token_ids = [7] * drafted
        # Policies size chunks by step times.
        got.append(bench.step(0.001)["prompt"])
    beside = 256 - 32 * (1 + drafted)
    assert got[0] == beside  # as in upstream
    assert sum(got) == 500
    assert len(got) <= 500 // beside + 1
