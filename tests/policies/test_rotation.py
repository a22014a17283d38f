"""Rotation: A1 B1 C1 A2 ..., new prompts in turn."""

from __future__ import annotations

import pytest

from tests.engine.schedulers import make_request, make_scheduler
from tests.engine.schedulers import step as take_step
from tests.policies.closed_loop import FakeRequest
from tests.policies.making import Bench
from vllm_sched.policies import registry
from vllm_sched.policies.kv_cache import KvCache, KvGroup
from vllm_sched.policies.rotation import Rotation, RotationSettings
from vllm_sched.policies.types import EngineFacts, Gate, LaneCount, Step


def rotating(**settings: object) -> dict[str, dict[str, object]]:
    return {"rotation": settings}


def scheduled_names(bench: Bench, count: int) -> list[str]:
    """Run steps; return the names of the requests in each."""
    return ["".join(sorted(tokens)) for tokens in bench.steps(count)]


def test_chunks_rotate() -> None:
    bench = Bench(rotating())
    for name in "ABC":
        bench.add(name, 64 * 3)
    assert scheduled_names(bench, 6) == ["A", "B", "C", "A", "B", "C"]
    # The first finished prompt decodes in the step of the next one's last chunk.
    assert bench.steps(2) == [{"A": 64}, {"A": 1, "B": 63}]


def test_new_prompt_precedes_prompts_with_a_later_chunk() -> None:
    bench = Bench(rotating())
    bench.add("A", 640)
    bench.add("B", 640)
    assert scheduled_names(bench, 3) == ["A", "B", "A"]
    bench.now += 0.001
    bench.add("C", 640)  # A has its chunk until now, B had its own before
    assert scheduled_names(bench, 6) == ["B", "C", "A", "B", "C", "A"]


def test_single_prompt_has_every_step() -> None:
    bench = Bench(rotating(chunk=10))
    bench.add("A", 640)
    assert bench.steps(2) == [{"A": 64}, {"A": 64}]


def test_chunk_setting_splits_a_step_into_full_turns() -> None:
    bench = Bench(rotating(chunk=16))
    for name in "ABCDEF":
        bench.add(name, 96)
    got = bench.steps(3)
    assert got[0] == dict.fromkeys("ABCD", 16)
    assert got[1] == dict.fromkeys("EFAB", 16)
    assert got[2] == dict.fromkeys("CDEF", 16)


def test_turn_above_the_budget_is_a_whole_step() -> None:
    bench = Bench(rotating(chunk=100))
    for name in "AB":
        bench.add(name, 192)
    assert scheduled_names(bench, 4) == ["A", "B", "A", "B"]


def test_rest_of_a_turn_goes_to_the_next_prompt() -> None:
    bench = Bench(rotating())
    bench.add("A", 40)
    bench.add("B", 100)
    assert bench.step() == {"A": 40, "B": 24}


def test_new_prompt_takes_only_the_tokens_that_it_needs() -> None:
    bench = Bench(rotating())
    bench.add("A", 640)
    bench.step()
    bench.add("s", 20)
    assert bench.step() == {"A": 44, "s": 20}


def test_decodes_get_their_tokens_first() -> None:
    bench = Bench(rotating())
    bench.add("d", 10)
    bench.step()
    bench.add("A", 640)
    bench.add("B", 640)
    assert bench.steps(2) == [{"d": 1, "A": 63}, {"d": 1, "B": 63}]
    bench.add("s", 20)
    assert bench.steps(2)[1] == {"d": 1, "B": 43, "s": 20}


def test_stream_of_new_prompts_does_not_stop_the_rotation() -> None:
    bench = Bench(rotating(), max_num_seqs=64)
    bench.add("A", 1900)
    got = []
    for number in range(20):
        bench.add(f"n{number}", 640)
        got.append("A" in bench.step())
    assert sum(got) >= 2


