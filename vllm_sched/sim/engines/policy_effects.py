"""What the scheduling policies mean to a plain worker: a few numbers that say how a step is made.

They are read from the very settings that a worker is launched with. `lanes` and `rotation` change
who among equals is served first, and mean nothing here; `prefill_first` without pauses is taken for
ordinary chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from vllm_sched.policies.chunk_budget import ChunkBudgetSettings
from vllm_sched.policies.deferred_prefill import DeferredPrefillSettings
from vllm_sched.policies.long_prompt import LongPromptSettings, default_threshold
from vllm_sched.policies.prefill_first import PrefillFirstSettings
from vllm_sched.policies.registry import settings_of
from vllm_sched.policies.static_batching import StaticBatchingSettings

if TYPE_CHECKING:
    from vllm_sched.sim.types import WorkerModel

MARGIN: Final = 1.05  # by which `chunk_budget` stays within its gap


@dataclass(frozen=True, slots=True)
class PolicyEffects:
    """How a worker makes its steps; as it stands here, as vLLM does."""

    batch: int = 0  # static batching: requests in a batch; 0 = continuous
    pauses: bool = False  # decodes stand still while prompts are prefilled
    pause_s: float = 5.0  # so long at most
    long_above: int = 0  # tokens left above which a prompt is long; 0 = none is
    longs: int = 1  # that may be in prefill at once
    prompts: int = 4  # that share a step
    share: float = 0.0  # of a step's budget for longs beside others; 0 = by time
    stretch: float = LongPromptSettings().long_step_stretch  # of a step by a long's chunk
    wait_s: float = 60.0  # a long that waited so long enters beyond the limit
    itl_s: float = 0.0  # that a step with decodes may take; 0 = no limit
    chunk: int = 0  # prefill tokens beside decodes; 0 = no limit
    least_chunk: int = 32
    departures: int = 1  # waited for once the worker is full; 0 = as costs say
    hold_s: float = 1.0
    hold_itl_s: float | None = None

    @classmethod
    def of(cls, model: WorkerModel) -> PolicyEffects:
        """Read a worker's policies; the error is that of the registry."""
        found: dict[str, float | int | bool | None] = {}
        for name, given in model.policies.items():
            settings = settings_of(name, given)
            if isinstance(settings, StaticBatchingSettings):
                found["batch"] = settings.size or model.max_num_seqs
            elif isinstance(settings, PrefillFirstSettings):
                found |= {"pauses": settings.pause_decodes, "pause_s": settings.max_pause_s}
            elif isinstance(settings, LongPromptSettings):
                found |= _long_prompt(settings, model)
            elif isinstance(settings, ChunkBudgetSettings):
                found |= {
                    "itl_s": 0.0 if settings.chunk else settings.itl_ms / 1000 / MARGIN,
                    "chunk": settings.chunk or 0,
                    "least_chunk": settings.min_chunk,
                }
            elif isinstance(settings, DeferredPrefillSettings):
                asked = settings.departures
                found |= {
                    "departures": 0 if asked == "auto" else asked,
                    "hold_s": settings.max_delay_ms / 1000,
                    "hold_itl_s": None if settings.itl_ms is None else settings.itl_ms / 1000,
                }
                if settings.exclusive:
                    found |= {"pauses": True, "pause_s": settings.max_delay_ms / 1000}
        return cls(**found)  # type: ignore[arg-type]  # each value is its field's


def _long_prompt(settings: LongPromptSettings, model: WorkerModel) -> dict[str, float | int]:
    if settings.sharing == 1:
        return {}
    share = settings.long_prefill_share
    asked = settings.long_prefill_token_threshold
    return {
        "long_above": asked or default_threshold(model.max_model_len, model.max_num_batched_tokens),
        "longs": settings.max_long_partial_prefills,
        "prompts": settings.sharing,
        "share": 0.0 if share == "auto" else float(share),
        "stretch": settings.long_step_stretch,
        "wait_s": settings.max_wait_s,
    }
