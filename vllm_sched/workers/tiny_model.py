"""A random Llama that is small enough to serve on one CPU core.

Weights, tokenizer and chat template depend only on RECIPE, so every machine makes the same model.
The cache folder's name has a hash of RECIPE.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from vllm_sched.errors import UsageError

CACHE_VARIABLE: Final = "VLLM_SCHED_CACHE"


def cache_dir() -> Path:
    """Return the cache folder: `VLLM_SCHED_CACHE`, by default the user's cache folder."""
    if explicit := os.environ.get(CACHE_VARIABLE):
        return Path(explicit).absolute()  # workers start in another folder
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "vllm-sched"


def cached_folder(name: str, make: Callable[[Path], None]) -> Path:
    """Return the cached folder `name`; `make` fills it if it does not exist."""
    try:
        folder = cache_dir() / name
        if folder.is_dir():
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Renamed when complete, so other processes see no partial folder.
        aside = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=folder.parent))
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home folder
        raise UsageError(
            f"{name} can't be stored: {error}; set {CACHE_VARIABLE} to a writable folder"
        ) from None
    try:
        make(aside)
        aside.chmod(0o755)
        aside.rename(folder)
    except OSError as error:
        if not folder.is_dir():  # otherwise another process made the same folder first
            raise UsageError(
                f"{name} can't be stored in {folder.parent}: {error.strerror or error}; set "
                f"{CACHE_VARIABLE} to another folder"
            ) from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


TINY = "tiny"  # its name on the command line
CONTEXT = 32768
VOCABULARY = 512

RECIPE: dict[str, Any] = {
    "version": 1,
    "seed": 20260101,
    "vocabulary": VOCABULARY,
    "hidden": 128,
    "intermediate": 256,
    "layers": 4,
    "heads": 4,
    "kv_heads": 2,
    "context": CONTEXT,
    # Training text of the byte-pair tokenizer.
    "corpus": [
        "the quick brown fox jumps over the lazy dog while the scheduler waits",
        "one long prompt must never freeze the short prompts of everybody else",
        "a token, a chunk, a step: prefill and decode share one budget",
        "user assistant system question answer hello thanks please 0123456789",
        "waiting running finished preempted admitted deferred cached blocks memory bandwidth",
        "yesterday she walked through every garden before breakfast and wrote about flowers",
        "numbers like eleven twelve thirteen hundred thousand million appear in many documents",
        "which function returns true when another object raises an unexpected exception?",
    ],
    "chat_template": (
        "{% for message in messages %}"
        "<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
        "{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    ),
}
SPECIAL_TOKENS = ["<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]


def loadable(model: str) -> str:
    """Return a model name that vLLM can load from any working directory."""
    if model == TINY:
        return str(tiny_model())
    return str(Path(model).absolute()) if Path(model).is_dir() else model


def tiny_model() -> Path:
    """Return the folder of the tiny model; create it if this machine has none."""
    digest = hashlib.sha256(json.dumps([RECIPE, SPECIAL_TOKENS], sort_keys=True).encode())
    return cached_folder(f"tiny-llama-{digest.hexdigest()[:12]}", _write)


def _write(folder: Path) -> None:
    _write_tokenizer(folder)
    _write_weights(folder)


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        RECIPE["corpus"],
        trainers.BpeTrainer(
            vocab_size=RECIPE["vocabulary"],
            special_tokens=SPECIAL_TOKENS,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    # `save` of tokenizers and `save_file` of safetensors hide the error of a full disk.
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": SPECIAL_TOKENS[0],
                "eos_token": SPECIAL_TOKENS[1],
                "chat_template": RECIPE["chat_template"],
                "model_max_length": RECIPE["context"],
                "clean_up_tokenization_spaces": False,
            },
            indent=1,
        )
    )


def _write_weights(folder: Path) -> None:
    import torch
    from safetensors.torch import save

    hidden, inner = RECIPE["hidden"], RECIPE["intermediate"]
    head = hidden // RECIPE["heads"]
    kv = head * RECIPE["kv_heads"]
    generator = torch.Generator().manual_seed(RECIPE["seed"])

    def normal(*shape: int) -> torch.Tensor:
        # Large enough that the best token leads clearly; rounding must not change it.
        return torch.randn(*shape, generator=generator) * 0.05

    tensors = {
        "model.embed_tokens.weight": normal(VOCABULARY, hidden) * 20,
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": normal(VOCABULARY, hidden) * 4,
    }
    for layer in range(RECIPE["layers"]):
        at = f"model.layers.{layer}."
        tensors |= {
            at + "self_attn.q_proj.weight": normal(hidden, hidden),
            at + "self_attn.k_proj.weight": normal(kv, hidden),
            at + "self_attn.v_proj.weight": normal(kv, hidden),
            at + "self_attn.o_proj.weight": normal(hidden, hidden),
            at + "mlp.gate_proj.weight": normal(inner, hidden),
            at + "mlp.up_proj.weight": normal(inner, hidden),
            at + "mlp.down_proj.weight": normal(hidden, inner),
            at + "input_layernorm.weight": torch.ones(hidden),
            at + "post_attention_layernorm.weight": torch.ones(hidden),
        }
    (folder / "model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": RECIPE["layers"],
        "num_attention_heads": RECIPE["heads"],
        "num_key_value_heads": RECIPE["kv_heads"],
        "head_dim": head,
        "max_position_embeddings": RECIPE["context"],
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