def test_blocked_prompt_stops_no_other_prompt() -> None:
    bench = Bench(rotating())
    bench.add("d", 10, output=500)
    bench.step()
    bench.add("A", 1400)
    bench.step()
    bench.turn_away("lora")
    bench.add("lora", 900)
    assert sum(step.get("A", 0) for step in bench.steps(18)) >= 15 * 63
    assert "lora" not in bench.running


def test_overdue_prompt_has_turns_while_many_wait() -> None:
    bench = Bench(rotating(max_wait_s=1.0), max_num_seqs=64)
    bench.add("A", 1400, output=2)
    bench.step()
    for number in range(80):
        bench.add(f"n{number}", 640)
    assert sum(bench.step(0.1).get("A", 0) for _ in range(60)) >= 4 * 64


def test_block_alignment_adds_no_chunk_without_a_turn() -> None:
    """Hybrid models align chunks to the block boundaries of their state."""
    bench = Bench(rotating())
    bench.scheduler.need_mamba_block_aligned_split = True
    bench.scheduler._mamba_block_aligned_split = lambda _, tokens, *__: tokens // 16 * 16
    for name in "AB":
        bench.add(name, 64 * 3)
    assert scheduled_names(bench, 6) == ["A", "B"] * 3


def test_prompt_waits_for_blocks_that_running_prefills_need() -> None:
    bench = Bench(rotating(), num_blocks=63)  # 62 blocks of 16 hold 992 tokens
    for name in "AB":
        bench.add(name, 600, output=4)
    assert scheduled_names(bench, 9) == ["A"] * 9
    assert bench["rotation"].held_reason("") == "kv_of_prefills"
    bench.drain()
    assert bench.scheduler.kv_cache_manager.usage == 0


def test_prompts_of_one_step_do_not_need_the_same_blocks() -> None:
    bench = Bench(rotating(chunk=16), num_blocks=63)
    requests = [bench.add(name, 300, output=1) for name in "ABCD"]
    # Three prompts of 19 blocks fit into 62 blocks.
    assert bench.step() == dict.fromkeys("ABC", 16)
    bench.drain()
    assert not any(request.num_preemptions for request in requests)


def begun(
    *prefills: FakeRequest, head: FakeRequest | None = None, decodes: int = 0, chunk: int = 0
) -> Rotation:
    """Return the policy in a step of 64 tokens, with a KV cache of ten blocks."""
    cache = KvCache(10, [KvGroup(16, 100)])
    policy = Rotation(EngineFacts(2000, 64, 16, cache), RotationSettings(chunk=chunk))
    step = Step(1, 0.0, 64, decodes, prefills, free_slots=16, may_enter=lambda: head)
    policy.begin_step(step, {"": LaneCount(requests=3)} if chunk else {})
    return policy


@pytest.mark.parametrize(
    ("computed", "tokens", "waited", "gate"),
    [
        (0, 80, 0.0, Gate.OPEN),
        (0, 81, 0.0, Gate.CLOSED),
        (48, 128, 0.0, Gate.OPEN),
        (48, 129, 0.0, Gate.CLOSED),
        (0, 81, 9.9, Gate.CLOSED),
        (0, 81, 10.0, Gate.OPEN),
    ],
)
def test_prompt_enters_if_the_cache_has_blocks_for_all_or_after_its_bound(
    computed: int, tokens: int, waited: float, gate: Gate
) -> None:
    policy = begun(FakeRequest("A", 80, num_computed_tokens=computed))
    assert policy.gate("", FakeRequest("B", tokens), waited) is gate


def test_tokens_taken_back_go_to_the_next_prompt() -> None:
    first, second = FakeRequest("A"), FakeRequest("B")
    policy = begun(first, second)
    assert policy.chunk(first, 0, 64) == 64
    policy.taken_back(first, 20)
    policy.taken_back(FakeRequest("waiting"), 9)
    assert policy.chunk(second, 0, 64) == 20


