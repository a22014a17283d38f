"""Arrival times in an open loop."""

from __future__ import annotations

import math
from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random


def gamma_times(rate: float, burstiness: float, count: int, rng: random.Random) -> array[float]:
    """Return `count` ascending times; the last is at `count / rate`.

    The gaps are gamma distributed with shape `burstiness`, as in vLLM's benchmark: 1 is Poisson,
    less is burstier (coefficient of variation `1 / sqrt(burstiness)`), infinity is regular. The
    fixed end gives every seed the same load.
    """
    if math.isinf(burstiness):
        return array("d", ((i + 1) / rate for i in range(count)))
    times = array("d")
    now = 0.0
    for _ in range(count):
        now += rng.gammavariate(burstiness, 1.0)
        times.append(now)
    stretch = count / rate / now if now else 0.0
    return array("d", (time * stretch for time in times))
