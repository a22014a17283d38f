"""KV bytes per token of published models."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_sched.cost.kv_size import kv_bytes_per_token
from vllm_sched.errors import UsageError

KIB = 1024


def llama(layers: int, hidden: int, heads: int, **more: object) -> dict[str, Any]:
    """Return the fields of a Llama 3 config that set its KV size."""
    return {
        "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads,
        "num_key_value_heads": 8, "torch_dtype": "bfloat16", **more,
    }  # fmt: skip


OPT = {"num_hidden_layers": 40, "hidden_size": 5120, "num_attention_heads": 40}
DEEPSEEK = {
    "num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "num_attention_heads": 128, "num_key_value_heads": 128, "torch_dtype": "bfloat16",
}  # fmt: skip
LLAMA_8B = llama(32, 4096, 32)


@pytest.mark.parametrize(
    ("config", "dtype", "size"),
    [
        (LLAMA_8B, "auto", 128 * KIB),
        (LLAMA_8B, "fp8", 64 * KIB),
        (llama(80, 8192, 64), "auto", 320 * KIB),
        (llama(126, 16384, 128), "auto", 504 * KIB),
        (OPT, "auto", 2 * 40 * 5120 * 2),  # no grouped heads
        (LLAMA_8B | {"num_key_value_heads": None, "text_config": None}, "auto", 512 * KIB),
        (LLAMA_8B | {"num_key_value_heads": [4, 8, 8]}, "auto", 512 * KIB),  # layers differ
        (llama(32, 4096, 32, head_dim=64), "auto", 64 * KIB),
        (DEEPSEEK, "auto", 61 * 576 * 2),  # latent attention: one vector per layer
        ({"text_config": LLAMA_8B, "torch_dtype": "float32"}, "auto", 128 * KIB),  # multimodal
    ],
)
def test_kv_size_matches_published(config: dict[str, Any], dtype: str, size: int) -> None:
    assert kv_bytes_per_token(config, dtype) == size


@pytest.mark.parametrize(
    ("config", "dtype", "message"),
    [
        ({}, "auto", "num_hidden_layers or n_layer"),
        ({"num_hidden_layers": 2}, "auto", "num_attention_heads"),
        (llama(32, 4096, 32), "int3", "unknown KV dtype 'int3'"),
    ],
)
def test_error_names_the_missing_field(config: dict[str, Any], dtype: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        kv_bytes_per_token(config, dtype)
