"""Compare the vLLM flags of the two ends of a KV transfer.

Both ends must have the same model, weights, prompts and memory layout. NIXL compares only part of
the layout and the model's configuration. Blocks of another revision or chat template are read
without an error and give wrong tokens. Too few blocks crash the receiving engine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence

from vllm_sched.workers import launch
from vllm_sched.workers.connectors import CPU_BLOCK
from vllm_sched.workers.flags import (
    CONFIG_FLAG,
    json_key,
    json_object,
    last_value,
    parse,
    with_config_file,
)

# The memory layout of blocks. The values are the defaults on an accelerator and on a CPU, where
# `up` sets some itself. If vLLM chooses by the model ("auto"), it equals no explicit value.
LAYOUT_FLAGS: Mapping[str, tuple[str, str]] = {
    "--block-size": ("16", CPU_BLOCK),
    "--dtype": ("auto", "float32"),
    "--kv-cache-dtype": ("auto", "auto"),
    "--attention-backend": ("AUTO", "AUTO"),
}
# Flags that select the weights and the prompt, with vLLM's defaults.
MODEL_FLAGS: Mapping[str, str] = {
    "--revision": "main",
    "--code-revision": "main",
    "--hf-config-path": "",
    "--config-format": "auto",
    "--quantization": "",
    "--load-format": "auto",
    "--tokenizer": "",
    "--tokenizer-revision": "main",
    "--tokenizer-mode": "auto",
    "--chat-template": "",
    "--chat-template-content-format": "auto",
    CONFIG_FLAG: "",  # for two files that can't be read here, only the names are compared
}
JSON_FLAGS = (
    "--hf-overrides", "--quantization-config", "--default-chat-template-kwargs",
    "--mm-processor-kwargs",
)  # fmt: skip
SWITCH_FLAGS = (
    "--trust-request-chat-template", "--trust-request-mm-kwargs",
    "--disable-hybrid-kv-cache-manager",  # grouping of blocks; NIXL compares it
)  # fmt: skip
LORA_FLAG = "--lora-modules"  # adapters change the KV cache of a prompt
# The KV cache of a draft model's layers is transferred too. One end alone may use the methods
# in DRAFTS_WITHOUT_LAYERS. The number of draft tokens does not matter.
DRAFT_FLAG = "--speculative-config"
DRAFT_KEYS: Mapping[str, str] = {"--spec-method": "method", "--spec-model": "model"}
COMPARED_DRAFT_KEYS = (
    "method", "model", "revision", "code_revision", "parallel_drafting", "kv_cache_dtype",
)  # fmt: skip
DRAFT_MODEL = "draft_model"  # vLLM's default method for a model without another known method
DRAFTS_WITHOUT_LAYERS = frozenset(
    ["ngram", "[ngram]", "ngram_gpu", "suffix", "medusa", "mlp_speculator", "custom_class"]
)
DUMMY_FORMAT = "dummy"  # all other formats load the same weights
YES = "yes"
# Synonyms of a value. None for `--kv-cache-dtype`, because NIXL compares the strings.
SYNONYMS: Mapping[tuple[str, str], str] = {
    ("--dtype", "half"): "float16",
    ("--dtype", "float"): "float32",
}


def incompatible_flags(
    args: Sequence[str], others: Sequence[str], *, model: str = ""
) -> Iterator[tuple[str, str, str]]:
    """Yield each flag that makes the two ends incompatible, as (flag, value here, value there).

    An explicit value that equals the other end's default is compatible. `model` is what both ends
    load; it is also the default of `--tokenizer`.
    """
    args, others = with_config_file(args), with_config_file(others)
    for name in LAYOUT_FLAGS:
        ours, theirs = _explicit_value(args, name), _explicit_value(others, name)
        if not any(
            _layout_value(name, ours, on_cpu=cpu) == _layout_value(name, theirs, on_cpu=cpu)
            for cpu in _possible_cpu_builds()
        ):
            yield name, ours, theirs
    for name in MODEL_FLAGS:
        ours, theirs = _explicit_value(args, name), _explicit_value(others, name)
        if (ours or theirs) and _used_value(args, name, model) != _used_value(others, name, model):
            yield name, ours, theirs
    compared: list[tuple[Sequence[str], Callable[[Sequence[str], str], str]]] = [
        (JSON_FLAGS, _json_value),
        (SWITCH_FLAGS, _switch_value),
        ([DRAFT_FLAG], lambda given, _: _draft_settings(given, model)),
        ([LORA_FLAG], _adapters),
    ]
    for flags, value_of in compared:
        for name in flags:
            ours, theirs = value_of(args, name), value_of(others, name)
            if ours != theirs:
                yield name, ours, theirs


def _explicit_value(args: Sequence[str], name: str) -> str:
    """Return the explicit value of a flag or its object key, or an empty text."""
    value = last_value(args, name)
    if value is None and name == "--attention-backend":
        value = json_key(args, "--attention-config", "backend")
    return value if isinstance(value, str) else ""


def _layout_value(name: str, value: str, *, on_cpu: bool) -> str:
    value = value or LAYOUT_FLAGS[name][on_cpu]
    if name == "--attention-backend":
        value = value.upper()
    return SYNONYMS.get((name, value), value)


def _used_value(args: Sequence[str], name: str, model: str) -> str:
    value = _explicit_value(args, name)
    if name == "--load-format":
        return value if value == DUMMY_FORMAT else MODEL_FLAGS[name]
    if name == "--tokenizer-revision":
        value = value or _explicit_value(args, "--revision")
    return value or (model if name == "--tokenizer" else MODEL_FLAGS[name])


def _json_value(args: Sequence[str], name: str) -> str:
    """Return the normalised JSON of a flag or its keys, or an empty text."""
    if value := json_object(args, name):
        return json.dumps(value, sort_keys=True)
    text = last_value(args, name) or ""  # vLLM refuses text that is not a JSON object
    return "" if text.strip() == "{}" else text


def _draft_settings(args: Sequence[str], model: str) -> str:
    """Return the draft settings that must match as normalised JSON, or an empty text."""
    settings = json_object(args, DRAFT_FLAG) or {}
    settings = {name.replace("-", "_"): value for name, value in settings.items()}
    settings |= {
        name: value for flag, name in DRAFT_KEYS.items() if (value := last_value(args, flag))
    }
    compared = {name: settings[name] for name in COMPARED_DRAFT_KEYS if settings.get(name)}
    if DRAFTS_WITHOUT_LAYERS & {str(compared.get("method")), str(compared.get("model"))}:
        return ""
    if str(compared.get("method")).endswith("_mtp"):  # older names, one per model family
        compared["method"] = "mtp"
    if "model" in compared and compared.get("method") == DRAFT_MODEL:  # the default method
        del compared["method"]
    if compared.get("model") == model and "method" in compared:  # the default model
        del compared["model"]
    return json.dumps(compared, sort_keys=True) if compared else ""


def _adapters(args: Sequence[str], name: str) -> str:
    """Return a worker's initial adapters as sorted NAME=PATH words."""
    paths: dict[str, str] = {}
    in_flag = False  # values may follow as words of their own
    for flag in parse(args):
        if flag.name:
            in_flag = flag.name == name
            if in_flag:
                paths.clear()  # the last of several flags wins
        if in_flag and flag.value:
            adapter, path = _parse_adapter(flag.value)
            paths[adapter] = path
    return " ".join(f"{adapter}={path}" for adapter, path in sorted(paths.items()))


def _parse_adapter(text: str) -> tuple[str, str]:
    try:
        read = json.loads(text)
    except ValueError:
        read = None
    if isinstance(read, dict):
        return str(read.get("name", "")), str(read.get("path", ""))
    name, _, path = text.partition("=")
    return name, path


def _switch_value(args: Sequence[str], name: str) -> str:
    on = ""
    for flag in parse(args):
        if flag.name == name:
            on = YES
        elif flag.name == f"--no-{name.removeprefix('--')}":
            on = ""
    return on


def _possible_cpu_builds() -> tuple[bool, ...]:
    """Return whether vLLM is a CPU build; both answers if vLLM is not installed."""
    try:
        return (launch.on_cpu(),)
    except launch.WorkerError:
        return (False, True)
