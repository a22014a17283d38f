"""`vllm-sched plan`: find the best fleet for a workload and a number of GPUs, or for a rate."""

from __future__ import annotations

import argparse
import logging
import shlex
from functools import partial
from pathlib import Path
from typing import Final

from vllm_sched.bench.plots.chart import check_chart, draw_chart
from vllm_sched.bench.results import goodput
from vllm_sched.bench.traffic.catalogue import find
from vllm_sched.bench.traffic.schedule import MAX_NUMBER
from vllm_sched.cli.bench.load import WORKLOAD_HELP, add_block_tokens, add_goodput
from vllm_sched.cli.exits import INTERRUPTED
from vllm_sched.cli.model.plan_report import chart_of, show, simulate_options
from vllm_sched.cli.model.simulate import add_link
from vllm_sched.cli.output import Output, require_folders
from vllm_sched.cli.progress_bar import progress
from vllm_sched.cost import profiles
from vllm_sched.errors import UsageError
from vllm_sched.sim.fleet.models import AssumedWorker
from vllm_sched.sim.planning import plan as planning
from vllm_sched.sim.planning.fleet_file import write
from vllm_sched.sim.planning.fleet_shapes import POLICIES
from vllm_sched.sim.planning.question import DRAWS, FEW_DRAWS, QUICK_EFFORT, PlanQuestion

MAX_GPUS: Final = 1_000_000


def describe(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "plan",
        help="find the best fleet for a workload and a number of GPUs, or for a rate",
        description=(
            "Search by simulation for the pools, sizes, thresholds and policies with which a "
            "number of GPUs serves the most requests in time, or for the fewest GPUs that serve a "
            "rate."
        ),
        allow_abbrev=False,
    )
    add = command.add_argument
    add("--workload", default="azure-conv", metavar="NAME|FILE", help=WORKLOAD_HELP)
    size = command.add_mutually_exclusive_group(required=True)
    size.add_argument("--gpus", type=int, metavar="N", help="number of GPUs")
    size.add_argument(
        "--min-gpus", action="store_true", help="find the fewest GPUs that serve --request-rate"
    )
    add(
        "--profile",
        nargs="+",
        required=True,
        metavar="NAME|FILE",
        help=f"cost models of workers: {profiles.USAGE}, or files of `calibrate`; of several the "
        "best is taken; model=M,system=S tries each tp and dtype, and different tp for prefill and "
        "decode",
    )
    add_goodput(command, required=True)
    add("--request-rate", type=float, metavar="R", help="required requests per second")
    add("--burstiness", type=float, metavar="B", help="of the gaps between requests (default: 1)")
    add("--scale", type=float, default=1.0, metavar="F", help="factor for all lengths, such as 0.1")
    add("--prefix-hit", type=float, metavar="SHARE", help="share of prompt tokens sent before")
    add_block_tokens(command)
    add_link(command)
    add(
        "--policies",
        nargs="+",
        default=list(POLICIES),
        choices=POLICIES,
        metavar="NAME",
        help=f"policies to try: {', '.join(POLICIES)} (default: all)",
    )
    add("--exact", action="store_true", help="check the best fleets with vLLM's own schedulers")
    add(
        "--quick",
        action="store_true",
        help="use a third of the requests and half the draws: faster, less precise",
    )
    add("--seed", type=int, default=0, help="seed of lengths and times")
    add("--save", type=Path, metavar="FLEET.yaml", help="write the best fleet")
    add("--plot", type=Path, metavar="FILE.svg", help="draw the rate by number of GPUs")
    add("--model", default="", metavar="NAME", help="the model name in the fleet file")
    command.set_defaults(func=run_plan)


def run_plan(args: argparse.Namespace) -> int:
    """Run the command; Ctrl-C shows and saves the best fleet so far."""
    _check(args)
    assumed = AssumedWorker(gb_per_s=args.bandwidth, mixed_ms=args.mixed_ms)
    machines = planning.machines_of(args.profile, assumed)
    question = PlanQuestion(
        source=find(args.workload, block_tokens=args.block_tokens),
        machine=machines[0],
        targets=goodput.parse(args.goodput),
        burstiness=args.burstiness,
        scale=args.scale,
        prefix_hit=args.prefix_hit,
        seed=args.seed,
        policies=tuple(name for name in POLICIES if name in args.policies),
        effort=QUICK_EFFORT if args.quick else 1.0,
        draws=FEW_DRAWS if args.quick else DRAWS,
    )
    console = Output()
    label = f"planning for {question.source.name}"
    with progress(console, "plan", label, 1.0) as show_progress:

        def tell(what: str, share: float) -> None:
            line = f"{share:.0%} done; {what}" if share < 1 else what
            show_progress(share, what, line=line, last=share >= 1)

        plan = planning.plan(
            question,
            args.gpus,
            machines=machines,
            rate=args.request_rate or 0.0,
            exact=args.exact,
            tell=tell,
        )
    show(console, plan, args)
    command = shlex.join(["vllm-sched", *args.argv])
    traffic = shlex.join(simulate_options(args, plan, exact=plan.is_exact))
    fleet = partial(write, plan, model=args.model, command=command, traffic=traffic)
    console.save(args.save, fleet)
    console.save(args.plot, partial(draw_chart, chart_of(plan)), "drew")
    return 0 if plan.stopped_at is None else INTERRUPTED


def _check(args: argparse.Namespace) -> None:
    require_folders(args.save, args.plot)
    if args.plot:
        check_chart(args.plot)
    if args.min_gpus and args.request_rate is None:
        raise UsageError("--min-gpus: give the rate to serve, as in --request-rate 20")
    if args.gpus is not None and abs(args.gpus) > MAX_GPUS:
        raise UsageError(f"--gpus: must be at most {MAX_GPUS:,}; give a smaller number")
    for name in ("gpus", "bandwidth", "scale", "request_rate", "burstiness", "mixed_ms"):
        value = getattr(args, name)
        minimum = 0.0 if name == "mixed_ms" else 1e-12
        if value is not None and not minimum <= value <= MAX_NUMBER:
            raise UsageError(
                f"--{name.replace('_', '-')} {value:g}: must be above 0 and at most {MAX_NUMBER:g}"
            )
    if args.exact:
        # vLLM's warnings on this machine do not apply to the simulated one.
        logging.getLogger("vllm").setLevel(logging.ERROR)
