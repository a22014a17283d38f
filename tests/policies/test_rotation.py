"""Rotation: A1 B1 C1 A2 ..., newcomers in turn."""

from __future__ import annotations

from itertools import pairwise

import pytest
from vllm.v1.request import RequestStatus

from tests.engine.schedulers import make_request, make_scheduler
from tests.engine.schedulers import step as take_step
from tests.policies.making import Bench
from vllm_sched.policies.types import Gate


def rotating(**settings: object) -> dict[str, dict[str, object]]:
    return {"rotation": settings}


def served(bench: Bench, count: int) -> list[str]:
    """Name who prefilled in each of so many steps."""
    return ["".join(sorted(tokens)) for tokens in bench.steps(count)]


def test_chunks_go_round() -> None:
    bench = Bench(rotating())
    for name in "ABC":
        bench.add(name, 64 * 3)
    assert served(bench, 6) == ["A", "B", "C", "A", "B", "C"]
    # The first to be done decodes in the step of the next one's last chunk.
    assert bench.steps(2) == [{"A": 64}, {"A": 1, "B": 63}]


def test_one_that_arrives_comes_before_those_who_had_a_chunk_since() -> None:
    bench = Bench(rotating())
    bench.add("A", 640)
    bench.add("B", 640)
    assert served(bench, 3) == ["A", "B", "A"]
    bench.now += 0.001
    bench.add("C", 640)  # A has its chunk until now, B had its own before
    assert served(bench, 6) == ["B", "C", "A", "B", "C", "A"]


def test_alone_it_has_every_step() -> None:
    bench = Bench(rotating(chunk=10))
    bench.add("A", 640)
    assert bench.steps(2) == [{"A": 64}, {"A": 64}]


def test_with_a_chunk_a_step_has_several_turns_and_none_is_half_empty() -> None:
    bench = Bench(rotating(chunk=16))
    for name in "ABCDEF":
        bench.add(name, 96)
    got = bench.steps(3)
    assert got[0] == dict.fromkeys("ABCD", 16)
    assert got[1] == dict.fromkeys("EFAB", 16)
    assert got[2] == dict.fromkeys("CDEF", 16)


def test_what_a_turn_leaves_is_for_the_next_in_line() -> None:
    bench = Bench(rotating())
    bench.add("A", 40)
    bench.add("B", 100)
    assert bench.step() == {"A": 40, "B": 24}


def test_a_newcomer_takes_no_more_of_a_turn_than_it_needs() -> None:
    bench = Bench(rotating())
    bench.add("A", 640)
    bench.step()
    bench.add("s", 20)
    assert bench.step() == {"A": 44, "s": 20}


def test_decodes_have_their_tokens_first() -> None:
    bench = Bench(rotating())
    bench.add("d", 10)
    bench.step()
    bench.add("A", 640)
    bench.add("B", 640)
    assert bench.steps(2) == [{"d": 1, "A": 63}, {"d": 1, "B": 63}]


def test_the_shortest_goes_first_if_so_asked() -> None:
    bench = Bench(rotating(order="shortest"))
    bench.add("A", 640)
    bench.add("B", 320)
    bench.add("C", 192)
    # Among those that wait and those in prefill alike: what is left decides.
    assert served(bench, 9) == ["C"] * 3 + ["BC"] * 5 + ["ABC"]


def test_a_shorter_one_that_arrives_goes_first_and_a_longer_one_does_not() -> None:
    bench = Bench(rotating(order="shortest"))
    bench.add("B", 64 * 4)
    assert served(bench, 1) == ["B"]
    bench.add("A", 640)
    assert served(bench, 1) == ["B"]
    bench.add("s", 20)
    assert bench.step() == {"s": 20, "B": 44}


def test_nobody_waits_beyond_the_bound_for_shorter_ones() -> None:
    bench = Bench(rotating(order="shortest", max_wait_s=1.0), max_num_seqs=64)
    bench.add("long", 1900)
    times = []
    for number in range(60):
        bench.add(f"s{number}", 100, output=1)
        if bench.step(0.1).get("long", 0) > 20:
            times.append(bench.now)
    assert max(after - before for before, after in pairwise(times)) <= 1.3
    assert bench["rotation"].counters()["starvation_releases"] >= 4


def test_a_steady_stream_of_newcomers_does_not_stop_the_round() -> None:
    bench = Bench(rotating(), max_num_seqs=64)
    bench.add("A", 1900)
    got = []
    for number in range(20):
        bench.add(f"n{number}", 640)
        got.append("A" in bench.step())
    assert sum(got) >= 2


@pytest.mark.parametrize("order", ["rotate", "shortest"])
def test_one_that_cannot_begin_stops_nobody(order: str) -> None:
    bench = Bench(rotating(order=order))
    bench.add("d", 10, output=500)
    bench.step()
    bench.add("A", 1400)
    bench.step()
    bench.turn_away("lora")
    bench.add("lora", 900)
    assert sum(step.get("A", 0) for step in bench.steps(18)) >= 15 * 63
    assert "lora" not in bench.running


