"""The smallest number of GPUs that serves a rate within the targets.

Sizes are tried from the compute bound upwards, in growing steps, and then bisected: a fleet that
serves a rate is taken to serve it with more GPUs too.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from vllm_sched.bench.traffic.schedule import MAX_REQUESTS
from vllm_sched.errors import UsageError
from vllm_sched.sim.planning.trials import IDLE_LOAD

if TYPE_CHECKING:
    from vllm_sched.sim.planning.search import FleetSearch

GROWTH: Final = 1.5


def fewest_gpus(search: FleetSearch, rate: float, start: int = 0) -> int:
    """Return the number of GPUs; the search begins at `start`, or at the compute bound."""
    if (count := search.trials.count(rate, fine=True)) > MAX_REQUESTS:
        raise UsageError(
            f"--request-rate {rate:g}: one simulation would have {count:,} requests, at most "
            f"{MAX_REQUESTS:,} are possible; give a lower rate, and deploy that fleet several times"
        )
    unit = min(each.gpus for each in search.question.machines if each)
    bound = max(math.ceil(rate / search.trials.traffic.most_each), 1)
    most = math.ceil(rate / (search.trials.worker_rate * IDLE_LOAD)) + bound
    too_few, enough = bound - 1, max(bound, start // unit)
    while search.serving(enough * unit, rate) is None:
        if enough > most:
            raise UsageError(
                f"--request-rate {rate:g}: {enough * unit:,} GPUs of {search.question.profiles} "
                "do not serve it; give looser targets"
            )
        too_few, enough = enough, max(math.ceil(GROWTH * enough), enough + 1)
    while enough - too_few > 1:
        # The compute bound may be far too low: stay near the size that serves.
        middle = min(max((too_few + enough) // 2, math.ceil(enough / GROWTH)), enough - 1)
        if search.serving(middle * unit, rate) is None:
            too_few = middle
        else:
            enough = middle
    return enough * unit
