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


@pytest.mark.parametrize(
    ("config", "kib"),
    [(llama(32, 4096, 32), 128), (llama(80, 8192, 64), 320), (llama(126, 16384, 128), 504)],
)
def test_llama_3_kv_size_matches_published(config: dict[str, Any], kib: int) -> None:
    assert kv_bytes_per_token(config) == kib * KIB
    assert kv_bytes_per_token(config, "fp8") == kib * KIB // 2


def test_config_without_grouped_heads_counts_every_head() -> None:
    opt = {"num_hidden_layers": 40, "hidden_size": 5120, "num_attention_heads": 40}
    assert kv_bytes_per_token(opt) == 2 * 40 * 5120 * 2


@pytest.mark.parametrize("kv_heads", [None, [4, 8, 8]])
def test_config_with_different_layers_counts_every_head(kv_heads: object) -> None:
    config = llama(32, 4096, 32, num_key_value_heads=kv_heads, text_config=None)
    assert kv_bytes_per_token(config) == 4 * 128 * KIB


def test_explicit_head_size_wins() -> None:
    assert kv_bytes_per_token(llama(32, 4096, 32, head_dim=64)) == 64 * KIB


def test_latent_attention_stores_one_vector_per_layer() -> None:
    deepseek = {
        "num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
        "num_attention_heads": 128, "num_key_value_heads": 128, "torch_dtype": "bfloat16",
    }  # fmt: skip
    assert kv_bytes_per_token(deepseek) == 61 * 576 * 2


def test_multimodal_config_uses_its_text_part() -> None:
    config = {"text_config": llama(32, 4096, 32), "torch_dtype": "float32"}
    assert kv_bytes_per_token(config) == 128 * KIB


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
