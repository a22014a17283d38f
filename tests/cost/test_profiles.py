"""The built-in profiles: names, sources, errors and checksums."""

from __future__ import annotations

import re

import pytest

from vllm_sched.cost import profiles
from vllm_sched.cost.curved_step_time import CurvedStepTime
from vllm_sched.cost.profile_fit import FitError, misses
from vllm_sched.cost.step_time import StepShape
from vllm_sched.errors import UsageError

FILES = profiles.data_files()
MEASURED = profiles.measured()


@pytest.mark.parametrize("name", FILES)
def test_data_file_matches_its_checksum_and_states_its_source(name: str) -> None:
    """`python -m benchmarks.fit_profiles` writes it; do not edit it."""
    assert profiles.checksum(FILES[name]) == FILES[name]["sha256"]
    assert profiles.checksum({**FILES[name], "date": "2020-01-01"}) != FILES[name]["sha256"]
    content = FILES[name]
    assert content["source"] == "aiconfigurator-core"
    assert re.fullmatch(r"\d+\.\d+\.\d+", content["version"])
    assert re.fullmatch(r"vllm \d+\.\d+\.\d+", content["backend"])
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", content["date"])
    assert "mixed step" in content["note"]
    assert f"{content['system']}.json" == name
    assert all(each["why"] for each in content["missing"])


def test_every_required_model_and_gpu_has_a_profile() -> None:
    names = {key.name for key in MEASURED}
    for system in ("a100", "h100", "h200", "b200"):
        for model in ("llama-3.1-8b", "llama-3.1-70b", "qwen3-32b", "qwen3-30b-a3b"):
            assert f"{system}-{model}-bf16-tp4" in names
            assert (f"{system}-{model}-fp8-tp4" in names) == (system != "a100")
        assert f"{system}-qwen3-235b-a22b-bf16-tp8" in names
    assert {"h200-deepseek-v3-fp8-tp8", "b200-deepseek-v3-fp8-tp8"} <= names


@pytest.mark.parametrize("key", MEASURED, ids=lambda key: key.name)
def test_fit_errors_are_within_the_limits(key: profiles.ProfileKey) -> None:
    profile = MEASURED[key]
    assert misses(profile.errors) == []
    assert all(isinstance(error, FitError) for error in profile.errors.values())
    assert isinstance(profile.time, CurvedStepTime)
    assert profile.size.gpus == key.tp
    # More work takes longer, more or less: kernels for few tokens differ.
    steps = [profile.time.seconds(StepShape(decodes=b, context_tokens=4096 * b)) for b in (8, 256)]
    assert steps[0] < steps[1]
    prompts = [profile.time.seconds(StepShape(prefill_tokens=n)) for n in (512, 4096, 32_768)]
    assert prompts == sorted(prompts)


def test_kv_capacity_of_an_h100_matches_vllm() -> None:
    size = profiles.find("h100-8b").size
    # vLLM 0.24 with Llama 3.1 8B on an H100 80 GB at 0.9: about 430,000 tokens.
    assert size.kv_tokens(0.9) == pytest.approx(430_000, rel=0.03)
    assert size.kv_tokens() > size.kv_tokens(0.9)
    assert profiles.find("h100-70b-tp4").size.kv_token_bytes == 320 * 1024


@pytest.mark.parametrize("name", profiles.ASSUMED)
def test_assumed_profile_names_its_source(name: str) -> None:
    profile = profiles.find(name)
    # A title, an address, or a note that the figure is assumed.
    assert re.search(r'"[A-Z].+"|https://', profile.source)
    assert profiles.ASSUMPTION in profile.source or "https://" in profile.source
    assert not profile.errors
    assert 0.3 < profile.time.prefill_fixed_s / profile.time.decode_fixed_s < 1.3


