"""Profiles from AIConfigurator, by a package of its shape that makes its times up."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_sched.bench.calibrate import aiconfigurator
from vllm_sched.bench.calibrate.aiconfigurator import find_profile, named_by
from vllm_sched.cost import profiles
from vllm_sched.cost.step_time import StepShape
from vllm_sched.errors import UsageError
from vllm_sched.sim.fleet.models import of_profile
from vllm_sched.sim.planning.plan import machines_of

PACKAGE = """
import json

class RustForwardPassPerfModel:
    def __init__(self, settings):
        self.settings = settings
        self.factor = (0.5 if settings.get("weight_dtype") == "fp8" else 1.0) / settings["tp_size"]

    @staticmethod
    def from_native(text):
        settings = json.loads(text)
        if 32 % settings["tp_size"]:
            raise ValueError("unsupported: num_heads 32 should be divisible by tp_size")
        if settings.get("moe_tp_size", 1) > 1:
            raise ValueError("Invalid quantized MoE configuration: 1536 / 8\\nmore")
        return RustForwardPassPerfModel(settings)

    def estimate_forward_pass_time_ms(self, text):
        if self.settings["system_name"] == "a100_sxm" and "weight_dtype" in self.settings:
            raise ValueError("missing system flops for fp8")
        [rank] = json.loads(text)
        asked = rank["scheduled_requests"]
        tokens = asked["sum_prefill_tokens"] + asked["num_decode_requests"]
        memory = 6 + 1e-5 * asked["sum_decode_kv_tokens"]
        return self.factor * (memory + 0.02 * max(tokens - 250, 0))
"""
MEMORY = """
def estimate_kv_cache(model, system, backend, **given):
    weights = 16 * 10**9 // given["tp_size"]
    if weights > 60 * 10**9:
        raise ValueError("no KV budget: non-KV memory")
    free = int(given["memory_fraction_value"] * 80 * 10**9) - weights - 10**9
    per_token = 131072 // given["tp_size"]
    return {
        "total_gpu_capacity_bytes": 80 * 10**9, "kv_size_per_token_bytes": per_token,
        "total_kv_size_tokens": free // per_token,
        "memory_breakdown": {"weights_bytes": weights, "other_bytes": 10**9},
    }
