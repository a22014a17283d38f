"""A step while it is planned. The object is made for the step and thrown away after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from vllm_sched.policies.types import Step


@dataclass(slots=True)
class StepPlan:
    """What is known of a step before vLLM schedules it."""

    step: Step  # what the policies see
    num_running: int  # requests in `running` when the step begins
    decode_is_last: bool  # in `running`, behind the prefills
    decodes_paused: bool = False


class StepLimit(NamedTuple):
    """How many tokens a step may compute."""

    tokens: int
    kept_for_image: int = 0  # of these, tokens that no running prefill may take
