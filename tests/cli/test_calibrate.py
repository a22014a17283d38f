"""`vllm-sched calibrate`: on a server of known steps, with faults, and on a real worker."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.step_server import StepServer, serving
from vllm_sched.bench.steps import MeasureError, Plan, Stream, quick
from vllm_sched.cli.main import main
from vllm_sched.cost.step_time import StepTime
from vllm_sched.workers import launch

TIME = StepTime(
    decode_fixed_s=0.004,
    decode_s=1e-4,
    prefill_fixed_s=0.005,
    prefill_s=5e-5,
    mixed_s=0.003,
)
SMALL = ("--max-batch", "2", "--budget", "128")


# What is measured


def test_the_plan_fills_no_step_beyond_its_budget() -> None:
    plan = Plan.of(budget=2048, max_batch=16, max_model_len=32_768)
    assert plan.batches == (1, 2, 4, 8, 16)
    assert max(plan.prompts) + max(plan.batches) <= 2048
    assert plan.prompts[0] == 16
    assert len(plan.prompts) == 10


def test_the_plan_keeps_within_the_models_context() -> None:
    plan = Plan.of(budget=8192, max_batch=8, max_model_len=1024)
    assert max(plan.contexts) < 1024 - 44


def test_a_budget_that_leaves_no_room() -> None:
    with pytest.raises(MeasureError, match="give a larger --budget or a smaller --max-batch"):
        Plan.of(budget=64, max_batch=16, max_model_len=4096)


def test_a_gap_is_a_step_only_where_one_token_came() -> None:
    stream = Stream(10)
    for now, tokens in ((1.0, 1), (1.1, 2), (1.4, 4), (1.5, 5)):
        stream.tick(now, tokens)
    assert stream.gap(0) is None
    assert stream.gap(1) == pytest.approx(0.1)
    assert stream.gap(2) is None  # two tokens at once: two steps
    assert stream.gap(3) == pytest.approx(0.1)
    assert stream.gap(4) is None


def test_a_quarter_is_quicker() -> None:
    assert quick([5.0, 1.0, 2.0, 9.0, 3.0]) == 2.0
    assert quick([4.0]) == 4.0


# The command


def test_a_server_of_known_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cost, picture = tmp_path / "cost.json", tmp_path / "cost.svg"
    with serving(StepServer(TIME)) as url:
        arguments = ["calibrate", "--url", url, *SMALL, "--save", str(cost), "--plot", str(picture)]
        assert main(arguments) == 0
    printed = capsys.readouterr().out
    for words in ("c_d: a decode step", "delta: doing both", "95 % interval", "held-out"):
        assert words in printed
    content = json.loads(cost.read_text())
    assert content["model"] == "fake"
    kinds = {(s["prefill_tokens"] > 0, s["decodes"] > 0) for s in content["steps"]}
    assert kinds == {(True, False), (False, True), (True, True)}
    assert any(step["held_out"] for step in content["steps"])
    # Sleeping takes longer than asked, never shorter: on a busy machine much longer.
    found = StepTime.from_json(content["step_time"])
    assert found.decode_fixed_s + 4 * found.decode_s >= 0.9 * TIME.decode_fixed_s
    assert found.prefill_s > 0
    assert picture.read_text().count("<polyline") == 1
    # What was saved is what `threshold` reads.
    lengths = ("--slots", "32", "--mean-output", "64", "--mean-prompt", "200")
    assert main(["threshold", *lengths, "--cost", str(cost)]) == 0
    assert str(cost) in capsys.readouterr().out


def failed(capsys: pytest.CaptureFixture[str], status: int, *arguments: str) -> str:
    """Run the command in vain; return the one line that it says."""
    assert main(["calibrate", *arguments]) == status
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def test_nobody_listens(capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{launch.free_port()}"
    assert "is a worker listening there?" in failed(capsys, 1, "--url", url)


@pytest.mark.parametrize(
    ("server", "said"),
    [
        (StepServer(TIME, card={"id": "x"}), "names no model with a max_model_len"),
        (StepServer(TIME, status=503), "answered 503"),
        (StepServer(TIME, ends_after=3), "an answer ended after 3 of 44 tokens"),
        (StepServer(TIME, max_model_len=80), "leaves a prompt 35 beside 2 decodes"),
    ],
    ids=["no vLLM", "refuses", "ends early", "small context"],
)
def test_a_worker_that_cannot_be_measured(
    server: StepServer, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(server) as url:
        assert said in failed(capsys, 1, "--url", url, *SMALL)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--url", "localhost:8000"], "give it as http://HOST:PORT"),
        (["--url", "http://x", "--arg=--seed=1"], "--arg is for a worker started here"),
        (["--url", "http://x", "--budget", "0"], "--budget 0: at least 1 is needed"),
        (["--url", "http://x", "--max-batch", "0"], "--max-batch 0"),
        (["--url", "http://x", "--plot", "a.png"], "ends in .svg"),
        (["--url", "http://x", "--save", "no/such/cost.json"], "there is no folder"),
    ],
)
def test_what_is_refused_before_anything_starts(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in failed(capsys, 2, *arguments)
