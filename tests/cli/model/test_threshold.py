"""`vllm-sched threshold`: output, files, plots and refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from vllm_sched.cli.main import main
from vllm_sched.cli.model import threshold
from vllm_sched.cost.profiles import SHORT_NAMES, find
from vllm_sched.cost.regime import Regime
from vllm_sched.policies.deferred_prefill import DeferredPrefillSettings


@pytest.fixture(scope="module", autouse=True)
def cached_play() -> Iterator[None]:
    """Simulate each regime once for all tests, with half of the usual requests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threshold, "play", cache(partial(threshold.play, requests=20_000)))
        yield


PAPER = ("--slots", "256", "--mean-output", "200", "--mean-prompt", "220")


def saved(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    """Run the command and return its JSON."""
    path = tmp_path / "found.json"
    assert main(["threshold", *arguments, "--save", str(path)]) == 0
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def test_paper_regime_and_mixed_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = saved(tmp_path, *PAPER, "--profile", "a100-8b")["regimes"]
    apart, riding = found["apart"], found["riding along"]
    assert apart["closed_form"] == apart["recursion"] == 25
    best = next(row for row in apart["rows"] if row["k"] == 25)
    at_once = apart["rows"][0]
    assert best["throughput"] / at_once["throughput"] == pytest.approx(1.130, abs=0.003)
    served = best["simulated"]["served_s"] / at_once["simulated"]["served_s"]
    assert served == pytest.approx(0.865, abs=0.01)
    assert 1 < apart["run"] < 25
    assert apart["gain"] > 1.12
    assert riding["run"] == riding["recursion"] == 1
    printed = capsys.readouterr().out
    assert "K* = 25 by formula, 25 by recursion; run departures=13: +12.5 %" in printed
    assert "run departures=1: no larger K gains anything" in printed


@pytest.mark.parametrize("profile", SHORT_NAMES)
def test_formula_recursion_and_simulation_agree(tmp_path: Path, profile: str) -> None:
    found = saved(tmp_path, *PAPER, "--profile", profile, "--mixed-ms", "5")["regimes"]
    for regime in found.values():
        curve = dict(regime["curve"])
        assert (
            abs(regime["closed_form"] - regime["recursion"]) <= 1
            or curve[regime["closed_form"]] >= 0.99 * curve[regime["recursion"]]
        )
        for row in regime["rows"]:
            assert row["simulated"]["throughput"] == pytest.approx(row["throughput"], rel=0.01)


def test_itl_target_lowers_the_threshold(tmp_path: Path) -> None:
    free = saved(tmp_path, *PAPER, "--profile", "a100-8b")
    tight = saved(tmp_path, *PAPER, "--profile", "a100-8b", "--itl-ms", "150")
    assert 1 < tight["regimes"]["apart"]["run"] < free["regimes"]["apart"]["run"]


def test_run_threshold_matches_the_policys_max_delay(tmp_path: Path) -> None:
    slow = (*PAPER, "--profile", "a100-70b-tp4")
    run = saved(tmp_path, *slow)["regimes"]["apart"]["run"]
    # The policy waits for departures during half of the longest hold.
    longest = saved(tmp_path, *slow, "--max-delay-ms", "60000")["regimes"]["apart"]
    assert 1 < run < longest["run"]
    regime = Regime(**longest["regime"])
    assert regime.hold(run) <= 0.5 * DeferredPrefillSettings().max_delay_ms / 1000
    assert regime.hold(run + 1) > 0.5 * DeferredPrefillSettings().max_delay_ms / 1000
    never = saved(tmp_path, *slow, "--max-delay-ms", "0")["regimes"]["apart"]
    assert never["run"] == 1


def test_budget_option_caps_the_threshold(tmp_path: Path) -> None:
    found = saved(tmp_path, *PAPER, "--profile", "a100-8b", "--budget", "2048")
    assert found["regimes"]["apart"]["recursion"] == 9


def test_cost_file_gives_the_same_result_as_its_profile(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    path.write_text(json.dumps({"step_time": find("a100-8b").time.to_json()}))
    from_file = saved(tmp_path, *PAPER, "--cost", str(path))
    assert from_file["regimes"] == saved(tmp_path, *PAPER, "--profile", "a100-8b")["regimes"]


def test_plot_shows_both_curves(tmp_path: Path) -> None:
    path = tmp_path / "curve.svg"
    assert main(["threshold", *PAPER, "--profile", "a100-8b", "--plot", str(path)]) == 0
    text = path.read_text()
    assert "best, apart: 25" in text
    assert text.count('<g id="line">') == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*PAPER, "--profile", "tpu"], "unknown profile 'tpu'; valid: a100-8b"),
        ([*PAPER, "--cost", "nosuch.json"], "--cost nosuch.json: No such file"),
        ([*PAPER, "--profile", "a100-8b", "--plot", "curve.png"], "ends in .svg"),
        ([*PAPER, "--profile", "a100-8b", "--save", "no/such/x.json"], "there is no folder"),
        ([*PAPER, "--profile", "a100-8b", "--mixed-ms", "-1"], "--mixed-ms -1"),
        ([*PAPER, "--profile", "a100-8b", "--itl-ms", "nan"], "--itl-ms nan"),
        ([*PAPER, "--profile", "a100-8b", "--max-delay-ms", "inf"], "--max-delay-ms inf"),
        (["--slots", "0", *PAPER[2:], "--profile", "a100-8b"], "--slots 0"),
        ([*PAPER, "--mean-output", "0", "--profile", "a100-8b"], "--mean-output 0: give a mean"),
        ([*PAPER, "--mean-output", "2e7", "--profile", "a100-8b"], "1 to 10000000"),
        ([*PAPER, "--mean-prompt", "nan", "--profile", "a100-8b"], "--mean-prompt nan"),
    ],
)
def test_invalid_option_is_refused_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["threshold", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("option", ["--save", "--plot"])
def test_full_disk_is_reported_in_one_line_after_the_figures(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "full.svg"
    path.symlink_to("/dev/full")
    assert main(["threshold", *PAPER, "--profile", "a100-8b", option, str(path)]) == 2
    printed = capsys.readouterr()
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
    content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cost.json"
    path.write_text(content)
    assert main(["threshold", *PAPER, "--cost", str(path)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert str(path) in error


def test_answers_of_millions_of_tokens_are_computed(tmp_path: Path) -> None:
    found = saved(
        tmp_path, "--slots", "8", "--mean-output", "1e7", *PAPER[4:], "--profile", "a100-8b"
    )
    for regime in found["regimes"].values():
        assert regime["recursion"] == regime["run"] == 1
        for row in regime["rows"]:
            assert row["simulated"]["throughput"] == pytest.approx(row["throughput"], rel=0.01)
