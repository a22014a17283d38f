"""Small least-squares problems with non-negative unknowns."""

from __future__ import annotations

import math
from collections.abc import Sequence

# Exponentially forgotten sums end as denormal numbers with meaningless ratios; these count as 0.
MIN_DIAGONAL = 1e-200


def non_negative(
    matrix: Sequence[Sequence[float]],
    right: Sequence[float],
    ridge: Sequence[float],
    *,
    protected: int | None = None,
    dropped_instead: Sequence[int] = (),
) -> list[float]:
    """Solve the equations; drop negative unknowns, the most negative first.

    `ridge` is added to the diagonal after scaling to ones. If the unknown `protected` is negative,
    one of `dropped_instead` is dropped before it.
    """
    solved = [0.0] * len(right)
    used = [index for index in range(len(right)) if matrix[index][index] > MIN_DIAGONAL]
    # Scale the diagonal to ones: pairs of tokens are in the millions.
    scale = {index: 1 / math.sqrt(matrix[index][index]) for index in used}
    while used:
        rows = [
            [matrix[i][j] * scale[i] * scale[j] + (ridge[i] if i == j else 0.0) for j in used]
            for i in used
        ]
        solution = _cholesky(rows, [right[i] * scale[i] for i in used])
        worst = min(range(len(used)), key=solution.__getitem__)
        if solution[worst] >= 0:
            for index, value in zip(used, solution, strict=True):
                solved[index] = value * scale[index]
            break
        dropped = used[worst]
        if dropped == protected:
            dropped = next((index for index in dropped_instead if index in used), dropped)
        used.remove(dropped)
    return solved


def _cholesky(rows: list[list[float]], right: list[float]) -> list[float]:
    """Solve a small symmetric positive system; linearly dependent unknowns become 0."""
    size = len(right)
    lower: list[list[float]] = []
    half: list[float] = []
    for i in range(size):
        row: list[float] = []
        for j in range(i):
            dot = sum(map(float.__mul__, row, lower[j]))
            row.append((rows[i][j] - dot) / lower[j][j])
        pivot = rows[i][i] - sum(map(float.__mul__, row, row))
        row.append(math.sqrt(pivot) if pivot > 1e-12 else math.inf)
        lower.append(row)
        half.append((right[i] - sum(map(float.__mul__, row, half))) / row[i])
    result = [0.0] * size
    for i in reversed(range(size)):
        solved = sum(lower[k][i] * result[k] for k in range(i + 1, size))
        result[i] = (half[i] - solved) / lower[i][i]
    return result
