"""How far a measured worker is from the built-in profiles."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from vllm_sched.cost.calibration import Measured
from vllm_sched.cost.fit import Kind, kind_of
from vllm_sched.cost.profile_fit import KINDS
from vllm_sched.cost.profiles import Profile


@dataclass(frozen=True, slots=True)
class Distance:
    profile: Profile
    ratios: Mapping[Kind, float]  # median of measured over predicted seconds

    @property
    def size(self) -> float:
        return max(abs(math.log(ratio)) for ratio in self.ratios.values())


def nearest(steps: Sequence[Measured], candidates: Iterable[Profile]) -> Distance | None:
    """Return the profile whose steps are nearest to the measured ones in their worst kind."""
    found = [Distance(each, ratios) for each in candidates if (ratios := _ratios(steps, each))]
    return min(found, key=lambda each: each.size, default=None)


def _ratios(steps: Sequence[Measured], profile: Profile) -> dict[Kind, float]:
    ratios: dict[Kind, float] = {}
    for kind in KINDS:
        of_kind = [each for each in steps if kind_of(each.shape) == kind and each.seconds > 0]
        if of_kind:
            ratios[kind] = statistics.median(
                each.seconds / profile.time.seconds(each.shape) for each in of_kind
            )
    return ratios
