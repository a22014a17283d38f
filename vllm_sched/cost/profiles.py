"""Step times of well-known machines and models, from figures of others where there are any.

Nobody has published all coefficients of any of them. `source` names the publication a figure is of;
where we know of none it calls the figure an assumption: it is of the right size, and no more.
The rest is derived, always in the same way:

- what a decode step reads: the weights once, and the KV of each token of context, at the memory
  bandwidth; and 3 ms for launching it, by which the one 8B step that is given (6.5 ms on an H200)
  exceeds the reading of the weights;
- a decode's own computation is that of a token of prefill;
- a pair of tokens that attend to each other takes 4 x layers x hidden operations, at the speed at
  which a token of prefill takes two for each of the model's parameters. For a prompt of 100,000
  tokens attention adds 1.6 times the rest of its prefill (8B), or 0.9 times (70B). The two linear
  fits are left as they are, without: they are of prompts of some hundred tokens, so don't take
  them for long ones;
- a step of prefill alone has 1.1 times the fixed time of a decode step: published fits lie between
  0.9 and 1.25;
- a mixed step costs nothing extra. That is what differs most between engines, versions and
  machines (from nothing to six times a decode step), nobody has published it for any of these, and
  deferred prefill in vLLM V1 depends on nothing else: measure it (`calibrate`), or try one
  (`simulate --mixed-ms`, `plan --mixed-ms`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from vllm_sched.cost.step_time import StepTime
from vllm_sched.errors import UsageError

LAUNCH_S: Final = 0.003
PREFILL_OVER_DECODE: Final = 1.1
KIB: Final = 1024
# Where figures are from.
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
    """A machine with a model."""

    name: str
    what: str
    source: str
    time: StepTime


@dataclass(frozen=True, slots=True)
class Model:
    """What a step reads and computes, by the model; sizes in bytes at two a parameter."""

    weights: float
    kv: int  # of a token
    layers: int
    hidden: int

    def pair_s(self, prefill_s: float) -> float:
        """Derive a pair's time from a token's."""
        return prefill_s * 4 * self.layers * self.hidden / self.weights


def _read(model: Model, *, bandwidth: float, tokens_per_s: float, step_s: float = 0.0) -> StepTime:
    """Derive what is not given, as the module's text says."""
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
# What four H100 read of a token's KV, and how much of that the given steps had in them.
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
        f"DistServe's fit for vLLM, whose versions differ ({DISTSERVE}): prefill 22.1 ms + 0.1405 "
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
        "batch 1 and 52.4 ms at batch 64, taken to be with 1,000 tokens of context each: "
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
    """Return the profile of that name."""
    try:
        return PROFILES[name]
    except KeyError:
        raise UsageError(
            f"unknown profile {name!r}; valid: {', '.join(PROFILES)}; or measure your own with "
            "`vllm-sched calibrate --save cost.json`"
        ) from None
