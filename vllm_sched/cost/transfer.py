"""KV transfer time between workers: setup + descriptors x t_desc + bytes / bandwidth.

Descriptors are contiguous pieces: blocks x layers x 2. Small blocks can cost more than their bytes
(published: 40,000 descriptors took 174 ms for 313 MB).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TransferTime:
    setup_s: float = 0.0
    descriptor_s: float = 0.0
    byte_s: float = 0.0

    def seconds(self, size: int, descriptors: int) -> float:
        return self.setup_s + descriptors * self.descriptor_s + size * self.byte_s
