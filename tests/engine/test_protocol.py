# ruff: noqa: ARG002 - the probe has the protocol's whole signatures
"""Each hook of the policy protocol, on real scheduler objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import pytest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request, RequestStatus

from tests.engine.schedulers import answer, drain, make_request, make_scheduler, step
from tests.policies.making import Bench, PinnedChunk
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

    def arrived(self, request: RequestView, wishes: Mapping[str, object]) -> None:
        self.arrivals.append((request.request_id, wishes))

    def begin_step(self, step: Step, lanes: Mapping[str, LaneCount]) -> None:
        self.steps.append(step)

    def budget(self, step: Step) -> int:
        self.entered.append(step.may_enter() is not None)
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
def probed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, Probe]]:
    """Return a function that creates a scheduler with a probe."""
    monkeypatch.setitem(registry.POLICIES, "probe", Probe)

    def make(*prompts: int, **options: Any) -> tuple[Any, Probe]:
        scheduler = make_scheduler({"probe": {}}, **options)
        for name, tokens in enumerate(prompts):
            scheduler.add_request(make_request(tokens, name=str(name)))
        return scheduler, scheduler._policies[0]

    return make


MakeProbed = Callable[..., tuple[Any, Probe]]


def names(requests: Sequence[RequestView]) -> list[str]:
    return [request.request_id for request in requests]


# Step


def test_step_counts_running_decoding_and_waiting_requests(probed: MakeProbed) -> None:
    scheduler, probe = probed(20, 300, 10, max_num_seqs=2, num_blocks=101)
    for _ in range(3):
        step(scheduler)
    seen = probe.steps[2]
    assert (seen.running, seen.waiting, seen.holding_kv, seen.free_slots) == (2, 1, 0, 0)
    assert names(seen.decoding) == ["0"]
    assert names(seen.prefills) == ["1"]
    assert (seen.decodes, seen.context_tokens) == (1, 21)
    # 22 tokens, and 64 - 20 + 63 of the second prompt, take two and seven of a hundred blocks.
    assert seen.kv_free == pytest.approx(0.91)
    assert seen.now == pytest.approx(seen.clock_offset + 1_700_000_000, abs=1e10)


def test_result_has_decodes_and_their_context(probed: MakeProbed) -> None:
    scheduler, probe = probed(20, 300)
    step(scheduler)
    step(scheduler)
    assert [(r.decodes, r.context_tokens) for r in probe.results] == [(0, 0), (1, 20)]
    assert [c.tokens for c in probe.results[1].chunks] == [63]


def test_waiting_requests_with_kv_blocks_are_counted_separately(probed: MakeProbed) -> None:
    scheduler, probe = probed(20)
    holder = make_request(20, name="holder")
    holder.num_computed_tokens = 19
    scheduler.kv_holding_waiting.add_request(holder)
    scheduler.requests["holder"] = holder
    scheduler._planner.begin_step(scheduler.clock(), scheduler.wall_clock())
    assert (probe.steps[-1].waiting, probe.steps[-1].holding_kv) == (1, 1)


# Arrivals and departures


def test_extra_args_are_passed_at_the_arrival(probed: MakeProbed) -> None:
    scheduler, probe = probed()
    request = make_request(20, name="asks")
    assert request.sampling_params is not None
    request.sampling_params.extra_args = {"lane": "batch"}
    scheduler.add_request(request)
    scheduler.add_request(make_request(20, name="silent"))
    assert probe.arrivals == [("asks", {"lane": "batch"}), ("silent", {})]


def test_departures_include_aborts_but_not_preemptions(probed: MakeProbed) -> None:
    scheduler, probe = probed(20, 20, 20, max_num_seqs=2)
    step(scheduler)
    scheduler.reset_prefix_cache(reset_running_requests=True)
    assert probe.gone == []
    step(scheduler)
    assert probe.steps[-1].departed == 0
    scheduler.finish_requests("1", RequestStatus.FINISHED_ABORTED)
    scheduler.finish_requests("2", RequestStatus.FINISHED_ABORTED)
    assert probe.gone == ["1", "2"]
    step(scheduler)
    assert probe.steps[-1].departed == 1  # the other request was not running
    drain(scheduler)
    assert probe.gone == ["1", "2", "0"]


# The budget


def test_smallest_budget_applies_for_one_step(probed: MakeProbed) -> None:
    scheduler, probe = probed(300)
    probe.tokens = 10
    assert step(scheduler) == {"0": 10}
    assert scheduler.max_num_scheduled_tokens == 64
    probe.tokens = None
    assert step(scheduler) == {"0": 64}


def test_budget_is_restored_when_upstream_raises(
    probed: MakeProbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, probe = probed(300)
    probe.tokens = 10
    monkeypatch.setattr(scheduler.kv_cache_manager, "new_step_starts", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        scheduler.schedule()
    assert scheduler.max_num_scheduled_tokens == 64


@pytest.mark.parametrize("budget", [-5, 0, 1, 1_000_000])
def test_budget_never_starves_decodes_or_exceeds_the_engines_budget(
    probed: MakeProbed, budget: int
) -> None:
    scheduler, probe = probed(8, 8, 8, 300)
    step(scheduler)
    probe.tokens = budget
    tokens = step(scheduler)
    assert {name: tokens[name] for name in "012"} == dict.fromkeys("012", 1)
    assert sum(tokens.values()) <= 64


# Pausing decodes


@pytest.mark.parametrize("asynchronous", [False, True])
def test_paused_decodes_skip_the_step_and_continue(probed: MakeProbed, asynchronous: bool) -> None:
    kind = PolicyScheduler if asynchronous else SyncPolicyScheduler
    scheduler, probe = probed(8, scheduler_cls=kind, async_scheduling=asynchronous)
    step(scheduler)
    scheduler.add_request(make_request(150, name="new"))
    probe.pause = True
    assert step(scheduler) == {"new": 64}
    assert step(scheduler) == {"new": 64}
    assert probe.results[-1].decodes == 0
    probe.pause = False
    assert step(scheduler) == {"0": 1, "new": 22}
    drain(scheduler)
    assert [seen.paused_steps for seen in probe.steps[:5]] == [0, 0, 1, 2, 0]


def test_decodes_are_not_paused_without_prefills(probed: MakeProbed) -> None:
    scheduler, probe = probed(8)
    step(scheduler)
    probe.pause = True
    assert step(scheduler) == {"0": 1}


# Progress


@pytest.mark.parametrize("cut", [0, -3])
def test_step_after_an_empty_one_is_not_cut(probed: MakeProbed, cut: int) -> None:
    scheduler, probe = probed(100)
    probe.cut = cut
    assert step(scheduler) == {}
    assert step(scheduler) == {"0": 64}
    assert step(scheduler) == {}
    assert step(scheduler) == {"0": 36}


def test_decodes_paused_for_a_prompt_without_room_continue(probed: MakeProbed) -> None:
    scheduler, probe = probed(num_blocks=21, budget=256)
    scheduler.add_request(make_request(200, name="big", output=100))
    step(scheduler)
    scheduler.add_request(make_request(250, name="stuck"))
    probe.pause = True
    got = [step(scheduler).get("big", 0) for _ in range(10)]
    assert got == [0, 1] * 5
    drain(scheduler)


def test_engine_pause_does_not_lift_cuts(probed: MakeProbed) -> None:
    scheduler, probe = probed(100)
    probe.cut = 10
    scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert step(scheduler) == {}
    scheduler.set_pause_state(PauseState.UNPAUSED)
    assert step(scheduler) == {"0": 10}


# Admission


def test_may_enter_considers_slots_gates_and_pauses(
    probed: MakeProbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, probe = probed(20, 20, 20, max_num_seqs=2)
    step(scheduler)
    step(scheduler)
    assert probe.entered == [True, False]  # both slots are taken
    scheduler.finish_requests("1", RequestStatus.FINISHED_ABORTED)
    monkeypatch.setattr(scheduler.waiting, "_choose", lambda: None)
    step(scheduler)
    monkeypatch.undo()
    scheduler.set_pause_state(PauseState.PAUSED_NEW)
    step(scheduler)
    scheduler.set_pause_state(PauseState.UNPAUSED)
    step(scheduler)
    assert probe.entered[2:] == [False, False, True]


@pytest.mark.parametrize(("looks", "first"), [(False, ["0"]), (True, ["0", "0"])])
def test_lane_of_the_head_is_computed_once_per_step(
    probed: MakeProbed, looks: bool, first: list[str]
) -> None:
    """A lane by cached tokens is computed twice: for the probe, and for vLLM."""
    scheduler, _ = probed(20, 20, max_num_seqs=1)
    calls: list[str] = []

    def lane(request: RequestView, cached: Callable[[], int]) -> str:
        calls.append(request.request_id)
        return "" if not looks or cached() >= 0 else "never"

    scheduler._planner.hooks.lane = [(0, lane)]
    step(scheduler)
    assert calls == [*first, "1"]
    step(scheduler)
    assert calls == [*first, "1", "1"]


# Order


def test_prefills_lead_if_a_policy_sets_it(
    probed: MakeProbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Probe, "arranges", True)
    monkeypatch.setattr(Probe, "prefills_lead", True)
    scheduler, _ = probed(8, 400)
    step(scheduler)
    assert step(scheduler) == {"1": 64}


def test_policy_without_hooks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Quiet(Policy):
        name: ClassVar[str] = "quiet"
        settings_type: ClassVar[type[Settings]] = Settings

    monkeypatch.setitem(registry.POLICIES, "quiet", Quiet)
    with_policy, upstream = make_scheduler({"quiet": {}}), make_scheduler()
    for scheduler in (with_policy, upstream):
        for name, tokens in enumerate((300, 20, 500)):
            scheduler.add_request(make_request(tokens, name=str(name)))
    hooks = with_policy._planner.hooks
    assert hooks.chunk == hooks.budget == hooks.observe == []
    for _ in range(30):
        assert step(with_policy) == step(upstream)


def test_policy_that_does_not_arrange_keeps_vllms_order(probed: MakeProbed) -> None:
    scheduler, _ = probed(300, 10, long_prefill_token_threshold=32)
    step(scheduler)
    step(scheduler)
    assert names(scheduler.running) == ["0", "1"]  # the decode stays behind the prefill


def test_results_of_steps_in_flight_are_matched(probed: MakeProbed) -> None:
    scheduler, probe = probed(20, 150, scheduler_cls=PolicyScheduler, async_scheduling=True)
    first = scheduler.schedule()
    result = answer(scheduler, first)
    second = scheduler.schedule()
    later = answer(scheduler, second)
    scheduler.update_from_output(first, result)
    scheduler.update_from_output(second, later)
    assert [r.decodes for r in probe.results] == [0, 1]


def test_requests_satisfy_the_request_view() -> None:
    request: RequestView = make_request(20)
    assert isinstance(request, Request)
    assert (request.num_output_tokens, request.num_tokens) == (0, 20)


# Preempted answers


def test_decode_behind_prefills_gets_its_token() -> None:
    scheduler = make_scheduler({"chunk_budget": {"chunk": 10}}, long_prefill_token_threshold=10)
    for tokens, name in ((300, "long"), (200, "back"), (8, "decode")):
        scheduler.add_request(make_request(tokens, name=name, output=500))
    assert step(scheduler) == {"long": 10, "back": 10, "decode": 8}
    # Like a preempted answer of 20 tokens that has entered again.
    back = scheduler.requests["back"]
    back.append_output_token_ids([7] * 20)
    back.num_preemptions = 1
    for _ in range(5):
        assert step(scheduler) == {"long": 10, "decode": 1}
        assert [r.request_id for r in scheduler.running] == ["long", "back", "decode"]


# Speculative decoding


@pytest.mark.parametrize("policy", sorted(registry.POLICIES))
@pytest.mark.parametrize("tight", [False, True])
def test_last_uncached_token_is_padded_as_in_upstream(policy: str, tight: bool) -> None:
    settings: dict[str, object] = {"chunk": 2} if tight and policy == "chunk_budget" else {}
    scheduler = make_scheduler({policy: settings}, prefix_caching=True)
    scheduler.num_spec_tokens = 3
    # Two blocks and a token: on repeat, all but the token is cached.
    prompt = list(range(10, 10 + 33))
    scheduler.add_request(make_request(prompt, name="a", output=1))
    drain(scheduler)
    scheduler.add_request(make_request(prompt, name="b", output=1))
    assert step(scheduler) == {"b": 4}


POLICIES_THAT_CUT: list[dict[str, dict[str, object]]] = [
    {"long_prompt": {}},
    {"rotation": {}},
    {"lanes": {}},
    {"deferred_prefill": {}},
    {"prefill_first": {"pause_decodes": False}},
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
    # Policies size chunks by step times, so every step takes a millisecond.
    bench = Bench(policies, scheduler_cls=SyncPolicyScheduler, budget=256, max_num_seqs=40)
    if "long_prompt" in policies:
        bench["long_prompt"].size = PinnedChunk(256)
    scheduler = bench.scheduler
    scheduler.num_spec_tokens = 7
    for number in range(32):
        bench.add(f"decode {number}", 8, output=600)
    while len(scheduler.running) < 32:
        bench.step(0.001)
    bench.step(0.001)
    bench.add("prompt", 500, output=1)
    got = []
    while "prompt" in scheduler.requests:
        for request in scheduler.running:
            if not request.is_prefill_chunk:
                request.spec_token_ids = [7] * drafted
        got.append(bench.step(0.001)["prompt"])
    beside = 256 - 32 * (1 + drafted)
    assert got[0] == beside  # as in upstream
    assert sum(got) == 500
    assert len(got) <= 500 // beside + 1
