"""Capacity bounds against calculations by hand."""

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
MODEL = WorkerModel(
    name="w", time=TIME, max_model_len=16_384, kv_tokens=100_000, max_num_seqs=50,
    kv_token_bytes=1000, block_tokens=10, kv_pieces=4,
)  # fmt: skip


def test_prefill_seconds_adds_the_fixed_cost_of_each_step() -> None:
    assert capacity_bound.prefill_seconds(TIME, 2500, 1000) == pytest.approx(3 * 0.022 + 0.25)
    floored = StepTime(prefill_s=1e-4, floor_s=0.05)
    assert capacity_bound.prefill_seconds(floored, 10, 1000) == 0.05


def test_compute_bounds_the_request_rate() -> None:
    # 0.1 s of prefill, 99 steps of 0.1 ms, and 99 fixed parts shared by 50.
    cost = 0.1 + 99 * 1e-4 + 99 / 50 * 0.02
    assert capacity_bound.most_requests_per_s(TIME, 1000, 100, 50, 8192) == pytest.approx(1 / cost)
    # One token only: the fixed part is that of its chunk.
    cost = 0.1 + 1000 / 500 * 0.022
    assert capacity_bound.most_requests_per_s(TIME, 1000, 1, 50, 500) == pytest.approx(1 / cost)


def test_least_seconds_matches_a_calculation_by_hand() -> None:
    alike = [(1000, 100, 0)] * 7
    request_s = 0.1 + 99 * 1e-4 + 99 / 50 * 0.02
    assert capacity_bound.least_seconds(MODEL, alike) == pytest.approx(7 * request_s)
    # The cache holds ten requests of 10,000 tokens, which share the fixed cost.
    request_s = 1.0 + 99 * 1e-4 + 99 * 10_050 / 100_000 * 0.02
    assert capacity_bound.least_seconds(MODEL, [(10_000, 100, 0)]) == pytest.approx(request_s)
    # Cached tokens cost attention only.
    pairs = replace(MODEL, time=replace(TIME, pair_s=1e-8))
    request_s = 0.02 + 200 * 100 * 1e-8 + 200 * 800 * 1e-8 + 99 / 50 * 0.02 + 99 * 1e-4
    assert capacity_bound.least_seconds(pairs, [(1000, 100, 800)]) == pytest.approx(request_s)


def test_link_rate_counts_bytes_and_descriptors() -> None:
    linked = replace(MODEL, transfer=TransferTime(0.5, 1e-6, 1e-9))
    per_token = 1000e-9 + 4 / 10 * 1e-6
    assert capacity_bound.link_tokens_per_s(linked) == pytest.approx(1 / per_token)
    assert linked.transfer_s(95) == pytest.approx(0.5 + 100e-6 + 40e-6)
    unlimited = replace(MODEL, transfer=TransferTime(0.5))
    assert capacity_bound.link_tokens_per_s(unlimited) == math.inf


def test_prefill_work_counts_reading_earlier_chunks() -> None:
    time = replace(TIME, read_s=1e-6)
    assert capacity_bound.prefill_work(time, 500, 512) == capacity_bound.prefill_work(
        TIME, 500, 512
    )
    more = capacity_bound.prefill_work(time, 2000, 512) - capacity_bound.prefill_work(
        TIME, 2000, 512
    )
    assert more == pytest.approx((512 + 1024 + 1536) * 1e-6)


def test_limiting_prompt_is_where_transfer_equals_prefill() -> None:
    # Per token 0.2 ms against 0.1 ms of prefill, which has 22 ms besides: equal at 220 tokens.
    def limit(setup_s: float, byte_s: float, time: StepTime = TIME) -> int | None:
        transfer = TransferTime(setup_s, 0.0, byte_s)
        return capacity_bound.limiting_prompt(replace(MODEL, time=time, transfer=transfer))

    found = present(limit(0.0, 2e-7))
    assert found == pytest.approx(221, abs=10)
    assert limit(0.0, 1e-9) is None
    assert limit(1.0, 1e-6) == 1
    # With slow attention, the link limits prompts of medium length.
    pairs = replace(TIME, pair_s=TIME.prefill_s / 20_000)
    between = present(limit(0.0, 2e-7, pairs))
    assert found <= between < 2 * found


def test_capacity_of_a_worker() -> None:
    model = WorkerModel(
        name="w", time=LINEAR_8B, max_model_len=131_072, kv_tokens=400_000,
        transfer=TransferTime(0.002, 0.0, 1 / 87e9),
    )  # fmt: skip
    slower = replace(model, transfer=TransferTime(0.002, 0.0, 1 / 1e9))
    found, slow = (capacity_bound.Capacity.from_model(each, 1000, 200) for each in (model, slower))
    assert found.held == 256
    # Held sequences have half of their answer.
    assert capacity_bound.Capacity.from_model(model, 20_000, 2000).held == 19
    assert found.prefill_s == pytest.approx(0.0449, rel=0.005)
    assert found.link_bytes_per_s == pytest.approx(87e9)
    assert found.kv_bytes_per_s == pytest.approx(1000 * 131_072 / found.prefill_s)
    assert found.kv_bytes_per_s < found.link_bytes_per_s
    assert slow.kv_bytes_per_s > slow.link_bytes_per_s
    assert slow.limiting_prompt is not None
