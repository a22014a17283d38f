"""Capacity by hand: the numbers one would get with a pencil."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tests.cost.linear_times import LINEAR_8B
from tests.present import present
from vllm_sched.cost.step_time import StepTime
from vllm_sched.cost.transfer import TransferTime
from vllm_sched.sim.planning import capacity_bound
from vllm_sched.sim.types import WorkerModel

TIME = StepTime(decode_fixed_s=0.02, decode_s=1e-4, prefill_fixed_s=0.022, prefill_s=1e-4)
BLOCKS = {"token_bytes": 1000, "block": 10, "pieces": 4}


def test_a_70b_model_on_four_gpus_of_80_gb_leaves_room_for_so_many_tokens() -> None:
    found = capacity_bound.kv_tokens(
        gpus=4, memory=80e9, used=0.9, weights=141e9, beside=3e9, token_bytes=320 * 1024
    )
    assert found == int((4 * 69e9 - 141e9) / 327_680) == 411_987


def test_a_model_that_does_not_fit_leaves_none() -> None:
    args = {"gpus": 1, "memory": 80e9, "used": 0.9, "beside": 3e9, "token_bytes": 1}
    assert capacity_bound.kv_tokens(weights=141e9, **args) == 0  # type: ignore[arg-type]


def test_requests_are_held_at_half_of_their_answer() -> None:
    assert capacity_bound.sequences_held(100_000, 900, 200) == 100
    assert capacity_bound.sequences_held(500, 900, 200) == 0


def test_a_prompt_pays_the_fixed_part_for_each_of_its_steps() -> None:
    assert capacity_bound.prefill_seconds(TIME, 2500, 1000) == pytest.approx(3 * 0.022 + 0.25)
    floored = StepTime(prefill_s=1e-4, floor_s=0.05)
    assert capacity_bound.prefill_seconds(floored, 10, 1000) == 0.05


def test_computing_bounds_requests() -> None:
    # 0.1 s of prefill, 99 steps of 0.1 ms, and 99 fixed parts shared by 50.
    each = 0.1 + 99 * 1e-4 + 99 / 50 * 0.02
    assert capacity_bound.most_requests_per_s(TIME, 1000, 100, 50, 8192) == pytest.approx(1 / each)
    # One token only: the fixed part is that of its chunk.
    each = 0.1 + 1000 / 500 * 0.022
    assert capacity_bound.most_requests_per_s(TIME, 1000, 1, 50, 500) == pytest.approx(1 / each)


def test_no_worker_takes_less_for_requests_of_all_lengths() -> None:
    model = WorkerModel(
        name="w", time=TIME, max_model_len=16_384, kv_tokens=100_000, max_num_seqs=50,
        max_num_batched_tokens=8192,
    )  # fmt: skip
    alike = [(1000, 100, 0)] * 7
    each = 0.1 + 99 * 1e-4 + 99 / 50 * 0.02
    assert capacity_bound.least_seconds(model, alike) == pytest.approx(7 * each)
    # Its cache holds ten of 10,000 tokens: the fixed parts are shared by no more.
    each = 1.0 + 99 * 1e-4 + 99 * 10_050 / 100_000 * 0.02
    assert capacity_bound.least_seconds(model, [(10_000, 100, 0)]) == pytest.approx(each)
    # What is cached is attended to alone.
    pairs = replace(model, time=replace(TIME, pair_s=1e-8))
    each = 0.02 + 200 * 100 * 1e-8 + 200 * 800 * 1e-8 + 99 / 50 * 0.02 + 99 * 1e-4
    assert capacity_bound.least_seconds(pairs, [(1000, 100, 800)]) == pytest.approx(each)


def test_bytes_that_hand_overs_move() -> None:
    assert capacity_bound.moved_bytes_per_s(10, 2000, 327_680) == pytest.approx(6.5536e9)


def test_a_link_moves_bytes_and_pieces() -> None:
    link = TransferTime(0.5, 1e-6, 1e-9)
    per_token = 1000e-9 + 4 / 10 * 1e-6
    assert capacity_bound.link_tokens_per_s(link, **BLOCKS) == pytest.approx(1 / per_token)
    assert capacity_bound.transfer_seconds(link, 95, **BLOCKS) == pytest.approx(
        0.5 + 100e-6 + 40e-6
    )
    assert capacity_bound.link_tokens_per_s(TransferTime(0.5), **BLOCKS) == math.inf


def test_chunks_read_again_what_was_computed_before() -> None:
    time = replace(TIME, read_s=1e-6)
    assert capacity_bound.prefill_work(time, 500, 512) == capacity_bound.prefill_work(
        TIME, 500, 512
    )
    more = capacity_bound.prefill_work(time, 2000, 512) - capacity_bound.prefill_work(
        TIME, 2000, 512
    )
    assert more == pytest.approx((512 + 1024 + 1536) * 1e-6)


def test_where_the_transfer_becomes_the_limit() -> None:
    # Per token 0.2 ms against 0.1 ms of prefill, which has 22 ms besides: equal at 220 tokens.
    slow = TransferTime(0.0, 0.0, 2e-7)
    found = present(capacity_bound.limiting_prompt(TIME, slow, **BLOCKS))
    assert found == pytest.approx(221, abs=10)
    assert capacity_bound.limiting_prompt(TIME, TransferTime(0.0, 0.0, 1e-9), **BLOCKS) is None
    assert capacity_bound.limiting_prompt(TIME, TransferTime(1.0, 0.0, 1e-6), **BLOCKS) == 1
    # Where attention makes the longest slow to prefill, the link is the limit in between all the
    # same.
    pairs = replace(TIME, pair_s=TIME.prefill_s / 20_000)
    between = present(capacity_bound.limiting_prompt(pairs, slow, **BLOCKS))
    assert found <= between < 2 * found


def test_a_worker_at_a_glance() -> None:
    model = WorkerModel(
        name="w", time=LINEAR_8B, max_model_len=131_072, kv_tokens=400_000,
        transfer=TransferTime(0.002, 0.0, 1 / 87e9),
    )  # fmt: skip
    found = capacity_bound.Capacity.of(model, 1000, 200)
    assert found.held == 256
    assert found.longest == 131_072
    assert found.prefill_s == pytest.approx(0.0449, rel=0.005)
    assert found.link_bytes_per_s == pytest.approx(87e9)
    assert found.kv_bytes_per_s == pytest.approx(1000 * 131_072 / found.prefill_s)
    assert not found.link_is_the_limit
    slow = capacity_bound.Capacity.of(
        WorkerModel(
            name="w", time=LINEAR_8B, max_model_len=131_072, kv_tokens=400_000,
            transfer=TransferTime(0.002, 0.0, 1 / 1e9),
        ), 1000, 200,
    )  # fmt: skip
    assert slow.link_is_the_limit
    assert slow.limiting_prompt is not None