def test_prompt_that_was_held_until_now_has_its_turn() -> None:
    """The counts of held requests are of the last step."""
    first = FakeRequest("A")
    assert begun(first, head=FakeRequest("B", 40)).chunk(first, 0, 64) == 24


@pytest.mark.parametrize(("decodes", "left"), [(0, 0), (64, 1)])
def test_chunk_is_never_negative(decodes: int, left: int) -> None:
    """Three turns of 22 tokens exceed a step of 64."""
    first = FakeRequest("A")
    head = None if decodes else FakeRequest("B")
    assert begun(first, head=head, decodes=decodes, chunk=20).chunk(first, 0, 64) == left


def test_no_turn_is_kept_for_more_prompts_than_slots() -> None:
    bench = Bench(rotating(chunk=16), max_num_seqs=2)
    bench.add("A", 640)
    bench.step()
    for name in "BC":
        bench.add(name, 640)
    assert bench.step() == {"A": 32, "B": 32}


def test_no_turn_is_kept_for_a_prompt_without_room() -> None:
    bench = Bench(rotating(max_wait_s=1.0), num_blocks=110, scheduler_reserve_full_isl=True)
    bench.add("A", 1300)
    bench.steps(10)
    bench.add("B", 1200)
    bench.now += 2
    bench.step()
    assert bench.steps(8) == [{"A": 64}] * 8


def test_overdue_prompt_stops_the_prompts_that_pass_it() -> None:
    """Otherwise prompts of another lane would take its blocks forever."""
    bench = Bench(
        {
            "long_prompt": {
                "long_prefill_token_threshold": 400,
                "long_prefill_share": 0.5,
                "max_wait_s": 0.5,
            },
            "rotation": {"max_wait_s": 0.5},
        },
        num_blocks=126,
        scheduler_reserve_full_isl=True,
    )
    count = 0

    def flood() -> None:
        nonlocal count
        while len(bench.scheduler.requests) < 6:
            count += 1
            bench.add(f"m{count}", 300, output=6)
        bench.step(0.02)

    for _ in range(50):
        flood()
    bench.add("big", 1500, output=2)
    since = bench.now
    while "big" not in bench.running:
        flood()
        assert bench.now - since < 1  # both bounds


def test_rotation_halves_the_spread_of_eight_equal_prompts() -> None:
    def firsts(rotate: bool) -> list[int]:
        scheduler = make_scheduler(rotating() if rotate else None)
        for name in range(8):
            scheduler.add_request(make_request(640, name=str(name), output=200))
        seen: dict[str, int] = {}
        for number in range(200):
            take_step(scheduler)
            for request in scheduler.running:
                if request.num_output_tokens:
                    seen.setdefault(request.request_id, number)
        assert len(seen) == 8
        return sorted(seen.values())

    rotated, plain = firsts(True), firsts(False)
    assert rotated[-1] - rotated[0] <= (plain[-1] - plain[0]) / 2
    assert rotated[-1] <= plain[-1] * 1.05


def test_gauges_show_the_prompts_in_rotation() -> None:
    bench = Bench(rotating(chunk=16))
    for name in "ABC":
        bench.add(name, 300)
    bench.steps(2)
    assert bench["rotation"].gauges() == {"prompts_in_rotation": 3, "turn_tokens": 22}


@pytest.mark.parametrize("tokens", [1, 5000])
def test_gate_is_open_without_prefills(tokens: int) -> None:
    assert begun().gate("", FakeRequest("A", tokens), 0.0) is Gate.OPEN


def test_former_order_has_no_effect_and_a_warning() -> None:
    steps = []
    for settings in ({}, {"order": "shortest"}):
        bench = Bench(rotating(**settings))
        for name, tokens in (("A", 640), ("B", 192)):
            bench.add(name, tokens)
        steps.append(bench.steps(15))
    assert steps[0] == steps[1]
    (warning,) = registry.former_settings(rotating(order="shortest"))
    assert "no effect" in warning
    assert "long_prompt" in warning
