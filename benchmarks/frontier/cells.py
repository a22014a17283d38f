"""The cells, and the variants that are compared in each."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from benchmarks.frontier.baseline import HoldAndCap, registered_baseline
from benchmarks.frontier.loads import LOADS
from benchmarks.frontier.play import Figures, Variant, play
from vllm_sched.sim.fleet.models import of_profile
from vllm_sched.sim.types import WorkerModel

MACHINES: Final[Mapping[str, str]] = {
    "H100 8B": "h100-llama-3.1-8b-bf16-tp1",
    "H100 70B TP4": "h100-llama-3.1-70b-bf16-tp4",
    "H100 30B-A3B": "h100-qwen3-30b-a3b-bf16-tp1",
    "B200 8B": "b200-llama-3.1-8b-bf16-tp1",
    "B200 70B TP4": "b200-llama-3.1-70b-bf16-tp4",
    "B200 30B-A3B": "b200-qwen3-30b-a3b-bf16-tp1",
}
BUDGETS: Final = (2048, 8192)
MAX_MODEL_LEN: Final = 131_072
MIN_KV_TOKENS: Final = 2 * MAX_MODEL_LEN
UPSTREAM, DEFAULT = "vLLM", "long_prompt"
BASELINES: Final[Mapping[str, Variant]] = {
    UPSTREAM: Variant({}),
    "threshold 512": Variant({}, longest_chunk=512),
    "threshold 1024": Variant({}, longest_chunk=1024),
    "threshold 2048": Variant({}, longest_chunk=2048),
    "35 lines": Variant({HoldAndCap.name: {}}),
}
VARIANTS: Final[Mapping[str, Variant]] = {
    **BASELINES,
    DEFAULT: Variant({"long_prompt": {}}),
    "long_prompt above 2048": Variant({"long_prompt": {"long_prefill_token_threshold": 2048}}),
    "chunk_budget 50 ms": Variant({"chunk_budget": {"itl_ms": 50}}),
    "long_prompt, chunk_budget 50 ms": Variant({"long_prompt": {}, "chunk_budget": {"itl_ms": 50}}),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """A machine with a budget, and a load."""

    machine: str
    budget: int
    load: str

    @property
    def model(self) -> WorkerModel:
        """Return the worker's model, with room for the longest prompts."""
        model = of_profile(MACHINES[self.machine])
        return replace(
            model,
            max_num_batched_tokens=self.budget,
            max_model_len=MAX_MODEL_LEN,
            kv_tokens=max(model.kv_tokens, MIN_KV_TOKENS),
        )

    def __str__(self) -> str:
        return f"{self.machine}, {self.budget}, {self.load}"


def play_cell(job: tuple[Cell, str, int]) -> Figures:
    """Return what a variant does in a cell, with the lengths and times of a seed."""
    cell, name, seed = job
    # Lengths vary with the cell too, so that no policy is tuned to some of them.
    cell_seed = random.Random(f"{seed} {cell}").getrandbits(32)
    with registered_baseline():
        return play(VARIANTS[name].applied_to(cell.model), LOADS[cell.load], cell_seed)
