"""`vllm-sched threshold`: output, files, plots and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from tests.cli.program import Program
from vllm_sched.cli.model import threshold
from vllm_sched.cost.backlog_model import BacklogModel
from vllm_sched.cost.profiles import find
from vllm_sched.policies.deferred_prefill import DeferredPrefillSettings


@pytest.fixture(scope="module", autouse=True)
def cached_play() -> Iterator[None]:
    """Simulate each regime once for all tests, with half of the usual requests."""
    with pytest.MonkeyPatch.context() as patch:
        simulate = cache(partial(threshold.simulate_backlog, requests=20_000))
        patch.setattr(threshold, "simulate_backlog", simulate)
        yield


PAPER = ("--slots", "256", "--mean-output", "200", "--mean-prompt", "220")
A100 = (*PAPER, "--profile", "a100-8b")
Regimes = dict[str, Any]


@pytest.fixture
def regimes(program: Program, tmp_path: Path) -> Callable[..., Regimes]:
    """Return a function that runs the command and returns the regimes of its JSON."""

    def run(*arguments: object) -> Regimes:
        path = tmp_path / "found.json"
        program("threshold", *arguments, "--save", path)
        found: Regimes = json.loads(path.read_text())["regimes"]
        return found

    return run


def test_paper_regime_and_mixed_steps(
    program: Program, regimes: Callable[..., Regimes], tmp_path: Path
) -> None:
    found = regimes(*A100)
    separate, mixed = found["separate prefills"], found["mixed steps"]
    assert separate["closed_form"] == separate["recursion"] == 25
    best = next(row for row in separate["rows"] if row["k"] == 25)
    at_once = separate["rows"][0]
    assert best["throughput"] / at_once["throughput"] == pytest.approx(1.130, abs=0.003)
    served = best["simulated"]["served_s"] / at_once["simulated"]["served_s"]
    assert served == pytest.approx(0.865, abs=0.01)
    assert 1 < separate["run"] < 25
    assert separate["gain"] > 1.12
    assert mixed["run"] == mixed["recursion"] == 1
    picture = tmp_path / "curve.svg"
    printed = program("threshold", *A100, "--plot", picture).out
    assert "K* = 25 by formula, 25 by recursion; run departures=13: +12.5 %" in printed
    assert "run departures=1: no larger K gains anything" in printed
    assert "best, separate prefills: 25" in picture.read_text()
    assert picture.read_text().count('<g id="line">') == 4
    path = tmp_path / "cost.json"
    path.write_text(json.dumps({"step_time": find("a100-8b").time.to_json()}))
    assert regimes(*PAPER, "--cost", path) == found
    assert 1 < regimes(*A100, "--itl-ms", "150")["separate prefills"]["run"] < separate["run"]
    assert regimes(*A100, "--budget", "2048")["separate prefills"]["recursion"] == 9


@pytest.mark.parametrize("profile", ["a100-opt-13b", "h100-70b-tp4"])
def test_formula_recursion_and_simulation_agree(
    regimes: Callable[..., Regimes], profile: str
) -> None:
    for regime in regimes(*PAPER, "--profile", profile, "--mixed-ms", "5").values():
        curve = dict(regime["curve"])
        assert (
            abs(regime["closed_form"] - regime["recursion"]) <= 1
            or curve[regime["closed_form"]] >= 0.99 * curve[regime["recursion"]]
        )
        for row in regime["rows"]:
            assert row["simulated"]["throughput"] == pytest.approx(row["throughput"], rel=0.01)


def test_run_threshold_matches_the_policys_max_delay(regimes: Callable[..., Regimes]) -> None:
    slow = (*PAPER, "--profile", "a100-70b-tp4")
    run = regimes(*slow)["separate prefills"]["run"]
    # The policy waits for departures during half of the longest hold.
    longest = regimes(*slow, "--max-delay-ms", "60000")["separate prefills"]
    assert 1 < run < longest["run"]
    regime = BacklogModel(**longest["regime"])
    assert regime.hold_seconds(run) <= 0.5 * DeferredPrefillSettings().max_delay_ms / 1000
    assert regime.hold_seconds(run + 1) > 0.5 * DeferredPrefillSettings().max_delay_ms / 1000
    assert regimes(*slow, "--max-delay-ms", "0")["separate prefills"]["run"] == 1


def test_answers_of_millions_of_tokens_are_computed(regimes: Callable[..., Regimes]) -> None:
    long = ("--slots", "8", "--mean-output", "1e7", *PAPER[4:], "--profile", "a100-8b")
    for regime in regimes(*long).values():
        assert regime["recursion"] == regime["run"] == 1
        for row in regime["rows"]:
            assert row["simulated"]["throughput"] == pytest.approx(row["throughput"], rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--profile tpu", "unknown profile 'tpu'; valid: a100-8b"),
        ("--cost nosuch.json", "--cost nosuch.json: No such file"),
        ("--profile a100-8b --plot curve.png", "ends in .svg"),
        ("--profile a100-8b --save no/such/x.json", "there is no folder"),
        ("--profile a100-8b --mixed-ms -1", "--mixed-ms -1"),
        ("--profile a100-8b --itl-ms nan", "--itl-ms nan"),
        ("--profile a100-8b --max-delay-ms inf", "--max-delay-ms inf"),
        ("--profile a100-8b --slots 0", "--slots 0"),
        ("--profile a100-8b --mean-output 0", "--mean-output 0: give a mean"),
        ("--profile a100-8b --mean-output 2e7", "1 to 10000000"),
        ("--profile a100-8b --mean-prompt nan", "--mean-prompt nan"),
    ],
)
def test_invalid_option_is_refused(program: Program, arguments: str, message: str) -> None:
    assert message in program.refusal("threshold", *PAPER, *arguments.split())


@pytest.mark.parametrize("option", ["--save", "--plot"])
def test_full_disk_is_reported_after_the_figures(
    option: str, program: Program, tmp_path: Path
) -> None:
    path = tmp_path / "full.svg"
    path.symlink_to("/dev/full")
    printed = program("threshold", *A100, option, path, status=2)
    assert "K* = 25 by formula" in printed.out
    assert printed.err == f"vllm-sched threshold: {path}: No space left on device\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "has no step_time"),
        ('{"step_time": {"speed": 1}}', "unknown coefficient 'speed'"),
        ('{"step_time": {"decode_s": -1}}', "decode_s=-1"),
        ('{"step_time": {}}', "decode steps take no time"),
        ('{"step_time": {"prefill_s": 0.1, "mixed_s": 0.1}}', "decode steps take no time"),
    ],
)
def test_invalid_cost_file_is_refused(
    content: str, message: str, program: Program, tmp_path: Path
) -> None:
    path = tmp_path / "cost.json"
    path.write_text(content)
    line = program.refusal("threshold", *PAPER, "--cost", path)
    assert message in line
    assert str(path) in line
