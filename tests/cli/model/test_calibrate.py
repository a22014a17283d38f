"""`vllm-sched calibrate` on a server with known step times, and with faults."""

from __future__ import annotations

import asyncio
import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.cli.fleet.step_server import StepServer, served
from tests.cli.program import Program
from tests.cost.test_calibration import measured as steps_of
from tests.virtual_loop import VirtualTimeLoop
from vllm_sched.bench.calibrate import step_times, token_times
from vllm_sched.bench.calibrate.step_times import CalibrationPlan, LonePrompt, MeasuredSteps
from vllm_sched.bench.calibrate.token_times import MeasureError, TimedStream, TokenApi, wire_to
from vllm_sched.cli.model import calibrate as command
from vllm_sched.cli.model.calibrate import WholePrompts
from vllm_sched.cost.step_time import StepTime
from vllm_sched.workers import launch

TIME = StepTime(
    decode_fixed_s=0.004,
    decode_s=1e-4,
    prefill_fixed_s=0.005,
    prefill_s=5e-5,
    pair_s=1e-7,
    mixed_s=0.003,
)
SMALL = ("--max-batch", "2", "--budget", "128")


@pytest.fixture(autouse=True)
def few_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure each point a few times, because equal steps take equal time here."""
    for name, value in {"REPEATS": 3, "LONG_REPEATS": 2, "LONE_REPEATS": 3, "IDLE_S": 0.01}.items():
        monkeypatch.setattr(step_times, name, value)
    monkeypatch.setattr("vllm_sched.cost.calibration.SAMPLES", 40)


# Measurements


def test_plan_fills_no_step_beyond_its_budget() -> None:
    plan = CalibrationPlan.from_limits(budget=2048, max_batch=16, max_model_len=32_768)
    assert plan.batches == (1, 2, 4, 8, 16)
    assert max(plan.prompts) + max(plan.batches) <= 2048
    assert plan.prompts[0] == 16
    assert len(plan.prompts) == 10


def test_plan_reaches_the_longest_context_and_stays_within_it() -> None:
    for budget, longest in ((8192, 1024), (512, 16_384)):
        plan = CalibrationPlan.from_limits(budget=budget, max_batch=8, max_model_len=longest)
        assert 0.85 * longest < max(plan.contexts) < longest - 88
    # Contexts have no large gaps, and larger batches leave the long ones out.
    assert plan.contexts == (16, 126, 504, 2016, 8064, 16_292)
    assert plan.contexts_of(1) == [*plan.contexts]
    assert plan.contexts_of(8) == [16, 126, 504, 2016]


def test_budget_too_small_for_the_batch_is_refused() -> None:
    with pytest.raises(MeasureError, match="give a larger --budget or a smaller --max-batch"):
        CalibrationPlan.from_limits(budget=64, max_batch=16, max_model_len=4096)


def test_gap_is_a_step_only_with_one_token() -> None:
    stream = TimedStream(10)
    for now, tokens in ((1.0, 1), (1.1, 2), (1.4, 4), (1.5, 5)):
        stream.tick(now, tokens)
    assert stream.gap(0) is None
    assert stream.gap(1) == pytest.approx(0.1)
    assert stream.gap(2) is None  # two tokens at once: two steps
    assert stream.gap(3) == pytest.approx(0.1)
    assert stream.gap(4) is None


async def test_cache_size_is_read_from_kv_cache_size_tokens() -> None:
    labels = 'block_size="32",kv_cache_size_tokens="1500",num_gpu_blocks="64"'
    page = f"vllm:cache_config_info{{{labels}}} 1.0\n"

    async with served(StepServer(TIME, metrics=page)) as url:
        with wire_to(url) as wire:
            api = TokenApi(wire)
            await api.read_metrics()
    assert (api.kv_tokens, api.block_tokens) == (1500, 32)


# The command


@pytest.fixture
def in_virtual_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[StepServer], str]:
    """Run the command and a server in one loop, in which steps take exactly their time."""

    def serve(server: StepServer) -> str:
        measure = command._measure

        async def measured(args: Namespace, *report: Any) -> tuple[dict[str, Any], MeasuredSteps]:
            async with served(server) as args.url:
                return await measure(args, *report)

        clock = SimpleNamespace(perf_counter=lambda: asyncio.get_running_loop().time())
        for module in (step_times, token_times):
            monkeypatch.setattr(module, "time", clock)
        monkeypatch.setattr(command, "_measure", measured)
        monkeypatch.setattr(asyncio.events, "new_event_loop", VirtualTimeLoop)
        return "http://replaced"

    return serve


def test_calibrate_recovers_known_step_times(
    in_virtual_time: Callable[[StepServer], str],
    tmp_path: Path,
    program: Program,
) -> None:
    cost, picture = tmp_path / "cost.json", tmp_path / "cost.svg"
    page = 'vllm:cache_config_info{block_size="32",num_gpu_blocks="64",x="None"} 1.0\n'
    page += 'vllm_sched_info{policies="none",x="y"} 1.0\n'
    url = in_virtual_time(StepServer(TIME, budget=128, max_model_len=1024, metrics=page))
    saved = ("--save", cost, "--plot", picture)
    printed = program("calibrate", "--url", url, *SMALL, *saved, "--profile", "h200-8b").out
    for words in (
        "c_d: a decode step",
        "delta: both in one step",
        "95 % interval",
        "held-out",
        "nearest built-in profile: ",
        "profile h200-8b; median of measured time over its time: decode alone ",
    ):
        assert words in printed
    content = json.loads(cost.read_text())
    assert content["model"] == "fake"
    sizes = ("gpus", "max_model_len", "max_num_batched_tokens", "kv_tokens", "block_tokens")
    assert [content[name] for name in sizes] == [1, 1024, 128, 2048, 32]
    # Contexts reach the worker's longest, so that long prompts are measured.
    assert max(s["pairs"] / (s["prefill_tokens"] or 1) for s in content["steps"]) > 500
    assert max(s["context_tokens"] for s in content["steps"] if s["decodes"] == 1) > 900
    assert [prompt["tokens"] for prompt in content["whole_prompts"]][-2:] == [255, 1022]
    assert content["front_s"] >= 0
    kinds = {(s["prefill_tokens"] > 0, s["decodes"] > 0) for s in content["steps"]}
    assert kinds == {(True, False), (False, True), (True, True)}
    assert any(step["held_out"] for step in content["steps"])
    found = StepTime.from_json(content["step_time"])
    for name, value in TIME.to_json().items():
        assert getattr(found, name) == pytest.approx(value, rel=0.05, abs=0.0 if value else 1e-6), (
            name
        )
    assert picture.read_text().count('<g id="line">') == 4
    # `threshold` reads the saved file.
    lengths = ("--slots", "32", "--mean-output", "64", "--mean-prompt", "200")
    assert str(cost) in program("threshold", *lengths, "--cost", cost).out


@pytest.mark.parametrize("option", ["--save", "--plot"])
def test_full_disk_is_reported_in_one_line_after_the_figures(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: Program
) -> None:
    async def measured(*_: object) -> tuple[dict[str, Any], MeasuredSteps]:
        return {"model": "m"}, MeasuredSteps(steps_of(TIME), [])

    monkeypatch.setattr("vllm_sched.cli.model.calibrate._measure", measured)
    path = tmp_path / "full.svg"
    path.symlink_to("/dev/full")
    printed = program("calibrate", "--url", "http://x", option, path, status=2)
    assert "median error of held-out steps" in printed.out
    assert printed.err == f"vllm-sched calibrate: {path}: No space left on device\n"


def test_refused_connection_is_reported(program: Program) -> None:
    url = f"http://127.0.0.1:{launch.free_port()}"
    printed = program("calibrate", "--url", url, status=1)
    assert "is a server listening there?" in printed.err


@pytest.mark.parametrize(
    ("server", "message"),
    [
        (StepServer(TIME, card={"id": "x"}), "lists no model with a max_model_len"),
        (StepServer(TIME, card="<html>log in"), "lists no model with a max_model_len"),
        (StepServer(TIME, status=503), "HTTP 503"),
        (StepServer(TIME, ends_after=3), "a response ended after 3 of 44 tokens"),
        (StepServer(TIME, max_model_len=150), "leaves a prompt 58 next to 2 decodes"),
        (StepServer(TIME, budget=64, max_model_len=700), "--budget 128 must be the worker's"),
        (
            StepServer(TIME, metrics='vllm_sched_info{policies="lanes+long_prompt",x="y"} 1.0\n'),
            "runs lanes and long_prompt, and policies change what a step computes",
        ),
    ],
    ids=[
        "no vLLM",
        "a login page",
        "refuses",
        "ends early",
        "small context",
        "another budget",
        "policies",
    ],
)
def test_unmeasurable_worker_is_reported(
    server: StepServer, message: str, in_virtual_time: Callable[[StepServer], str], program: Program
) -> None:
    url = in_virtual_time(server)
    error = program("calibrate", "--url", url, *SMALL, status=1).err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("answered", "part"),
    [
        (1, "warming up"),
        (10, "both: a long prompt next to 1 decoding"),
        (24, "whole prompts"),
        (42, "decoding: 2 at a time, context 16"),
        (70, "prefill alone: 1 of 16 tokens"),
    ],
)
def test_timeout_names_the_part_of_the_measurement(
    answered: int, part: str, in_virtual_time: Callable[[StepServer], str], program: Program
) -> None:
    url = in_virtual_time(StepServer(TIME, budget=128, max_model_len=1024, hangs_after=answered))
    error = program("calibrate", "--url", url, *SMALL, status=1).err
    assert error.endswith(f'no complete response within 300 s (during "{part}")\n')
    assert error.count("\n") == 1


def test_front_time_is_the_rest_of_short_prompts() -> None:
    lone = [
        LonePrompt(16, TIME.prefill_fixed_s + 16 * TIME.prefill_s + 16**2 / 2 * TIME.pair_s + 0.02)
    ]
    whole = WholePrompts.of([*lone, LonePrompt(4000, 1.0)], TIME, 512)
    assert whole.front_s == pytest.approx(0.02)
    (_, _, off), (long, expected, error) = whole.errors()
    assert off == pytest.approx(0.0)
    assert long.tokens == 4000
    assert expected == pytest.approx(0.02 + 8 * 0.005 + 4000 * 5e-5 + 8e6 * 1e-7)
    assert error == pytest.approx(expected - 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--url ftp://x", "is not a URL; write http://HOST:PORT"),
        ("--url http://x --arg=--seed=1", "--arg is for a worker started here"),
        ("--url http://x --budget 0", "--budget 0: must be at least 1"),
        ("--url http://x --max-batch 0", "--max-batch 0"),
        ("--url http://x --plot a.png", "ends in .svg"),
        ("--url http://x --save no/such/cost.json", "there is no folder"),
        ("--url http://x --profile tpu", "unknown profile 'tpu'; valid: a100-8b"),
        ("--url http://x --profile h100-70b-tp4", "is a worker with 4 GPUs; give --gpus 4, or"),
    ],
)
def test_invalid_option_is_refused_before_any_measurement(
    arguments: str, message: str, program: Program
) -> None:
    assert message in program.refusal("calibrate", *arguments.split())
