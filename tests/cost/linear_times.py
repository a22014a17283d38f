"""Linear step times of some size, with which tests pin figures: they change with no profile."""

from __future__ import annotations

from typing import Final

from vllm_sched.cost.step_time import StepTime

LINEAR_8B: Final = StepTime(
    decode_fixed_s=0.0078059701492537315,
    decode_s=3.571428571428572e-05,
    context_s=3.912597014925373e-08,
    prefill_fixed_s=0.008586567164179106,
    prefill_s=3.571428571428572e-05,
    pair_s=1.1630168589174802e-09,
)
LINEAR_70B: Final = StepTime(
    decode_fixed_s=0.0291,
    decode_s=0.00033903833214877994,
    context_s=2.4453731343283583e-08,
    prefill_fixed_s=0.009365079365079368,
    prefill_s=7.936507936507937e-05,
    pair_s=1.47553754362265e-09,
    floor_s=0.05,
)
LINEAR_70B_FASTER: Final = StepTime(
    decode_fixed_s=0.015565079365079365,
    decode_s=7.936507936507937e-05,
    context_s=1.7066666666666667e-08,
    prefill_fixed_s=0.017121587301587304,
    prefill_s=7.936507936507937e-05,
    pair_s=1.47553754362265e-09,
)
