"""`vllm-sched calibrate`: measure a worker's step times and fit a cost model."""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

from vllm_sched.bench.calibrate.step_times import CalibrationPlan, LonePrompt, MeasuredSteps, meter
from vllm_sched.bench.calibrate.token_times import MeasureError
from vllm_sched.bench.compare.compare import ProgressReporter, running
from vllm_sched.bench.compare.report import format_count
from vllm_sched.bench.plots.chart import Chart, Series, check_chart, draw_chart
from vllm_sched.bench.results.summary import plain_table
from vllm_sched.cli.exits import INTERRUPTED
from vllm_sched.cli.output import Output, require_folders
from vllm_sched.cost.calibration import Calibration, calibrate, nearest, ratios_to
from vllm_sched.cost.kv_size import kv_bytes_per_token
from vllm_sched.cost.profiles import USAGE, measured
from vllm_sched.cost.step_time import STEP_KINDS, StepKind, StepTime
from vllm_sched.errors import UsageError
from vllm_sched.files import write_whole
from vllm_sched.sim.fleet.models import of_profile
from vllm_sched.sim.planning.capacity_bound import prefill_seconds
from vllm_sched.sim.types import WorkerModel
from vllm_sched.workers import launch
from vllm_sched.workers.launch import WorkerError
from vllm_sched.workers.tiny_model import TINY, loadable

# Long enough to download weights and compile graphs.
DEADLINE_S: Final = 1800.0
# With a larger error the linear model does not fit the worker, or the machine was busy.
MAX_MEDIAN_ERROR: Final = 0.15
KINDS: Final[dict[StepKind, str]] = {
    "decode": "decode alone", "prefill": "prefill alone", "mixed": "both",
}  # fmt: skip
ROWS: Final = (
    ("decode_fixed_s", "c_d: a decode step", 1e3, "ms"),
    ("decode_s", "t_d: a decoding sequence", 1e6, "us"),
    ("context_s", "a token of its context", 1e9, "ns"),
    ("prefill_fixed_s", "c_p: a step of prefill alone", 1e3, "ms"),
    ("prefill_s", "t_p: a token of prefill", 1e6, "us"),
    ("pair_s", "a pair of attending tokens", 1e9, "ns"),
    ("read_s", "a prompt token, read in a later step", 1e9, "ns"),
    ("mixed_s", "delta: both in one step", 1e3, "ms"),
    ("prompt_fixed_s", "a prompt, or a part of one", 1e3, "ms"),
    ("floor_s", "the shortest step with prefill", 1e3, "ms"),
)


def describe(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "calibrate",
        help="measure a worker's step times, for `threshold` and for predictions",
        description=(
            "Measure decode steps, prefill steps and mixed steps on an idle worker, and fit a cost "
            "model: coefficients with 95 % intervals, and errors on steps that were not used for "
            "the fit."
        ),
        allow_abbrev=False,
    )
    add = command.add_argument
    where = command.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "--model", metavar="M", help=f"start a worker of this model; {TINY!r} is a random model"
    )
    where.add_argument("--url", metavar="URL", help="URL of a running, idle worker")
    add(
        "--arg",
        dest="args",
        action="append",
        default=[],
        metavar="FLAG",
        help="with --model: an extra vLLM flag, as --arg=--flag=value; repeatable",
    )
    add(
        "--budget",
        type=int,
        default=2048,
        metavar="TOKENS",
        help="the worker's max_num_batched_tokens, the largest step (default: %(default)s)",
    )
    add(
        "--max-batch",
        type=int,
        default=16,
        metavar="B",
        help="most decoding sequences at once, at most the worker's max_num_seqs "
        "(default: %(default)s)",
    )
    add(
        "--gpus",
        type=int,
        default=1,
        metavar="N",
        help="GPUs of the worker, for `plan` (default: %(default)s)",
    )
    add(
        "--profile",
        metavar="NAME|FILE",
        help=f"compare the worker with this profile too: {USAGE}, or a file of `calibrate`",
    )
    add("--seed", type=int, default=0, help="seed of prompts, held-out steps and intervals")
    add("--save", type=Path, metavar="cost.json", help="write the coefficients and all steps")
    add("--plot", type=Path, metavar="FILE.svg", help="draw measured against fitted times")
    command.set_defaults(func=run_calibrate)