def test_who_is_overdue_has_its_turn_however_many_wait() -> None:
    bench = Bench(rotating(max_wait_s=1.0), max_num_seqs=64)
    bench.add("A", 1400, output=2)
    bench.step()
    for number in range(80):
        bench.add(f"n{number}", 640)
    assert sum(bench.step(0.1).get("A", 0) for _ in range(60)) >= 4 * 64


def test_a_chunk_that_has_no_turn_is_not_made_whole_for_its_blocks() -> None:
    """Hybrid models keep their state at block boundaries, and chunks are aligned to them."""
    bench = Bench(rotating())
    bench.scheduler.need_mamba_block_aligned_split = True
    bench.scheduler._mamba_block_aligned_split = lambda _, tokens, *__: tokens // 16 * 16
    for name in "AB":
        bench.add(name, 64 * 3)
    assert served(bench, 6) == ["A", "B"] * 3


def test_a_prompt_whose_blocks_those_in_prefill_will_take_waits() -> None:
    bench = Bench(rotating(), num_blocks=63)  # 62 blocks of 16 hold 992 tokens
    for name in "AB":
        bench.add(name, 600, output=4)
    assert served(bench, 9) == ["A"] * 9
    assert bench["rotation"].held_reason("") == "kv_of_prefills"
    bench.drain()
    assert bench.scheduler.kv_cache_manager.usage == 0


def test_a_prompt_that_was_held_for_long_stops_those_that_pass_it() -> None:
    """Of another lane, they'd go on for ever to leave it no blocks."""
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
        assert bench.now - since < 5
    assert bench["rotation"].counters()["starvation_releases"] == 1


def test_spread_and_makespan_of_eight_equal_prompts() -> None:
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

    ours, theirs = firsts(True), firsts(False)
    assert ours[-1] - ours[0] <= (theirs[-1] - theirs[0]) / 2
    assert ours[-1] <= theirs[-1] * 1.05


def test_who_is_in_the_round_is_shown() -> None:
    bench = Bench(rotating(chunk=16))
    for name in "ABC":
        bench.add(name, 300)
    bench.steps(2)
    assert bench["rotation"].gauges() == {"prompts_in_rotation": 3, "turn_tokens": 22}


@pytest.mark.parametrize("tokens", [1, 5000])
def test_with_nobody_in_prefill_the_gate_is_open(tokens: int) -> None:
    bench = Bench(rotating())
    head = make_request(tokens)
    assert bench["rotation"].gate("", head, 0.0) is Gate.OPEN


def test_nothing_is_kept_of_one_that_left_while_it_was_waited_for() -> None:
    bench = Bench(rotating(max_wait_s=1.0), num_blocks=110, scheduler_reserve_full_isl=True)
    bench.add("A", 1300, output=200)
    bench.steps(10)
    bench.add("B", 1200)
    bench.now += 2
    bench.step()
    assert bench["rotation"]._let_in == {"B"}
    bench.scheduler.finish_requests("B", RequestStatus.FINISHED_ABORTED)
    assert not bench["rotation"]._let_in


def test_the_shortest_is_the_one_with_the_fewest_uncached_tokens() -> None:
    bench = Bench(rotating(order="shortest"), prefix_caching=True, max_model_len=20_000)
    document = list(range(10, 4810))
    bench.add("first", document, output=1)
    bench.drain()
    bench.add("running", 1000)
    bench.step()
    bench.add("medium", 600)
    bench.add("cached", [*document, *[3] * 20])
    # 20 tokens and the rest of a block are left of it: it comes before the others.
    assert bench.step()["cached"] <= 36
    assert "medium" not in bench.running


def test_room_is_kept_for_the_uncached_tokens_alone() -> None:
    bench = Bench(rotating(order="shortest"), prefix_caching=True, max_model_len=20_000)
    document = list(range(10, 4810))
    bench.add("first", document, output=1)
    bench.drain()
    bench.add("running", 1000)
    bench.step()
    bench.add("cached", [*document, *[3] * 20])
    # All of the step is used.
    assert sum(bench.step().values()) == 64


def test_a_waiting_prompt_moves_forward_once_its_prefix_is_cached() -> None:
    bench = Bench(
        rotating(order="shortest"), prefix_caching=True, max_model_len=20_000, max_num_seqs=1
    )
    document = list(range(10, 810))
    bench.add("first", document, output=40)
    bench.step()
    bench.add("medium", 300)
    bench.add("cached", [*document, *[3] * 20])
    bench.until(lambda: "first" not in bench.running)
    bench.step()
    assert bench.running == {"cached"}
    assert not bench["rotation"]._uncached.keys() - {"medium"}
