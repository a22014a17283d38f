"""`vllm-sched profiles`: which profiles there are, with source and errors."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from vllm_sched.bench.calibrate import aiconfigurator
from vllm_sched.cli.main import main
from vllm_sched.cost import profiles


@pytest.fixture(autouse=True)
def without_the_extra(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(aiconfigurator, "installed", lambda: False)
    return


def test_all_are_listed_with_source_and_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profiles"]) == 0
    printed = capsys.readouterr().out
    for profile in (*profiles.ASSUMED.values(), *profiles.measured().values()):
        assert profile.name in printed
        assert profile.source.split(",")[0] in " ".join(printed.split())
    error = profiles.find("h100-8b").errors["decode"]
    assert f"{100 * error.median:.1f}/{100 * error.worst:.0f}" in printed
    assert "what a mixed step costs beside them is unknown" in printed
    assert "h100-8b: short for h100-llama-3.1-8b-bf16-tp1" in printed


def test_some(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profiles", "deepseek", "h200"]) == 0
    printed = capsys.readouterr().out
    assert "h200-deepseek-v3-fp8-tp8" in printed
    assert "unknown" in printed  # the errors of its mixed steps
    assert "llama" not in printed
    assert main(["profiles", "deepseek", "--missing"]) == 0
    assert "a100-deepseek-v3-fp8-tp8: the model does not fit" in capsys.readouterr().out
    assert main(["profiles", "tpu"]) == 2
    assert "no built-in profile has tpu in its name" in capsys.readouterr().err


def test_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profiles", "--json", "h100-llama-3.1-8b"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {each["name"] for each in found} >= {"h100-llama-3.1-8b-bf16-tp1"}
    assert found[0]["step_time"]["token_curve_s"]
    assert found[0]["errors"]["decode"]["median"] < 0.05


THRESHOLD = ["threshold", "--slots", "16", "--mean-output", "50", "--mean-prompt", "100"]


def test_a_key_that_is_built_in_needs_no_extra(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*THRESHOLD, "--profile", "model=qwen3-32b,system=b200,tp=2,dtype=fp8"]) == 0
    assert "b200-qwen3-32b-fp8-tp2" in capsys.readouterr().out


def test_another_key_needs_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*THRESHOLD, "--profile", "model=gpt-oss,system=h100"]) == 2
    printed = capsys.readouterr().err
    assert "no built-in profile has model=gpt-oss; valid here: llama-3.1-8b" in printed
    assert "for others install vllm-sched[aiconfigurator]" in printed
