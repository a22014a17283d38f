"""Step times and KV capacity from AIConfigurator: kernels that were measured on GPUs.

The package is optional (`vllm-sched[aiconfigurator]`); its data needs no GPU and no network. A step
is the sum of its kernels. For models with latent attention a mixed step omits the decodes' context,
so mixed steps of such models are not sampled.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from itertools import product
from pathlib import Path
from typing import Any, Final, Self, TypeAlias

from vllm_sched.cost import profiles
from vllm_sched.cost.kv_size import kv_bytes_per_token
from vllm_sched.cost.profile_fit import errors, fit, sample_shapes
from vllm_sched.cost.profiles import EXTRA, MEMORY_SHARE, QUANTIZED, Profile, ProfileKey, WorkerSize
from vllm_sched.cost.step_time import StepShape, TimedStep
from vllm_sched.errors import UsageError

PACKAGE: Final = "aiconfigurator-core"
BACKEND: Final = "vllm"
BF16, FP8 = "bf16", "fp8"
DTYPES: Final = (BF16, FP8)
EXPERTS: Final = "--enable-expert-parallel"
MAX_BATCH: Final = 256
SIZES: Final = (1, 2, 4, 8)  # of a worker, in GPUs
ExpertLayout: TypeAlias = tuple[int, int] | None  # tensor and expert parallel
# Checkpoints by short name and dtype. A bf16 checkpoint under fp8 is quantized on load.
_LLAMA_8B: Final = ("meta-llama/Meta-Llama-3.1-8B",)
_LLAMA_70B: Final = ("meta-llama/Meta-Llama-3.1-70B",)
MODELS: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "llama-3.1-8b": {BF16: _LLAMA_8B, FP8: _LLAMA_8B},
    "llama-3.1-70b": {BF16: _LLAMA_70B, FP8: _LLAMA_70B},
    "qwen3-32b": {BF16: ("Qwen/Qwen3-32B",), FP8: ("Qwen/Qwen3-32B-FP8-Static-PerTensor",)},
    **{
        short: {BF16: (name,), FP8: (f"{name}-FP8", name)}
        for short, name in (
            ("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B"), ("qwen3-235b-a22b", "Qwen/Qwen3-235B-A22B"),
        )
    },
    "deepseek-v3": {FP8: ("deepseek-ai/DeepSeek-V3",)},
}  # fmt: skip
# Of several checkpoints the one with the shortest decode steps is taken.
USUAL_DECODES: Final = [StepShape(decodes=b, context_tokens=1024 * b) for b in (8, 32, 128)]
# vLLM's server defaults by GPU.
SMALL_DEFAULTS: Final = {"a100": (2048, 256)}
DEFAULTS: Final = (8192, 1024)
SHORTER: Final = {
    "no KV budget": "the model does not fit in the memory",
    "missing system flops": "the GPU has no kernels for this dtype",
    "should be divisible": "the model cannot be divided by this number of GPUs",
    "Invalid quantized MoE configuration": "the experts' blocks cannot be divided so",
}


class UnsupportedProfileError(UsageError):
    """The source has no data for this worker."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model as the source knows it."""

    name: str
    config: dict[str, Any]

    @property
    def experts(self) -> bool:
        return bool(self._text.get("num_experts") or self._text.get("n_routed_experts"))

    @property
    def latent(self) -> bool:
        return bool(self._text.get("kv_lora_rank"))

    @property
    def quantized(self) -> bool:
        return "quantization_config" in self.config or "fp8" in self.name.lower()

    @property
    def _text(self) -> dict[str, Any]:
        text: dict[str, Any] = self.config.get("text_config") or self.config
        return text

    @property
    def layers(self) -> int:
        return int(self._text["num_hidden_layers"])

    @property
    def longest(self) -> int:
        return int(self._text.get("max_position_embeddings") or 131_072)

    @classmethod
    def of(cls, name: str) -> Self:
        path = _package() / "model_configs" / f"{name.replace('/', '--')}_config.json"
        if not path.exists():
            raise UsageError(
                f"model={name}: {PACKAGE} does not have it; valid: {', '.join(models())}"
            )
        return cls(name, json.loads(path.read_text()))


def models() -> list[str]:
    """Return the short names and the checkpoints that the source has."""
    folder = _package() / "model_configs"
    names = sorted(
        file.name.removesuffix("_config.json").replace("--", "/", 1)
        for file in folder.glob("*_config.json")
        if not file.name.endswith("_hf_quant_config.json")
    )
    return [*MODELS, *names]


def systems() -> dict[str, str]:
    """Return the source's systems with vLLM data, by short name."""
    folder = _package() / "systems"
    names: dict[str, str] = {}
    for system in sorted((folder / "data").iterdir()):
        if (system / "gemm" / BACKEND).is_dir():
            names[system.name.removesuffix("_sxm")] = system.name
    return names


def version() -> str:
    return metadata.version(PACKAGE)


def installed() -> bool:
    try:
        import aiconfigurator_core  # noqa: F401
    except ImportError:
        return False
    return True


