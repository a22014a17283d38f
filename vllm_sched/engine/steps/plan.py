"""The plan of one step: what the policies see, and the limit for vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from vllm_sched.policies.types import Step


@dataclass(slots=True)
class StepPlan:
    """A planned step, made for that step only."""

    step: Step  # what the policies see
    num_running: int  # when the step begins
    decode_is_last: bool  # in `running`, behind the prefills
    decodes_paused: bool = False


class StepLimit(NamedTuple):
    """The tokens that a step may compute."""

    tokens: int
    kept_for_image: int = 0  # of these, not for running prefills