"""
DENSE = {
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "hidden_size": 4096, "max_position_embeddings": 8192,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "meta-llama--Meta-Llama-3.1-8B": DENSE,
    "acme--Dense": DENSE,
    "acme--Experts": {**DENSE, "num_experts": 8},
    "acme--Small-FP8": {**DENSE, "quantization_config": {}},
}


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    root = tmp_path / "aiconfigurator_core"
    (root / "sdk").mkdir(parents=True)
    (root / "__init__.py").write_text(PACKAGE)
    (root / "sdk" / "__init__.py").write_text("")
    (root / "sdk" / "memory.py").write_text(MEMORY)
    (root / "model_configs").mkdir()
    for name, config in CONFIGS.items():
        (root / "model_configs" / f"{name}_config.json").write_text(json.dumps(config))
    for system in ("a100_sxm", "h100_sxm", "l40s"):
        (root / "systems" / "data" / system / "gemm" / "vllm" / "0.24.0").mkdir(parents=True)
        (root / "systems" / "data" / system / "gemm" / "vllm" / "0.9.1").mkdir()
    (tmp_path / "aiconfigurator_core-9.9.dist-info").mkdir()
    (tmp_path / "aiconfigurator_core-9.9.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: aiconfigurator-core\nVersion: 9.9\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    forget()
    yield
    forget()


def forget() -> None:
    for cached in (aiconfigurator.profile_of, aiconfigurator.backend, aiconfigurator._package):
        cached.cache_clear()
    for name in [name for name in sys.modules if name.startswith("aiconfigurator_core")]:
        del sys.modules[name]


def test_a_profile_of_a_model_that_is_not_built_in() -> None:
    found = find_profile("model=acme/Dense,system=l40s,tp=2,dtype=fp8")
    assert found.what == "acme/Dense on 2 L40S, fp8"
    assert found.source == "aiconfigurator-core 9.9, vllm 0.24.0"
    decode = StepShape(decodes=10, context_tokens=100_000)
    assert found.time.seconds(decode) == pytest.approx(0.25 * 0.007, rel=0.05)
    mixed = StepShape(decodes=10, context_tokens=100_000, prefill_tokens=2038, prompts=1)
    assert found.time.seconds(mixed) == pytest.approx(0.25 * (0.007 + 0.02 * 1.798), rel=0.05)
    assert max(error.median for error in found.errors.values()) < 0.02
    model = of_profile("model=acme/Dense,system=l40s,tp=2,dtype=fp8")
    assert (model.gpus, model.max_model_len, model.kv_pieces) == (2, 8192, 64)
    assert model.kv_tokens == (int(0.92 * 80e9) - 9 * 10**9) // 65_536
    assert model.kv_token_bytes == 131_072


def test_a_built_in_one_is_not_sampled_again() -> None:
    assert find_profile("model=llama-3.1-8b,system=h100") is profiles.find("h100-8b")


def test_experts_are_divided_as_they_can_be() -> None:
    found = find_profile("model=acme/Experts,system=h100,tp=2")
    assert found.what == "acme/Experts on 2 H100, bf16"
    assert found.flags == ("--enable-expert-parallel",)
    quantized = find_profile("model=acme/Experts,system=h100,tp=2,dtype=fp8")
    assert quantized.flags == ("--quantization=fp8", "--enable-expert-parallel")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("model=acme/No,system=h100", "does not have it; valid: llama-3.1-8b, .*acme/Dense"),
        ("model=acme/Dense,system=tpu", "system=tpu: no data; valid: a100, h100, l40s"),
        ("model=acme/Dense,system=h100,dtype=fp4", "dtype=fp4: unknown; valid: bf16, fp8"),
        (
            "model=acme/Dense,system=h100,tp=3",
            "cannot be divided by this number of GPUs; valid tp: 1, 2, 4, 8",
        ),
        ("model=acme/Small-FP8,system=h100", "acme/Small-FP8 is quantized; give dtype=fp8"),
        (
            "model=acme/Dense,system=a100,dtype=fp8",
            r"the GPU has no kernels for this dtype; valid dtype: bf16 \(tp 1, 2, 4, 8\)",
        ),
    ],
)
def test_what_it_does_not_have(text: str, reason: str) -> None:
    with pytest.raises(UsageError, match=rf"profile {text}: .*{reason}"):
        find_profile(text)


def test_each_size_and_precision_of_a_model_that_is_not_built_in() -> None:
    names = named_by("model=acme/Dense,system=l40s")
    assert names == [
        f"model=acme/Dense,system=l40s,tp={tp},dtype={dtype}"
        for dtype in ("bf16", "fp8")
        for tp in (1, 2, 4, 8)
    ]
    assert named_by("model=acme/Dense,system=l40s,tp=2,dtype=fp8") == [
        "model=acme/Dense,system=l40s,tp=2,dtype=fp8"
    ]
    quantized = named_by("model=acme/Small-FP8,system=h100,tp=2")
    assert quantized == ["model=acme/Small-FP8,system=h100,tp=2,dtype=fp8"]
    assert [each.profile for each in machines_of(quantized)] == quantized


def test_built_in_sizes_and_precisions_are_not_sampled_again() -> None:
    assert named_by("h100-8b") == ["h100-8b"]
    assert "h100-llama-3.1-8b-fp8-tp2" in named_by("model=llama-3.1-8b,system=h100")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("model=acme/Small-FP8,system=h100,dtype=bf16", "bf16: acme/Small-FP8 is quantized"),
        ("model=acme/Dense,system=h100,tp=3", "bf16: .*cannot be divided.*; fp8: .*cannot be"),
        ("model=acme/No,system=h100", "does not have it; valid: llama-3.1-8b, .*acme/Dense"),
        ("model=acme/Dense,system=tpu", "system=tpu: no data; valid: a100, h100, l40s"),
    ],
)
def test_no_size_or_precision_of_it(text: str, reason: str) -> None:
    with pytest.raises(UsageError, match=f"profile {text}: .*{reason}"):
        named_by(text)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aiconfigurator, "installed", lambda: False)
    with pytest.raises(UsageError, match=r"for others install vllm-sched\[aiconfigurator\]"):
        named_by("model=acme/Dense,system=l40s")
    with pytest.raises(UsageError, match=r"for others install vllm-sched\[aiconfigurator\]"):
        find_profile("model=acme/Dense,system=l40s")
