"""`vllm-sched profiles`: which profiles there are, with source and errors."""

from __future__ import annotations

import json

import pytest

from tests.cli.program import Program
from vllm_sched.bench.calibrate import aiconfigurator
from vllm_sched.cost import profiles

THRESHOLD = ["threshold", "--slots", "16", "--mean-output", "50", "--mean-prompt", "100"]


@pytest.fixture(autouse=True)
def without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aiconfigurator, "installed", lambda: False)


def test_all_are_listed_with_source_and_errors(program: Program) -> None:
    printed = program("profiles")
    for profile in (*profiles.ASSUMED.values(), *profiles.measured().values()):
        assert profile.name in printed.out
        assert profile.source.split(",")[0] in printed.words
    error = profiles.find("h100-8b").errors["decode"]
    assert f"{100 * error.median:.1f}/{100 * error.worst:.0f}" in printed.out
    assert "what a mixed step costs beside them is unknown" in printed.out
    assert "h100-8b: short for h100-llama-3.1-8b-bf16-tp1" in printed.out


def test_narrow_terminal_cuts_no_digits(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    wide = program("profiles", "qwen3-235b").out
    assert " 1,143 " in wide
    monkeypatch.setenv("COLUMNS", "40")
    assert program("profiles", "qwen3-235b").out == wide


def test_some_are_listed_and_missing_ones_have_a_reason(program: Program) -> None:
    printed = program("profiles", "deepseek", "h200").out
    assert "h200-deepseek-v3-fp8-tp8" in printed
    [row] = [line for line in printed.splitlines() if line.startswith(" h200-deepseek")]
    assert row.split()[-1] == "none"  # the error of its mixed steps
    assert "llama" not in printed
    missing = program("profiles", "deepseek", "--missing").out
    assert "a100-deepseek-v3-fp8-tp8: the model does not fit" in missing
    short = program("profiles", "h100-70b-tp4").out
    assert "h100-llama-3.1-70b-bf16-tp4" in short
    assert "no built-in profile has tpu in its name" in program.refusal("profiles", "tpu")


def test_profiles_as_json(program: Program) -> None:
    found = json.loads(program("profiles", "--json", "h100-llama-3.1-8b").out)
    assert {each["name"] for each in found} >= {"h100-llama-3.1-8b-bf16-tp1"}
    assert found[0]["step_time"]["token_curve_s"]
    assert found[0]["errors"]["decode"]["median"] < 0.05


def test_only_a_key_that_is_not_built_in_needs_the_extra(program: Program) -> None:
    built_in = "model=qwen3-32b,system=b200,tp=2,dtype=fp8"
    assert "b200-qwen3-32b-fp8-tp2" in program(*THRESHOLD, "--profile", built_in).out
    line = program.refusal(*THRESHOLD, "--profile", "model=gpt-oss,system=h100")
    assert "no built-in profile has model=gpt-oss; valid here: llama-3.1-8b" in line
    assert "for others install vllm-sched[aiconfigurator]" in line
