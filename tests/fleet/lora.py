"""A random LoRA adapter for the tiny model."""

from __future__ import annotations

import json
from pathlib import Path

from vllm_sched.workers.tiny_model import RECIPE

RANK = 4


def make_adapter(folder: Path, seed: int = RECIPE["seed"]) -> Path:
    """Write an adapter of the query projections, strong enough to change greedy output."""
    import torch
    from safetensors.torch import save_file

    random = torch.Generator().manual_seed(seed)
    hidden = RECIPE["hidden"]
    weights = {}
    for layer in range(RECIPE["layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        weights[f"{name}.lora_A.weight"] = torch.randn(RANK, hidden, generator=random)
        weights[f"{name}.lora_B.weight"] = torch.randn(hidden, RANK, generator=random)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "target_modules": ["q_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
