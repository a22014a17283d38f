"""Step times of well-known machines and models.

`source` names each figure's publication or calls it an assumption. The rest is derived:

- a decode step reads the weights and the KV at memory bandwidth, plus 3 ms of launch overhead;
- a decode computes as much as one prefill token;
- a pair of attending tokens takes 4 x layers x hidden operations, a prefill token two per
  parameter. The two linear fits omit attention: do not use them for long prompts;
- a prefill-only step has 1.1 times the fixed time of a decode step (published fits: 0.9 to 1.25);
- a mixed step has no extra cost. The real value (0 to six decode steps) is unpublished: measure it
  (`calibrate`) or set `--mixed-ms`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from vllm_sched.cost.step_time import StepTime
from vllm_sched.errors import UsageError

LAUNCH_S: Final = 0.003
PREFILL_OVER_DECODE: Final = 1.1
KIB: Final = 1024
PAPER: Final = '"Deferred prefill for throughput maximization in LLM inference"'
DISTSERVE: Final = (
    "https://github.com/LLMServe/DistServe, "
    "simdistserve/estimators/profile_data/profiler-a100-80g.vllm.json"
)
SHEETS: Final = {
    "a100": "https://www.nvidia.com/en-us/data-center/a100/",
    "h100": "https://www.nvidia.com/en-us/data-center/h100/",
    "h200": "https://www.nvidia.com/en-us/data-center/h200/",
}
ASSUMED: Final = "an assumption (no publication known)"


@dataclass(frozen=True, slots=True)
class Profile:
    name: str
    what: str
    source: str
    time: StepTime


@dataclass(frozen=True, slots=True)
class Model:
    """A model's sizes in bytes, at two bytes a parameter."""

    weights: float
    kv: int  # per token
    layers: int
    hidden: int

    def pair_s(self, prefill_s: float) -> float:
        return prefill_s * 4 * self.layers * self.hidden / self.weights


def _read(model: Model, *, bandwidth: float, tokens_per_s: float, step_s: float = 0.0) -> StepTime:
    fixed = step_s or model.weights / bandwidth + LAUNCH_S
    return StepTime(
        decode_fixed_s=fixed,
        decode_s=1 / tokens_per_s,
        context_s=model.kv / bandwidth,
        prefill_fixed_s=PREFILL_OVER_DECODE * fixed,
        prefill_s=1 / tokens_per_s,
        pair_s=model.pair_s(1 / tokens_per_s),
    )


LLAMA_8B: Final = Model(16.1e9, 128 * KIB, layers=32, hidden=4096)
LLAMA_70B: Final = Model(141e9, 320 * KIB, layers=80, hidden=8192)
OPT_13B: Final = Model(26e9, 800 * KIB, layers=40, hidden=5120)
# Context tokens per decode included in the given step times.
_CONTEXT_S: Final = LLAMA_70B.kv / (4 * 3.35e12)
CONTEXT_INCLUDED: Final = 1000

_ALL: Final = (
    Profile(
        "a100-8b",
        "8B on an A100 80 GB, vLLM V0: the regime of deferred prefill's paper",
        f"{ASSUMED}, in the regime of {PAPER}: decode 10 ms + 0.06 ms a sequence, prefill 11 ms + "
        "0.095 ms a token; c_p/c_d within the 0.9 to 1.25 of published fits",
        StepTime(decode_fixed_s=0.010, decode_s=6e-5, prefill_fixed_s=0.011, prefill_s=9.5e-5),
    ),
    Profile(
        "a100-opt-13b",
        "OPT-13B on an A100 80 GB, vLLM",
        f"DistServe's fit for vLLM, version unknown ({DISTSERVE}): prefill 22.1 ms + 0.1405 "
        "ms a token, decode 23.5 ms + 0.0607 ms a sequence",
        StepTime(
            decode_fixed_s=0.0235, decode_s=6.07e-5, prefill_fixed_s=0.0221, prefill_s=1.405e-4
        ),
    ),
    Profile(
        "a100-70b-tp4",
        "70B on four A100 80 GB",
        f"prefill 3,400 tokens/s: {ASSUMED}; bandwidth 4 x 2.04 TB/s: {SHEETS['a100']}; the rest "
        "derived",
        _read(LLAMA_70B, bandwidth=4 * 2.04e12, tokens_per_s=3_400),
    ),
    Profile(
        "h100-8b",
        "8B on an H100 SXM",
        f"prefill 28,000 tokens/s: {ASSUMED}; bandwidth 3.35 TB/s: {SHEETS['h100']}; the rest "
        "derived",
        _read(LLAMA_8B, bandwidth=3.35e12, tokens_per_s=28_000),
    ),
    Profile(
        "h100-70b-tp4",
        "70B on four H100 SXM",
        "prefill 12,600 tokens/s with a floor of 50 ms below 512 tokens, decode step 29.5 ms at "
        "batch 1 and 52.4 ms at batch 64, with an assumed 1,000 tokens of context each: "
        f"{ASSUMED}; bandwidth 4 x 3.35 TB/s: {SHEETS['h100']}; the rest derived",
        StepTime(
            decode_fixed_s=0.0291,
            decode_s=(0.0524 - 0.0295) / 63 - CONTEXT_INCLUDED * _CONTEXT_S,
            context_s=_CONTEXT_S,
            prefill_fixed_s=0.050 - 512 / 12_600,
            prefill_s=1 / 12_600,
            pair_s=LLAMA_70B.pair_s(1 / 12_600),
            floor_s=0.050,
        ),
    ),
    Profile(
        "h200-8b",
        "8B on an H200",
        f"decode step 6.5 ms at batch 8: {ASSUMED}; bandwidth 4.8 TB/s: {SHEETS['h200']}; prefill "
        "as on an H100, which has the same compute; the rest derived",
        _read(
            LLAMA_8B,
            bandwidth=4.8e12,
            tokens_per_s=28_000,
            step_s=0.0065 - 8 / 28_000,
        ),
    ),
    Profile(
        "h200-70b-tp4",
        "70B on four H200",
        f"decode step 16.2 ms at batch 8: {ASSUMED}; bandwidth 4 x 4.8 TB/s: {SHEETS['h200']}; "
        "prefill as on four H100; the rest derived",
        _read(
            LLAMA_70B,
            bandwidth=4 * 4.8e12,
            tokens_per_s=12_600,
            step_s=0.0162 - 8 / 12_600,
        ),
    ),
)
PROFILES: Final = {profile.name: profile for profile in _ALL}


def find(name: str) -> Profile:
    try:
        return PROFILES[name]
    except KeyError:
        raise UsageError(
            f"unknown profile {name!r}; valid: {', '.join(PROFILES)}; or measure your own with "
            "`vllm-sched calibrate --save cost.json`"
        ) from None