def test_ways_to_name_one() -> None:
    found = profiles.find("h100-llama-3.1-70b-bf16-tp4")
    assert profiles.find("h100-70b-tp4") is found
    assert profiles.find("model=llama-3.1-70b,system=h100,tp=4,dtype=bf16") is found
    assert profiles.find("tp=4 system=h100 model=llama-3.1-70b") is found
    assert profiles.find("tp='4' \"system=h100\" model='llama-3.1-70b'") is found
    assert profiles.find("model=llama-3.1-8b,system=h200") is profiles.find("h200-8b")
    assert profiles.find("h100-70b-fp8-tp2") is profiles.find("h100-llama-3.1-70b-fp8-tp2")
    assert profiles.find("b200-qwen3-32b") is profiles.find("b200-qwen3-32b-bf16-tp1")
    published = profiles.find("a100-opt-13b").time
    assert published.seconds(StepShape(prefill_tokens=1000)) == pytest.approx(0.1626)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("tpu", "unknown profile 'tpu'; valid: a100-8b"),
        ("my-worker", "unknown profile 'my-worker'; valid: a100-8b"),
        ("h999-70b-tp4", "unknown profile .*; valid systems: a100, b200, h100, h200; or measure"),
        ("h100-70b-tp3", "has tp=3; valid here: 2, 4, 8"),
        ("h100-llama-3.1-8b-fp8-tp16", "has tp=16; valid here: 1, 2, 4, 8"),
        ("h100-gpt-2-tp4", "has model=gpt-2; valid here: llama-3.1-8b, llama-3.1-70b, "),
        ("a100-qwen3-32b-fp8-tp1", r"the GPU has no kernels for this dtype"),
        ("model=llama-3.1-8b,system=tpu", "no built-in profile has system=tpu; .*: a100, "),
        ("model=gpt-2,system=h100", "has model=gpt-2; valid here: llama-3.1-8b, llama-3.1-70b, "),
        ("model=llama-3.1-8b,system=h100,dtype=fp4", "has dtype=fp4; valid here: bf16, fp8"),
        ("model=llama-3.1-8b,system=a100,dtype=fp8", "has dtype=fp8; .*: bf16 .*no kernels"),
        ("model=llama-3.1-8b,system=h100,tp=3", "has tp=3; valid here: 1, 2, 4, 8"),
        ("model=llama-3.1-70b,system=h100", r"has tp=1; .*: 2, 4, 8 \(the model does not fit"),
        ("model=llama-3.1-8b,system=h100,tp=x", "tp=x is not a number of GPUs"),
        (f"model=llama-3.1-8b,system=h100,tp={'9' * 5000}", "9 is not a number of GPUs"),
        ("model=llama-3.1-8b", "system is missing; valid: a100, b200, h100, h200"),
        ("system=h100", "model is missing; valid: deepseek-v3, "),
        ("model='llama 3',system=h100", "has model=llama 3; valid here: llama-3.1-8b, "),
        ("model=llama 3,system=h100", "'3' is not KEY=VALUE of model, system, dtype, tp"),
        ("model='llama,system=h100", "a quotation mark is not closed"),
        ("model=llama-3.1-8b,system=h100,tp=1,tp=2", "tp is given twice"),
        ("model=llama-3.1-8b,size=3", "'size=3' is not KEY=VALUE of model, system, dtype, tp"),
    ],
)
def test_names_of_none(text: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        profiles.find(text)


def test_one_from_a_file_is_the_one_that_was_written() -> None:
    profile = profiles.find("h200-70b-tp4")
    content = profiles.to_json(profile)
    written = next(
        each for each in FILES["h200.json"]["profiles"]
        if profile.key is not None and each["model"] == profile.key.model and each["tp"] == 4
        and each["dtype"] == "bf16"
    )  # fmt: skip
    assert content == written


def test_profiles_of_a_model_and_system_that_are_missing_have_all_reasons() -> None:
    with pytest.raises(UsageError) as raised:
        profiles.matching_names("model=deepseek-v3,system=h100")
    message = str(raised.value)
    assert "fp8: the model does not fit in the memory" in message
    assert "bf16: there is no checkpoint of this dtype" in message
