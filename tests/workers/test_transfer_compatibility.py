"""Differences between the two workers of a transfer."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxy.config import TransferConfig, WorkerConfig
from vllm_sched.cli.fleet.wiring import transfer_wiring
from vllm_sched.workers import launch
from vllm_sched.workers.flags import last_value
from vllm_sched.workers.transfer_compatibility import LAYOUT_FLAGS, incompatible_flags

pytestmark = pytest.mark.usefixtures("cpu")
BLOCK, DTYPE = "--block-size", "--dtype"
CACHE, BACKEND = "--kv-cache-dtype", "--attention-backend"


@pytest.mark.parametrize(
    ("first", "second", "on_cpu", "apart"),
    [
        ([], [], True, []),
        (["--dtype=float32", BLOCK, "64"], [DTYPE, "float32"], True, [BLOCK]),
        (["--block_size=64"], [BLOCK, "64"], True, []),
        # An explicit flag equals the other's default.
        (["--block-size=128"], [], True, []),
        (["--block-size=128"], [], False, [BLOCK]),
        (["--block-size=16"], [], False, []),
        (["--block-size=16"], [], True, [BLOCK]),
        ([CACHE, "auto"], [], True, []),
        ([CACHE, "auto"], [], False, []),
        ([CACHE, "fp8"], [], False, [CACHE]),
        ([DTYPE, "float32"], [], True, []),
        ([DTYPE, "float32"], [], False, [DTYPE]),  # auto is usually bfloat16
        ([DTYPE, "auto"], [], False, []),
        ([DTYPE, "auto"], [], True, [DTYPE]),
        (["--attention-backend=auto"], [], False, []),
        (["--attention-backend=FLASHINFER"], [], False, [BACKEND]),
        # Aliases of one value.
        ([DTYPE, "half"], [DTYPE, "float16"], False, []),
        ([DTYPE, "float"], [], True, []),
        ([DTYPE, "half"], [DTYPE, "bfloat16"], False, [DTYPE]),
        ([CACHE, "fp8"], [CACHE, "fp8_e4m3"], False, [CACHE]),  # NIXL treats them as different
        ([BACKEND, "flash_attn"], [BACKEND, "FLASH_ATTN"], False, []),
        ([BACKEND, "FLASH_ATTN"], ["--attention-config.backend=FLASH_ATTN"], False, []),
        (["-ac", '{"backend": "FLASHINFER"}'], [BACKEND, "FLASH_ATTN"], False, [BACKEND]),
        ([BLOCK, "64", CACHE, "fp8"], [], True, [BLOCK, CACHE]),
    ],
)
def test_layout_flags_that_differ(
    monkeypatch: pytest.MonkeyPatch,
    first: list[str],
    second: list[str],
    on_cpu: bool,
    apart: list[str],
) -> None:
    monkeypatch.setattr(launch, "on_cpu", lambda: on_cpu)
    assert [flag for flag, _, _ in incompatible_flags(first, second)] == apart
    assert [flag for flag, _, _ in incompatible_flags(second, first)] == apart


def test_both_defaults_are_accepted_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> bool:
        raise launch.WorkerError("none")

    monkeypatch.setattr(launch, "on_cpu", none)
    for block in ("16", "128"):
        assert not [*incompatible_flags([BLOCK, block], [])]
    assert [*incompatible_flags([BLOCK, "64"], [])] == [(BLOCK, "64", "")]


def test_defaults_match_the_launch_flags() -> None:
    """The last of several values counts."""
    flags = [
        *launch.CPU_FLAGS,
        *transfer_wiring(
            TransferConfig(connector="nixl"), WorkerConfig(name="p", role="prefill")
        ).flags,
    ]
    assert last_value(flags, BLOCK) == LAYOUT_FLAGS[BLOCK][True]
    assert last_value(flags, DTYPE) == LAYOUT_FLAGS[DTYPE][True]


# Weights and prompts


KWARGS = "--default-chat-template-kwargs"
TRUST = "--trust-request-chat-template"
HYBRID = "--disable-hybrid-kv-cache-manager"
NO_HYBRID = "--no-disable-hybrid-kv-cache-manager"
DRAFT = "--speculative-config"


@pytest.mark.parametrize(
    ("first", "second", "apart"),
    [
        (["--revision=abc"], ["--revision", "def"], ["--revision"]),
        (["--revision=abc"], [], ["--revision"]),
        (["--revision=abc"], ["--revision=abc", "--tokenizer-revision=abc"], []),
        (["--revision=main", "--tokenizer-revision=main"], [], []),
        (["--code-revision=abc"], [], ["--code-revision"]),
        (["--tokenizer-revision=abc"], ["--tokenizer-revision=def"], ["--tokenizer-revision"]),
        (["--tokenizer-revision=abc"], [], ["--tokenizer-revision"]),
        (["--tokenizer=org/other"], [], ["--tokenizer"]),
        (["--tokenizer=org/m"], [], []),
        (["--tokenizer-mode=mistral"], [], ["--tokenizer-mode"]),
        (["--tokenizer_mode=auto"], [], []),
        (["-q", "fp8"], ["--quantization=fp8"], []),
        (["-q", "fp8"], [], ["--quantization"]),
        (["--load-format=dummy"], [], ["--load-format"]),
        (["--load-format=safetensors"], ["--load-format=runai_streamer"], []),
        (["--hf-config-path=/c"], [], ["--hf-config-path"]),
        (["--chat-template=/a.jinja"], [], ["--chat-template"]),
        (["--chat-template=/a.jinja"], ["--chat-template", "/a.jinja"], []),
        (["--chat-template-content-format=auto"], [], []),
        (["--hf-overrides", '{"a": 1, "b": {"c": 2}}'],
         ["--hf-overrides.a=1", "--hf-overrides.b.c=2"], []),
        (["--hf-overrides.a=1"], ["--hf-overrides.a=2"], ["--hf-overrides"]),
        ([KWARGS, '{"enable_thinking": false}'], [], [KWARGS]),
        ([KWARGS, "{}"], [], []),
        (["--mm-processor-kwargs", '{"num_crops": 4}'], [], ["--mm-processor-kwargs"]),
        ([TRUST], [], [TRUST]),
        ([TRUST, "--no-trust-request-chat-template"], [], []),
        ([HYBRID], [], [HYBRID]),
        ([NO_HYBRID], [], []),
        ([HYBRID, NO_HYBRID], [], []),
        ([DRAFT, '{"method": "mtp", "num_speculative_tokens": 2}'], [], [DRAFT]),
        ([DRAFT, '{"method": "eagle3", "model": "org/e"}'],
         ["-sc.method=eagle3", "--spec-model=org/other"], [DRAFT]),
        ([DRAFT, '{"method": "eagle3", "model": "org/e", "num-speculative-tokens": 2}'],
         ["--spec-method=eagle3", "--spec-model=org/e", "--spec-tokens=4"], []),
        (["-sc.method=deepseek_mtp", "-sc.model=org/m"], ["--spec-method", "mtp"], []),
        (["-sc.model=org/small"], [], [DRAFT]),
        (["-sc.model=org/small"], ["-sc.model=org/small", "--spec-method=draft_model"], []),
        (["-sc.model=org/m"], [], [DRAFT]),  # the model itself as draft model
        (["-sc.model=org/m"], ["-sc.model=org/m", "--spec-method=draft_model"], []),
        (["-sc.model=org/m"], ["--spec-method=mtp"], [DRAFT]),
        (["--spec-method=ngram", "-sc.prompt_lookup_max=4"], [], []),
        (["-sc.model=ngram"], ["--spec-method=suffix"], []),
        ([DRAFT, "{}"], [], []),
        ([DRAFT, '{"method": ["ngram"]}'], [], [DRAFT]),  # vLLM refuses it
        (["--lora-modules", "a=/a", "b=/b"], ["--lora_modules", "b=/b", "a=/a"], []),
        (["--lora-modules", "a=/a"], ["--lora-modules=a=/other"], ["--lora-modules"]),
        (["--lora-modules", "a=/a", "b=/b", "-tp", "2"], ["--lora-modules", "a=/a"],
         ["--lora-modules"]),
        (["--lora-modules", '{"name": "a", "path": "/a"}'], ["--lora-modules", "a=/a"], []),
        (["--lora-modules", "a=/x", "--lora-modules", "a=/a"], ["--lora-modules", "a=/a"], []),
        # Flags that change neither prompts nor weights.
        (["--max-num-seqs=9", "--seed=1", "-tp", "2"], ["--max-num-batched-tokens=512"], []),
    ],
)  # fmt: skip
def test_weight_and_prompt_flags_that_differ(
    first: list[str], second: list[str], apart: list[str]
) -> None:
    for one, other in ((first, second), (second, first)):
        assert [flag for flag, _, _ in incompatible_flags(one, other, model="org/m")] == apart


def test_flags_of_config_files_are_compared(tmp_path: Path) -> None:
    file, other = tmp_path / "p.yaml", tmp_path / "d.yaml"
    file.write_text(
        "revision: abc\nmax-num-seqs: 9\ntrust-request-chat-template: true\n"
        "hf-overrides: {a: 1}\nlora-modules: [a=/a, b=/b]\n"
    )
    other.write_text("revision: abc\n")
    same = ["--revision=abc", TRUST, "--hf-overrides.a=1", "--lora-modules", "b=/b", "a=/a"]
    config = ["--config", str(file)]
    assert [*incompatible_flags(config, same)] == []
    assert [*incompatible_flags([*config, "--revision=def"], same)] == [
        ("--revision", "def", "abc")
    ]
    apart = [flag for flag, _, _ in incompatible_flags(config, [f"--config={other}"])]
    assert apart == ["--hf-overrides", TRUST, "--lora-modules"]


def test_unreadable_config_files_differ_by_path(tmp_path: Path) -> None:
    broken = tmp_path / "broken.yaml"
    for text in ("- a list", "a: [", "\0"):
        broken.write_text(text)
        found = [*incompatible_flags(["--config", str(broken)], ["--config=/elsewhere/d.yaml"])]
        assert found == [("--config", str(broken), "/elsewhere/d.yaml")]
    assert [*incompatible_flags(["--config", "/x.yaml"], ["--config=/x.yaml"])] == []


def test_differences_of_objects_and_switches_are_shown_as_flags() -> None:
    found = [*incompatible_flags(["--hf-overrides.a=1", TRUST], [])]
    assert found == [("--hf-overrides", '{"a": 1}', ""), (TRUST, "yes", "")]