@cache
def profile_of(key: ProfileKey) -> Profile:
    """Sample the source for a worker and fit the step time; takes a few seconds."""
    _check(key)
    why: list[str] = []
    fitted: list[Profile] = []
    for checkpoint in _checkpoints(key):
        for experts in _expert_layouts(checkpoint, key.tp):
            try:
                fitted.append(_profile(key, checkpoint, experts))
                break
            except UnsupportedProfileError as error:
                why.append(str(error))
    if fitted:
        return min(fitted, key=lambda profile: sum(map(profile.time.seconds, USUAL_DECODES)))
    raise UnsupportedProfileError(why[0] if why else "there is no checkpoint of this dtype")


def valid_values(key: ProfileKey) -> str:
    """Return the numbers of GPUs, or the dtypes, with data, as the end of an error."""
    if sizes := _sizes_with_data(key):
        return f"; valid tp: {', '.join(sizes)}"
    others = [key._replace(dtype=dtype) for dtype in DTYPES if dtype != key.dtype]
    values = [
        f"{other.dtype} (tp {', '.join(s)})" for other in others if (s := _sizes_with_data(other))
    ]
    return f"; valid dtype: {', '.join(values)}" if values else ""


def _sizes_with_data(key: ProfileKey) -> list[str]:
    return [str(tp) for tp in SIZES if _has_data(key._replace(tp=tp))]


def _has_data(key: ProfileKey) -> bool:
    for checkpoint in _checkpoints(key):
        for experts in _expert_layouts(checkpoint, key.tp):
            with suppress(UnsupportedProfileError):
                _size(key, checkpoint, experts)
                # Some kernels are missed only by the first step.
                _estimator(key, checkpoint, experts)(USUAL_DECODES[0])
                return True
    return False


def _checkpoints(key: ProfileKey) -> list[Checkpoint]:
    names = MODELS.get(key.model, {key.dtype: (key.model,)}).get(key.dtype, ())
    return [Checkpoint.of(name) for name in names]


def _profile(key: ProfileKey, checkpoint: Checkpoint, experts: ExpertLayout) -> Profile:
    size = _size(key, checkpoint, experts)
    seconds = _estimator(key, checkpoint, experts)
    shapes = [s for s in sample_shapes() if not (checkpoint.latent and s.kind == "mixed")]
    sampled = [TimedStep(shape, seconds(shape)) for shape in shapes]
    time = fit(sampled)
    return Profile(
        key.name,
        _what(key, checkpoint),
        f"{PACKAGE} {version()}, {backend(key.system)}",
        time,
        size,
        errors(time, sampled),
        key,
        flags=_flags(key, checkpoint, experts),
    )


@cache
def backend(system: str) -> str:
    """Return the backend and its version that the kernels of a system were measured with."""
    folder = _package() / "systems" / "data" / systems()[system] / "gemm" / BACKEND
    return f"{BACKEND} {max((version.name for version in folder.iterdir()), key=_numbers)}"


def _numbers(name: str) -> list[int]:
    return [int(part) for part in name.split(".") if part.isdigit()]


def _check(key: ProfileKey) -> None:
    if key.system not in systems():
        raise UsageError(f"system={key.system}: no data; valid: {', '.join(systems())}")
    if key.dtype not in DTYPES:
        raise UsageError(f"dtype={key.dtype}: unknown; valid: {', '.join(DTYPES)}")


def _what(key: ProfileKey, checkpoint: Checkpoint) -> str:
    on = key.system.upper() if key.tp == 1 else f"{key.tp} {key.system.upper()}"
    return f"{checkpoint.name} on {on}, {key.dtype}"


def _flags(key: ProfileKey, checkpoint: Checkpoint, experts: ExpertLayout) -> tuple[str, ...]:
    """Return vLLM's flags for this worker; an fp8 model is a bf16 checkpoint, if there is one."""
    if key.model in MODELS:
        converted = key.dtype == FP8 and BF16 in MODELS[key.model]
    else:
        converted = key.dtype == FP8 and not checkpoint.quantized
    quantized = (QUANTIZED,) if converted else ()
    return (*quantized, EXPERTS) if experts and experts[1] > 1 else quantized


def _expert_layouts(checkpoint: Checkpoint, tp: int) -> list[ExpertLayout]:
    """Return the ways to divide experts, (tensor, expert) parallel: vLLM's default first."""
    if not checkpoint.experts:
        return [None]
    return list(dict.fromkeys([(tp, 1), (1, tp)]))


def _settings(key: ProfileKey, checkpoint: Checkpoint, experts: ExpertLayout) -> dict[str, Any]:
    if key.dtype == BF16 and checkpoint.quantized:
        raise UnsupportedProfileError(f"{checkpoint.name} is quantized; give dtype={FP8}")
    # vLLM keeps the KV cache in bf16 unless it is told otherwise.
    settings: dict[str, Any] = {
        "schema_version": 1, "model_name": checkpoint.name, "pp_size": 1, "backend": BACKEND,
        "system_name": systems()[key.system], "tp_size": key.tp, "kv_cache_dtype": "bfloat16",
        "activation_dtype": "bfloat16",
    }  # fmt: skip
    if key.dtype == FP8 and not checkpoint.quantized:
        settings["weight_dtype"] = FP8
        if experts:
            settings["moe_dtype"] = FP8
    if experts:
        settings["moe_tp_size"], settings["moe_ep_size"] = experts
    return settings


