"""Folders that stand in for the hub models which vLLM's scheduler tests name.

A scheduler reads a model's configuration and, of an image model, its processor: how many tokens
an image takes. No weights. So these are a few JSON files each, and the tests need no network.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# OPT-125m, and the text config of the other models.
OPT: dict[str, Any] = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 768,
    "word_embed_proj_dim": 768,
    "ffn_dim": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 2048,
    "vocab_size": 50272,
    "activation_function": "relu",
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
    "torch_dtype": "float16",
}
# Llava's 576 tokens per image and its context, in an image architecture that vLLM imports without
# torchvision, which a CPU-only setup may lack.
IMAGE_TOKENS = 576
IMAGE_SIDE = 28
IMAGE: dict[str, Any] = {
    "architectures": ["Blip2ForConditionalGeneration"],
    "model_type": "blip-2",
    "num_query_tokens": IMAGE_TOKENS,
    "text_config": OPT | {"max_position_embeddings": 4096},
    "qformer_config": {"model_type": "blip_2_qformer"},
    "vision_config": {
        "model_type": "blip_2_vision_model",
        "image_size": IMAGE_SIDE,
        "patch_size": 14,
    },
    "torch_dtype": "float16",
}
# A hybrid of attention and state, with a head that predicts several tokens.
HYBRID: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "max_position_embeddings": 4096,
    "torch_dtype": "float16",
}
STAND_INS = {
    "facebook/opt-125m": "text",
    "facebook/opt-350m": "text",
    "llava-hf/llava-1.5-7b-hf": "image",
    "Qwen/Qwen2.5-VL-3B-Instruct": "image",
    "Qwen/Qwen3-Next-80B-A3B-Instruct": "hybrid",
}


def write_redirects(folder: Path) -> Path:
    """Write the stand-ins; return the file for `VLLM_MODEL_REDIRECT_PATH`."""
    _write(folder / "text", {"config.json": OPT})
    _write(folder / "hybrid", {"config.json": HYBRID})
    _write(
        folder / "image",
        {
            "config.json": IMAGE,
            "preprocessor_config.json": {
                "image_processor_type": "BlipImageProcessor",
                "size": {"height": IMAGE_SIDE, "width": IMAGE_SIDE},
            },
            "processor_config.json": {
                "processor_class": "Blip2Processor",
                "num_query_tokens": IMAGE_TOKENS,
            },
            "tokenizer_config.json": {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<s>",
                "eos_token": "</s>",
                "unk_token": "<unk>",
            },
        },
    )
    _write_tokenizer(folder / "image" / "tokenizer.json")
    redirects = folder / "redirects.json"
    redirects.write_text(json.dumps({hub: str(folder / own) for hub, own in STAND_INS.items()}))
    return redirects


def _write(folder: Path, files: dict[str, dict[str, Any]]) -> None:
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1))


def _write_tokenizer(file: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    special = ["<unk>", "<s>", "</s>", "<image>"]
    vocabulary = {token: number for number, token in enumerate(special)}
    tokenizer = Tokenizer(WordLevel(vocabulary, special[0]))
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(file))
