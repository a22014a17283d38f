"""`vllm-sched compare`: play the same arrivals against two schedulers on one machine."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

from vllm_sched.bench.compare import swimlane
from vllm_sched.bench.compare.compare import Comparison, ComparisonPlan, ProgressReporter, compare
from vllm_sched.bench.compare.workloads import WORKLOADS, build
from vllm_sched.cli.bench.bench import print_errors
from vllm_sched.cli.exits import INTERRUPTED
from vllm_sched.cli.output import Output, require_folders
from vllm_sched.errors import UsageError
from vllm_sched.workers.launch import DEFAULT, NONE, Side, WorkerError
from vllm_sched.workers.tiny_model import TINY, loadable

SIDE_HELP = (
    f"{DEFAULT} (vLLM's own scheduler), {NONE} (ours without a policy), or NAME[+NAME...] "
    "(policies; default: %(default)s)"
)


def describe(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "compare",
        help="play the same arrivals against two schedulers on this machine",
        description=(
            "Start a real worker per side, play the same arrivals against both in turn, print "
            "the figures by request class and draw both runs."
        ),
    )
    parser.add_argument(
        "--model",
        default=TINY,
        metavar="M",
        help="a model that vLLM can serve; %(default)r, the default, is a random model",
    )
    parser.add_argument("--baseline", default=DEFAULT, metavar="SIDE", help=SIDE_HELP)
    parser.add_argument("--candidate", default="long_prompt", metavar="SIDE", help=SIDE_HELP)
    parser.add_argument(
        "--set",
        dest="sets",
        action="append",
        default=[],
        metavar="NAME.KEY=VALUE",
        help="a setting of one of the candidate's policies, repeatable",
    )
    for role in ("baseline", "candidate"):
        parser.add_argument(
            f"--{role}-arg",
            action="append",
            default=[],
            metavar="FLAG",
            help=f"an extra vLLM flag for the {role}, as --{role}-arg=--flag=value; repeatable",
        )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="OUT.json",
        help="write a trace of each engine for Perfetto to OUT.baseline.json and "
        "OUT.candidate.json, and draw it",
    )
    add_options(parser)
    parser.set_defaults(func=run_compare)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of all comparisons: the workload and the output files."""
    parser.add_argument(
        "--workload",
        default="long-blocks-short",
        metavar="NAME",
        help=f"{', '.join(WORKLOADS)} (default: %(default)s)",
    )
    parser.add_argument(
        "--longs",
        type=int,
        metavar="N",
        help="long prompts per round; for batch workloads, requests (default: the workload's own)",
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="R", help="measured rounds")
    parser.add_argument("--seed", type=int, default=0, help="seed of the prompts")
    parser.add_argument("--save", type=Path, metavar="FILE.json", help="write every sample")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the swimlanes to an .html or .svg file"
    )


def run_compare(args: argparse.Namespace) -> int:
    """Run the command; return 1 if a worker or a request failed."""
    check(args)
    require_folders(args.trace)
    baseline = Side.parse(args.baseline, extra=args.baseline_arg)
    candidate = Side.parse(args.candidate, sets=args.sets, extra=args.candidate_arg)
    workload = build(args.workload, longs=args.longs, seed=args.seed)
    plan = ComparisonPlan(loadable(args.model), workload, args.rounds)
    return run_measurement(partial(compare, baseline, candidate, plan, trace=args.trace), args)


def run_measurement(
    measure: Callable[[ProgressReporter], Coroutine[Any, Any, Comparison]], args: argparse.Namespace
) -> int:
    """Measure, print and save the result; return 1 if a server or a request failed."""
    console = Output()
    try:
        with ProgressReporter(console) as reporter:
            result = asyncio.run(measure(reporter))
    except WorkerError as error:
        print(f"vllm-sched: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("vllm-sched: interrupted; the workers have been stopped", file=sys.stderr)
        return INTERRUPTED
    _print_result(result, console)
    console.save(args.save, result.save)
    console.save(args.plot, partial(swimlane.write, result), "drew")
    return int(result.failed)


def check(args: argparse.Namespace) -> None:
    for option in ("longs", "rounds"):
        if (value := getattr(args, option)) is not None and value < 1:
            raise UsageError(
                f"--{option} {value}: must be at least 1; leave it out for the default"
            )
    if args.plot:
        swimlane.check_suffix(args.plot)
    require_folders(args.save, args.plot)


def _print_result(result: Comparison, console: Output) -> None:
    console.print_table(result.table())
    if warning := result.warning():
        console.print_text(warning, "yellow")
    failed = [
        (contender.role, record) for contender in result.contenders for record in contender.failed
    ]
    print_errors([f"{role}: {record.klass}: {record.error}" for role, record in failed], console)
