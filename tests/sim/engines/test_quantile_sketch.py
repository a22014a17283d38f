"""Quantiles of binned samples."""

from __future__ import annotations

import random

import pytest

from vllm_sched.bench.results.stats import percentile_of_sorted
from vllm_sched.sim.engines.quantile_sketch import BIN_WIDTH, QuantileSketch


def samples(count: int = 20_000) -> list[float]:
    """Return latencies over several decades."""
    rng = random.Random(2)
    return sorted(rng.lognormvariate(-2, 1.5) for _ in range(count))


def test_quantiles_are_within_half_a_bin() -> None:
    drawn = samples()
    sketch = QuantileSketch()
    for value in drawn:
        sketch.add(value)
    for share in (0.01, 0.5, 0.9, 0.99, 0.999):
        exact = percentile_of_sorted(drawn, share * 100)
        assert sketch.quantile(share) == pytest.approx(exact, rel=BIN_WIDTH)
    assert sketch.quantile(1.0) == pytest.approx(drawn[-1], rel=BIN_WIDTH)
    assert sketch.most == drawn[-1]
    assert sketch.mean == pytest.approx(sum(drawn) / len(drawn))
    assert len(sketch.bins) < 1500


def test_weight_counts_as_several_samples() -> None:
    sketch = QuantileSketch()
    sketch.add(0.01, 99)
    sketch.add(5.0)
    assert sketch.count == 100
    assert sketch.quantile(0.98) == pytest.approx(0.01, rel=BIN_WIDTH)
    assert sketch.quantile(0.995) == pytest.approx(5.0, rel=BIN_WIDTH)


def test_merged_sketch_equals_a_sketch_of_all_samples() -> None:
    drawn = samples(2000)
    one, other, both = QuantileSketch(), QuantileSketch(), QuantileSketch()
    for index, value in enumerate(drawn):
        (one if index % 3 else other).add(value)
        both.add(value)
    one.merge(other)
    assert one.bins == both.bins
    assert (one.count, one.most) == (both.count, both.most)
    assert one.total == pytest.approx(both.total)


def test_sketch_of_no_and_tiny_samples() -> None:
    sketch = QuantileSketch()
    assert (sketch.quantile(0.5), sketch.mean) == (0.0, 0.0)
    sketch.add(0.0)
    sketch.add(1e-9)
    assert sketch.quantile(0.5) <= 1e-6