def _estimator(
    key: ProfileKey, checkpoint: Checkpoint, experts: ExpertLayout
) -> Callable[[StepShape], float]:
    from aiconfigurator_core import RustForwardPassPerfModel

    settings = json.dumps(_settings(key, checkpoint, experts))
    try:
        model = RustForwardPassPerfModel.from_native(settings)
    except Exception as error:
        raise UnsupportedProfileError(_first_line(error)) from None

    def seconds(shape: StepShape) -> float:
        scheduled = {
            "num_prefill_requests": shape.prompts,
            "sum_prefill_tokens": shape.prefill_tokens,
            "sum_prefill_kv_tokens": shape.read_tokens,
            "num_decode_requests": shape.decodes,
            "sum_decode_kv_tokens": shape.context_tokens,
        }
        question = json.dumps([{"schema_version": 1, "scheduled_requests": scheduled}])
        try:
            return float(model.estimate_forward_pass_time_ms(question)) / 1000
        except Exception as error:
            raise UnsupportedProfileError(_first_line(error)) from None

    return seconds


def _size(key: ProfileKey, checkpoint: Checkpoint, experts: ExpertLayout) -> WorkerSize:
    from aiconfigurator_core.sdk.memory import estimate_kv_cache

    # Without this the source logs each fallback of its data.
    logging.getLogger("aiconfigurator_core").setLevel(logging.ERROR)
    settings = _settings(key, checkpoint, experts)
    budget, seqs = SMALL_DEFAULTS.get(key.system, DEFAULTS)
    try:
        cache = estimate_kv_cache(
            checkpoint.name,
            settings["system_name"],
            BACKEND,
            backend_version="current",
            max_num_tokens=budget,
            max_batch_size=MAX_BATCH,
            memory_fraction_kind="of_total",
            memory_fraction_value=MEMORY_SHARE,
            tp_size=key.tp,
            moe_tp_size=settings.get("moe_tp_size"),
            moe_ep_size=settings.get("moe_ep_size"),
            gemm_quant_mode=settings.get("weight_dtype"),
            moe_quant_mode=settings.get("moe_dtype"),
            kvcache_quant_mode="bfloat16",
        )
    except Exception as error:
        raise UnsupportedProfileError(_first_line(error)) from None
    tokens = int(cache["total_kv_size_tokens"])
    return WorkerSize(
        gpus=key.tp,
        gpu_bytes=int(cache["total_gpu_capacity_bytes"]),
        other_bytes=int(sum(cache["memory_breakdown"].values())),
        gpu_token_bytes=int(cache["kv_size_per_token_bytes"]),
        kv_token_bytes=kv_bytes_per_token(checkpoint.config, "bfloat16"),
        kv_pieces=checkpoint.layers * (1 if checkpoint.latent else 2),
        max_model_len=min(checkpoint.longest, tokens),
        max_num_batched_tokens=budget,
        max_num_seqs=seqs,
    )


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    line = text[0] if text else type(error).__name__
    for phrase, plain in SHORTER.items():
        if phrase in line:
            return plain
    return line[:200]


@cache
def _package() -> Path:
    if not installed():
        raise UsageError(f"install {EXTRA} for profiles that are not built in")
    import aiconfigurator_core

    return Path(aiconfigurator_core.__file__).parent


def find_profile(text: str) -> Profile:
    """Return a built-in profile, or fit one to the optional source."""
    try:
        return profiles.find(text)
    except profiles.NotBuiltInError as error:
        _require_source(error)
        key = error.key
    try:
        return profile_of(key)
    except UnsupportedProfileError as error:
        raise UsageError(f"profile {text}: {error}{valid_values(key)}") from None
    except UsageError as error:
        raise UsageError(f"profile {text}: {error}") from None


def named_by(text: str) -> list[str]:
    """Return the profiles of `model=M,system=S`, of the optional source if none is built in.

    Another text is returned as it is.
    """
    try:
        return profiles.matching_names(text)
    except profiles.NotBuiltInError as error:
        _require_source(error)
        key = error.key
    parts = profiles.read_parts(text)
    names, why = list[str](), list[str]()
    dtypes = [key.dtype] if "dtype" in parts else DTYPES
    for dtype, tp in product(dtypes, [key.tp] if "tp" in parts else SIZES):
        try:
            profile_of(key._replace(dtype=dtype, tp=tp))
        except UnsupportedProfileError as error:
            why.append(f"{dtype}: {error}")
        except UsageError as error:
            raise UsageError(f"profile {text}: {error}") from None
        else:
            names.append(f"model={key.model},system={key.system},tp={tp},dtype={dtype}")
    if not names:
        raise UsageError(f"profile {text}: {'; '.join(dict.fromkeys(why))}")
    return names


def _require_source(error: profiles.NotBuiltInError) -> None:
    if not installed():
        raise UsageError(f"{error}; for others install {EXTRA}") from None
