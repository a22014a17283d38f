"""Non-negative least squares."""

from __future__ import annotations

import pytest

from vllm_sched.cost.least_squares import non_negative

Rows = list[tuple[float, ...]]


def solve(rows: Rows, times: list[float], **how: object) -> list[float]:
    size = len(rows[0])
    matrix = [[sum(r[i] * r[j] for r in rows) for j in range(size)] for i in range(size)]
    right = [sum(r[i] * t for r, t in zip(rows, times, strict=True)) for i in range(size)]
    return non_negative(matrix, right, [1e-12] * size, **how)  # type: ignore[arg-type]


def test_solution_is_exact_across_magnitudes() -> None:
    rows: Rows = [(1.0, x, x * x * 1e6) for x in (1.0, 2.0, 5.0, 9.0)]
    times = [0.01 + 0.002 * r[1] + 3e-12 * r[2] for r in rows]
    assert solve(rows, times) == pytest.approx([0.01, 0.002, 3e-12], rel=1e-4)


def test_negative_coefficient_becomes_zero() -> None:
    rows: Rows = [(1.0, x) for x in (1.0, 2.0, 3.0)]
    found = solve(rows, [3.0, 2.0, 1.0])
    assert found[1] == 0.0
    assert found[0] == pytest.approx(2.0)


def test_kept_coefficient_displaces_another() -> None:
    rows: Rows = [(1.0, x) for x in (1.0, 2.0, 3.0)]
    assert solve(rows, [0.5, 2.0, 3.5])[0] == 0.0
    kept = solve(rows, [0.5, 2.0, 3.5], protected=0, dropped_instead=(1,))
    assert kept == pytest.approx([2.0, 0.0])


def test_unseen_feature_has_a_zero_coefficient() -> None:
    assert solve([(1.0, 0.0), (2.0, 0.0)], [1.0, 2.0]) == pytest.approx([1.0, 0.0])


def test_feature_with_tiny_weight_has_a_zero_coefficient() -> None:
    tiny = 5e-324
    found = non_negative([[1.0, tiny], [tiny, tiny]], [1.0, tiny], [0.0, 0.0])
    assert found == pytest.approx([1.0, 0.0])


def test_identical_features_share_the_cost() -> None:
    assert sum(solve([(1.0, 1.0), (2.0, 2.0)], [1.0, 2.0])) == pytest.approx(1.0)
