"""Bytes of KV cache per token, from a model's `config.json`.

Grouped-query attention keeps a key and a value per layer and KV head; latent attention (MLA) one
compressed vector and one rotary key per layer. For sliding windows the result is an upper bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from vllm_sched.errors import UsageError

DTYPE_BYTES: Final = {
    "float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2,
    "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1,
}  # fmt: skip


def kv_bytes_per_token(config: Mapping[str, Any], kv_cache_dtype: str = "auto") -> int:
    """Return the bytes of one token's KV, over all layers and ranks."""
    # Multimodal models keep the language model's config under this key.
    text = config.get("text_config") or config
    layers = _number(text, "num_hidden_layers", "n_layer")
    size = _element_bytes(config, text, kv_cache_dtype)
    if rank := text.get("kv_lora_rank"):
        return layers * (int(rank) + _number(text, "qk_rope_head_dim")) * size
    heads = _number(text, "num_attention_heads", "n_head")
    # Upper bound where KV heads differ by layer.
    kv_heads = _number(text, "num_key_value_heads", "num_attention_heads", "n_head")
    head = text.get("head_dim") or _number(text, "hidden_size", "n_embd") // heads
    return 2 * layers * kv_heads * int(head) * size


def _number(config: Mapping[str, Any], *names: str) -> int:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and value > 0:
            return value
    raise UsageError(
        f"the model's config has no {' or '.join(names)}; give its config.json as it was published"
    )


def _element_bytes(config: Mapping[str, Any], text: Mapping[str, Any], wanted: str) -> int:
    name = wanted
    if wanted == "auto":
        dtypes = [
            section.get(key) for section in (text, config) for key in ("dtype", "torch_dtype")
        ]
        name = next((str(dtype) for dtype in dtypes if dtype), "bfloat16")
    try:
        return DTYPE_BYTES[name.removeprefix("torch.")]
    except KeyError:
        raise UsageError(
            f"unknown KV dtype {name!r}; use auto or one of {', '.join(DTYPE_BYTES)}"
        ) from None
