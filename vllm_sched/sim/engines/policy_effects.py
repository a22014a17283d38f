"""The scheduling policies as parameters of the fluid engine's steps, from a worker's settings.

`lanes` and `rotation` only reorder equal requests and have no effect here. `prefill_first` without
pauses is simulated as ordinary chunked prefill.
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

CHUNK_BUDGET_MARGIN: Final = 1.05  # of `chunk_budget` below its gap


@dataclass(frozen=True, slots=True)
class PolicyEffects:
    """Parameters of a worker's steps; the defaults are vLLM's behavior."""

    batch: int = 0  # static batching: requests in a batch; 0 = continuous
    pauses: bool = False  # decodes pause during prefill
    pause_s: float = 5.0  # longest pause
    long_above: int = 0  # remaining tokens above which a prompt is long; 0 = off
    longs: int = 1  # long prompts in prefill at once
    prompts: int = 4  # per step
    share: float = 0.0  # of the budget for long prompts; 0 = by time
    stretch: float = LongPromptSettings().long_step_stretch
    wait_s: float = 60.0  # after which a long prompt enters above the limit
    itl_s: float = 0.0  # longest step with decodes; 0 = no limit
    chunk: int = 0  # prefill tokens in a step with decodes; 0 = no limit
    least_chunk: int = 32
    departures: int = 1  # 0 = automatic
    hold_s: float = 1.0
    hold_itl_s: float | None = None

    @classmethod
    def of(cls, model: WorkerModel) -> PolicyEffects:
        """Return the effects of a worker's policies; raise the registry's error if invalid."""
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
                    "itl_s": 0.0
                    if settings.chunk
                    else settings.itl_ms / 1000 / CHUNK_BUDGET_MARGIN,
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