@dataclass(frozen=True)
class WholePrompts:
    """Prompts that ran alone, compared with the sum of their steps."""

    front_s: float  # HTTP and all other time outside the steps, of a prompt of one step
    prompts: tuple[tuple[LonePrompt, float], ...]  # with the predicted seconds of their steps

    @classmethod
    def of(cls, lone: Sequence[LonePrompt], time: StepTime, budget: int) -> Self:
        both = tuple((prompt, prefill_seconds(time, prompt.tokens, budget)) for prompt in lone)
        fronts = [prompt.seconds - steps for prompt, steps in both if prompt.tokens <= budget]
        return cls(max(statistics.median(fronts), 0.0) if fronts else 0.0, both)

    def errors(self) -> list[tuple[LonePrompt, float, float]]:
        """Return each prompt with its expected seconds and the relative error."""
        return [
            (prompt, expected := steps + self.front_s, expected / prompt.seconds - 1)
            for prompt, steps in self.prompts
        ]


def run_calibrate(args: argparse.Namespace) -> int:
    """Run the command; return 1 if the worker failed."""
    check(args)
    profile = _profile(args)
    console = Output()
    try:
        with ProgressReporter(console) as reporter:
            facts, seen = asyncio.run(_measure(args, reporter))
    except (WorkerError, MeasureError) as error:
        print(f"vllm-sched calibrate: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("vllm-sched calibrate: interrupted; the worker was stopped", file=sys.stderr)
        return INTERRUPTED
    calibration = calibrate(seen.steps, seed=args.seed)
    whole = WholePrompts.of(seen.lone, calibration.time, args.budget)
    _print_calibration(console, calibration)
    _print_whole_prompts(console, whole)
    _print_distances(console, calibration, args.gpus, profile)
    content = json.dumps(to_json(facts, calibration, whole), indent=1) + "\n"
    console.save(args.save, lambda path: write_whole(path, content))
    console.save(args.plot, partial(draw_chart, picture(facts["model"], calibration)), "drew")
    return 0


def check(args: argparse.Namespace) -> None:
    for name in ("budget", "max_batch", "gpus"):
        if (value := getattr(args, name)) < 1:
            raise UsageError(f"--{name.replace('_', '-')} {value}: must be at least 1")
    if args.args and args.url:
        raise UsageError("--arg is for a worker started here; leave it out, or give --model")
    if args.plot:
        check_chart(args.plot)
    require_folders(args.save, args.plot)


def _profile(args: argparse.Namespace) -> WorkerModel | None:
    """Return the worker of `--profile`, which must have as many GPUs."""
    if args.profile is None:
        return None
    profile = of_profile(args.profile)
    if profile.gpus != args.gpus and "gpus" not in profile.assumed:
        raise UsageError(
            f"--profile {args.profile}: is a worker with {format_count(profile.gpus, 'GPU')}; give "
            f"--gpus {profile.gpus}, or a profile with {args.gpus}"
        )
    return profile


async def _measure(
    args: argparse.Namespace, reporter: ProgressReporter
) -> tuple[dict[str, Any], MeasuredSteps]:
    async with AsyncExitStack() as stack:
        url = args.url
        if url is None:
            worker = _worker(args)
            await stack.enter_async_context(running([worker], reporter))
            url = worker.url
        worker_meter = await stack.enter_async_context(meter(url, args.seed))
        plan = CalibrationPlan.from_limits(
            budget=args.budget,
            max_batch=args.max_batch,
            max_model_len=worker_meter.max_model_len,
            seed=args.seed,
        )
        reporter.step("measuring (some minutes)")
        seen = await worker_meter.measure(plan, reporter.detail)
        facts = {
            "model": args.model or worker_meter.model,
            "where": args.url or "here",
            "gpus": args.gpus,
            "max_model_len": worker_meter.max_model_len,
            "max_num_batched_tokens": args.budget,
            "kv_tokens": worker_meter.kv_tokens,
            "block_tokens": worker_meter.block_tokens,
            "kv_token_bytes": _kv_token_bytes(worker_meter.root),
        }
        return {name: fact for name, fact in facts.items() if fact is not None}, seen


def _kv_token_bytes(root: str) -> int | None:
    """Return the KV bytes per token from a local model's config.json; None if unknown."""
    try:
        return kv_bytes_per_token(json.loads((Path(root) / "config.json").read_text()))
    except (OSError, ValueError, UsageError):
        return None


def _worker(args: argparse.Namespace) -> launch.Worker:
    flags = ["--max-num-batched-tokens", str(args.budget), *args.args]
    model = loadable(args.model)
    return launch.worker(model=model, flags=flags, name="worker", deadline_s=DEADLINE_S)


def to_json(
    facts: Mapping[str, Any], calibration: Calibration, whole: WholePrompts
) -> dict[str, Any]:
    """Return the file for `threshold --cost` and a fleet's `profile`, with all measured steps."""
    return {
        **facts,
        "step_time": calibration.time.to_json(),
        "front_s": whole.front_s,
        "intervals": dict(calibration.intervals),
        "held_out_error": {
            "all": calibration.error(), **{kind: calibration.error(kind) for kind in STEP_KINDS},
        },
        "whole_prompts": [
            {**asdict(prompt), "expected_s": expected} for prompt, expected, _ in whole.errors()
        ],
        "steps": [
            {**asdict(step.shape), "seconds": step.seconds, "held_out": held_out}
            for steps, held_out in ((calibration.fitted, False), (calibration.held_out, True))
            for step in steps
        ],
    }  # fmt: skip


def picture(model: str, calibration: Calibration) -> Chart:
    everything = (*calibration.fitted, *calibration.held_out)
    times = [step.seconds * 1000 for step in everything]
    ends = [(at, at) for at in (min(times), max(times))]
    error = calibration.error() or 0.0
    return Chart(
        title=f"Steps of {Path(model).name}: measured against fitted",
        subtitle=f"median error of held-out steps {error:.1%}",
        x="fitted, ms",
        y="measured, ms",
        log_x=True,
        log_y=True,
        series=[
            Series("as fitted", ends),
            *(
                Series(
                    name,
                    [
                        (calibration.time.seconds(step.shape) * 1000, step.seconds * 1000)
                        for step in everything
                        if step.shape.kind == kind
                    ],
                    dots=True,
                )
                for kind, name in KINDS.items()
            ),
        ],
    )


def _print_calibration(console: Output, calibration: Calibration) -> None:
    layout = plain_table([""], ("", "95 % interval", "unit"), long_texts=True)
    for name, meaning, scale, unit in ROWS:
        low, high = calibration.intervals[name]
        layout.add_row(
            meaning,
            f"{getattr(calibration.time, name) * scale:.3g}",
            f"{low * scale:.3g} - {high * scale:.3g}",
            unit,
        )
    console.print_table(layout)
    headings = ("steps", "shortest", "longest", "median error\nof held-out", "residual p90")
    errors = plain_table([""], headings)
    for kind, name in KINDS.items():
        errors.add_row(name, *_residuals(calibration, kind))
    console.print_table(errors)
    error = calibration.error() or 0.0
    text = f"median error of held-out steps: {error:.1%}"
    if error > MAX_MEDIAN_ERROR:
        text += "; more than 15 %: measure again when the machine is idle"
    style = "yellow" if error > MAX_MEDIAN_ERROR else ""
    console.print_text(text, style)


def _print_whole_prompts(console: Output, whole: WholePrompts) -> None:
    layout = plain_table((), ("a whole prompt, alone", "measured", "steps and front", "error"))
    for prompt, expected, error in whole.errors():
        style = "yellow" if abs(error) > MAX_MEDIAN_ERROR else ""
        times = (f"{prompt.seconds * 1e3:.4g} ms", f"{expected * 1e3:.4g} ms")
        layout.add_row(f"{prompt.tokens:,} tokens", *times, f"{error:+.0%}", style=style)
    console.print_table(layout)
    text = f"outside the steps: {whole.front_s * 1e3:.3g} ms per request"
    console.print_text(text, "")


def _print_distances(
    console: Output, calibration: Calibration, gpus: int, profile: WorkerModel | None
) -> None:
    """Print how far the worker is from the nearest built-in profile, and from the named one."""
    steps = (*calibration.fitted, *calibration.held_out)
    same_size = [built_in for key, built_in in measured().items() if key.tp == gpus]
    shown: dict[str, Mapping[StepKind, float]] = {}
    if (closest := nearest(steps, same_size)) is not None:
        shown[f"nearest built-in profile: {closest.profile.name}"] = closest.ratios
    if profile is not None:
        shown[f"profile {profile.profile}"] = ratios_to(profile.time, steps)
    for name, ratios in shown.items():
        by_kind = ", ".join(f"{KINDS[kind]} {ratio:.3g}" for kind, ratio in ratios.items())
        text = f"{name}; median of measured time over its time: {by_kind}"
        console.print_text(text, "")


def _residuals(calibration: Calibration, kind: StepKind) -> list[str]:
    steps = [e for e in (*calibration.fitted, *calibration.held_out) if e.shape.kind == kind]
    times = [step.seconds * 1000 for step in steps]
    off = [abs(calibration.time.seconds(step.shape) / step.seconds - 1) for step in steps]
    error = calibration.error(kind)
    return [
        str(len(steps)),
        f"{min(times):.3g} ms",
        f"{max(times):.3g} ms",
        "-" if error is None else f"{error:.1%}",
        f"{statistics.quantiles(off, n=10)[-1]:.1%}",
    ]
