"""What the two ends of a transfer must have in common, by the flags that they are started with.

A KV cache is of one model, one set of weights and one prompt, and lies in memory in one way. NIXL
compares some of the last, and of the first three only what is in the model's configuration: blocks
of another revision, or of a prompt that another template wrote, are read as if they were right, and
the answer has status 200. Or they are fewer than the other end needs, of which its engine dies.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from vllm_sched.workers import launch
from vllm_sched.workers.flags import fields, key, last, parse
from vllm_sched.workers.flags_file import CONFIG, expanded
from vllm_sched.workers.transfer import CPU_BLOCK

# How blocks lie in memory, with what counts where nobody says: on an accelerator, and on a CPU, for
# which `up` says more itself. Where that is vLLM's to choose by the model, no other word for it is
# known to mean the same.
COMMON: Mapping[str, tuple[str, str]] = {
    "--block-size": ("16", CPU_BLOCK),
    "--dtype": ("auto", "float32"),
    "--kv-cache-dtype": ("auto", "auto"),
    "--attention-backend": ("AUTO", "AUTO"),
}
# Which weights, and what prompt they make of a request; with vLLM's own word for what it does where
# nobody says. What is a JSON object, and what is on or off, comes after that.
SAME: Mapping[str, str] = {
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
    CONFIG: "",  # of two files that can't be read from here, only the names can be compared
}
OBJECTS = (
    "--hf-overrides", "--quantization-config", "--default-chat-template-kwargs",
    "--mm-processor-kwargs",
)  # fmt: skip
SWITCHES = (
    "--trust-request-chat-template", "--trust-request-mm-kwargs",
    "--disable-hybrid-kv-cache-manager",  # how blocks are grouped; NIXL compares it
)  # fmt: skip
LORA = "--lora-modules"  # adapters: a name, and weights that a prompt is computed with
# Who drafts has layers of its own, and their KV cache moves with the rest. Not so with these, which
# one end may have for itself, nor does it matter how much is drafted.
DRAFT = "--speculative-config"
DRAFT_KEYS: Mapping[str, str] = {"--spec-method": "method", "--spec-model": "model"}
DRAFTER = ("method", "model", "revision", "code_revision", "parallel_drafting", "kv_cache_dtype")
DRAFT_MODEL = "draft_model"  # a whole model drafts: what vLLM takes one for that is named alone
NO_LAYERS = frozenset(
    ["ngram", "[ngram]", "ngram_gpu", "suffix", "medusa", "mlp_speculator", "custom_class"]
)
DUMMY = "dummy"  # all other formats are of the same weights
YES = "yes"
# Of one flag two words for one thing. Not those for `--kv-cache-dtype`: NIXL compares the words.
ALIKE: Mapping[tuple[str, str], str] = {
    ("--dtype", "half"): "float16",
    ("--dtype", "float"): "float32",
}


def differences(
    args: Sequence[str], others: Sequence[str], *, model: str = ""
) -> Iterator[tuple[str, str, str]]:
    """Name the flags that keep two ends apart, as (flag, its value here, its value there).

    What one end says and the other has by default keeps nobody apart. `model` is what both load,
    from where a tokenizer comes unless somebody says otherwise.
    """
    args, others = expanded(args), expanded(others)
    for name in COMMON:
        ours, theirs = _said(args, name), _said(others, name)
        if not any(
            _meant(name, ours, on_cpu=cpu) == _meant(name, theirs, on_cpu=cpu) for cpu in _builds()
        ):
            yield name, ours, theirs
    for name in SAME:
        ours, theirs = _said(args, name), _said(others, name)
        if (ours or theirs) and _taken(args, name, model) != _taken(others, name, model):
            yield name, ours, theirs
    for name in OBJECTS:
        ours, theirs = _object(args, name), _object(others, name)
        if ours != theirs:
            yield name, ours, theirs
    for name in SWITCHES:
        ours, theirs = _switched(args, name), _switched(others, name)
        if ours != theirs:
            yield name, ours, theirs
    ours, theirs = _drafter(args, model), _drafter(others, model)
    if ours != theirs:
        yield DRAFT, ours, theirs
    ours, theirs = _adapters(args), _adapters(others)
    if ours != theirs:
        yield LORA, ours, theirs


def _said(args: Sequence[str], name: str) -> str:
    """Return a flag's value as it is written, in either of vLLM's places; empty without one."""
    found = last(args, name)
    if found is None and name == "--attention-backend":
        found = key(args, "--attention-config", "backend")
    return found if isinstance(found, str) else ""


def _meant(name: str, value: str, *, on_cpu: bool) -> str:
    value = value or COMMON[name][on_cpu]
    if name == "--attention-backend":
        value = value.upper()
    return ALIKE.get((name, value), value)


def _taken(args: Sequence[str], name: str, model: str) -> str:
    """Return what vLLM goes by, said or not."""
    value = _said(args, name)
    if name == "--load-format":
        return value if value == DUMMY else SAME[name]
    if name == "--tokenizer-revision":
        value = value or _said(args, "--revision")
    return value or (model if name == "--tokenizer" else SAME[name])


def _object(args: Sequence[str], name: str) -> str:
    """Return what a flag says, given as JSON or by its keys, in one spelling; empty if nothing."""
    if found := fields(args, name):
        return json.dumps(found, sort_keys=True)
    text = last(args, name) or ""  # what is no object is vLLM's to refuse
    return "" if text.strip() == "{}" else text


def _drafter(args: Sequence[str], model: str) -> str:
    """Return what of speculation both ends must have, in one spelling; empty if nothing."""
    said = {name.replace("-", "_"): value for name, value in (fields(args, DRAFT) or {}).items()}
    said |= {name: value for flag, name in DRAFT_KEYS.items() if (value := last(args, flag))}
    found = {name: said[name] for name in DRAFTER if said.get(name)}
    if NO_LAYERS & {str(found.get("method")), str(found.get("model"))}:
        return ""
    if str(found.get("method")).endswith("_mtp"):  # older names, by the model's family
        found["method"] = "mtp"
    if "model" in found and found.get("method") == DRAFT_MODEL:  # where nobody says how
        del found["method"]
    if found.get("model") == model and "method" in found:  # where nobody says which
        del found["model"]
    return json.dumps(found, sort_keys=True) if found else ""


def _adapters(args: Sequence[str]) -> str:
    """Return the adapters that a worker starts with, as NAME=PATH, in one order."""
    found: dict[str, str] = {}
    named = False
    for flag in parse(args):
        if flag.name:
            named = flag.name == LORA
            if named:
                found.clear()  # the last of several counts
        if named and flag.value:
            name, path = _adapter(flag.value)
            found[name] = path
    return " ".join(f"{name}={path}" for name, path in sorted(found.items()))


def _adapter(text: str) -> tuple[str, str]:
    """Take one apart, written as NAME=PATH or as a JSON object."""
    try:
        read = json.loads(text)
    except ValueError:
        read = None
    if isinstance(read, dict):
        return str(read.get("name", "")), str(read.get("path", ""))
    name, _, path = text.partition("=")
    return name, path


def _switched(args: Sequence[str], name: str) -> str:
    """Say whether a flag is on, by the last that speaks of it; empty if it is not."""
    on = ""
    for flag in parse(args):
        if flag.name == name:
            on = YES
        elif flag.name == f"--no-{name.removeprefix('--')}":
            on = ""
    return on


def _builds() -> tuple[bool, ...]:
    """Say whether vLLM is a build for CPUs: either, where none is installed to be asked."""
    try:
        return (launch.on_cpu(),)
    except launch.WorkerError:
        return (False, True)
