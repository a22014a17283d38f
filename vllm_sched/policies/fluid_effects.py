"""What a policy declares about its effect on the steps of the simulator's fluid engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BatchAdmission:
    """Requests enter in batches; a batch runs to its end."""

    size: int
    max_wait_s: float  # after which a request joins the running batch


@dataclass(frozen=True, slots=True)
class LongPromptLimits:
    """Limits on prompts with many tokens left to compute."""

    above_tokens: int  # left to compute, above which a prompt is long
    max_short: int  # left to compute, of a short prompt; the prompts between are medium
    places: int  # long prompts in prefill at once
    places_overdue: int  # once a long prompt has waited for max_wait_s
    share: float | None  # of the budget for long prompts; None = by step time
    itl_s: float  # gap above which chunks may lose more time
    max_wait_s: float
    quiet_s: float  # without decodes and shorts, until longs have whole steps


@dataclass(frozen=True, slots=True)
class MixedStepLimit:
    step_s: float | None = None  # longest step
    chunk: int | None = None  # prefill tokens, instead of by time
    min_chunk: int = 1


@dataclass(frozen=True, slots=True)
class AdmissionHold:
    """Admission to a full engine is held until some requests have departed."""

    departures: int | None  # None = by step time
    max_s: float
    itl_s: float | None  # gap between tokens that the prompts of one hold may cause


@dataclass(frozen=True, slots=True)
class FluidEffects:
    """A policy's effects; the defaults are vLLM's behavior."""

    batches: BatchAdmission | None = None
    longest_pause_s: float = 0.0  # of decodes during prefill; 0 = no pause
    longs: LongPromptLimits | None = None
    mixed_steps: MixedStepLimit | None = None
    hold: AdmissionHold | None = None
    ignored: bool = False  # the policy only reorders requests that the fluid engine treats alike
