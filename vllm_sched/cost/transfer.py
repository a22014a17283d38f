"""KV transfer time between workers: setup + descriptors x t_desc + bytes / bandwidth.

Descriptors are contiguous pieces: blocks x layers x 2. Small blocks can cost more than their bytes
(published: 40,000 descriptors took 174 ms for 313 MB).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Self

from vllm_sched.cost.least_squares import non_negative
from vllm_sched.errors import UsageError

MIN_POINTS: Final = 3


@dataclass(frozen=True, slots=True)
class MeasuredTransfer:
    size: int  # bytes
    descriptors: int
    seconds: float


@dataclass(frozen=True, slots=True)
class TransferTime:
    setup_s: float = 0.0
    descriptor_s: float = 0.0
    byte_s: float = 0.0

    @property
    def bandwidth(self) -> float:
        return 1 / self.byte_s if self.byte_s else float("inf")

    def seconds(self, size: int, descriptors: int) -> float:
        return self.setup_s + descriptors * self.descriptor_s + size * self.byte_s

    @classmethod
    def fitted(cls, seen: Iterable[MeasuredTransfer]) -> Self:
        points = [each for each in seen if each.seconds > 0]
        if len(points) < MIN_POINTS:
            raise UsageError(
                f"{len(points)} transfers are too few to fit; measure at least {MIN_POINTS}, of "
                "different sizes"
            )
        rows = [
            (1 / each.seconds, each.descriptors / each.seconds, each.size / each.seconds)
            for each in points
        ]
        matrix = [[sum(row[i] * row[j] for row in rows) for j in range(3)] for i in range(3)]
        return cls(
            *non_negative(matrix, [sum(row[i] for row in rows) for i in range(3)], [1e-9] * 3)
        )
