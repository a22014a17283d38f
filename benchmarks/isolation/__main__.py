"""Measure what hand-overs save running responses: real workers, NIXL over CPU buffers.

    python -m benchmarks.isolation --rounds 5 --save out/isolation.json
    python -m benchmarks.isolation --rounds 0 --identical 100
    python -m benchmarks.isolation --above 1000 --decode-args=--max-num-batched-tokens=256

Two general workers under least_loaded, and a prefill and a decode worker, take turns on the same
two processors: four streams run while 12,000-token and short prompts arrive. Gaps, times to first
token and the router's records of its transfers are compared with the targets.

`--identical` compares the tokens of the same prompts by every route: one worker, two, a short and a
long one, and handed over. 11 GB of memory; nothing else should run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.isolation import identical, stage, transfers, verdict
from benchmarks.policies import promise
from vllm_sched.bench.compare.compare import (
    Comparison,
    ComparisonPlan,
    ProgressReporter,
    measure,
    running,
)
from vllm_sched.errors import VllmSchedError
from vllm_sched.workers.launch import DEFAULT, Side

LONE_SAMPLES = 2
MAX_LOAD_AVERAGE = 1.0  # above it figures are unreliable


def main(argv: Sequence[str] | None = None) -> int:
    """Print all figures; return 1 if a request failed, or got other tokens or another route."""
    args = _parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 150)
    load_average = os.getloadavg()[0]
    try:
        with (
            tempfile.TemporaryDirectory(prefix="isolation-") as folder,
            ProgressReporter(console) as reporter,
        ):
            measured, checks = asyncio.run(_run(args, Path(folder), reporter))
    except VllmSchedError as error:
        console.print(f"isolation: {error}", style="red", markup=False, highlight=False)
        return 1
    failed = False
    if measured is not None:
        result, handovers = measured
        console.print(result.table())
        console.print(verdict.table(result))
        promises = handovers.promises
        console.print(promise.table("transfers, by the router's records", promises))
        busy = load_average > MAX_LOAD_AVERAGE
        for warning in (result.warning(), f"load average {load_average:.1f} at the start" * busy):
            if warning:
                console.print(warning, style="yellow", highlight=False)
        if args.save:
            verdicts = [*verdict.to_json(verdict.verdicts(result)), *promise.to_json(promises)]
            content = {**result.to_json(), "verdicts": verdicts}
            args.save.write_text(json.dumps(content, indent=1) + "\n")
        failed = result.failed or handovers.missing
    for check in checks:
        console.print(check.summary, style="red" if check.wrong else None, highlight=False)
    return int(failed or any(check.wrong for check in checks))


async def _run(
    args: argparse.Namespace, folder: Path, reporter: ProgressReporter
) -> tuple[tuple[Comparison, transfers.Transfers] | None, list[identical.PassResult]]:
    config = stage.fleet(_handover_options(args))
    sides = stage.sides(config, folder, args.above)
    workload = stage.workload(
        longs=args.longs,
        every_s=args.every,
        shorts_per_long=args.shorts,
        decoded=args.decoded,
        seed=args.seed,
    )
    plan = ComparisonPlan(config.model, workload, args.rounds, LONE_SAMPLES)
    measured: tuple[Comparison, transfers.Transfers] | None = None
    checks: list[identical.PassResult] = []
    async with (
        running(stage.workers(config, folder), reporter),
        running([side.worker for side in sides], reporter),
    ):
        if args.rounds:
            router = sides[1].worker
            before = await transfers.wait_connected(router.url)
            await measure(sides, plan, reporter)
            admin = stage.admin_url(router)
            token_bytes = stage.token_bytes()
            after = await transfers.fetch(router.url, admin, before, plan, token_bytes)
            measured = Comparison(plan, sides), after
        if args.identical:
            sized, handed = stage.routers(config, folder)
            async with running([sized, handed], reporter):
                routes = stage.routes(config, sides[0].worker, sized, handed)
                prompts = identical.prompts(args.identical, args.seed)
                checks = await identical.compare(routes, prompts, config.model, reporter.step)
    return measured, checks


def _handover_options(args: argparse.Namespace) -> stage.HandoverOptions:
    policies = Side.parse(args.decode_policy, sets=args.set).settings
    return stage.HandoverOptions(
        tuple(shlex.split(args.prefill_args)),
        tuple(shlex.split(args.decode_args)),
        policies,
        args.mode,
    )


def _parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="isolation", description="measure what hand-overs save running responses"
    )
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds; 0: no timing")
    parser.add_argument("--identical", type=int, default=0, metavar="N", help="prompts to compare")
    parser.add_argument("--longs", type=int, default=4, help="12,000-token prompts per round")
    parser.add_argument("--every", type=float, default=4.0, metavar="S", help="seconds between two")
    parser.add_argument("--shorts", type=int, default=4, help="100-token prompts for each")
    parser.add_argument("--decoded", type=int, default=3500, help="output tokens per stream")
    parser.add_argument(
        "--above",
        type=lambda text: text if text == "auto" else int(text),
        default="auto",
        metavar="N",
        help="routing.disaggregate_above: tokens, or auto (the default)",
    )
    for role in ("prefill", "decode"):
        what = f"more vLLM flags for the {role} worker: --{role}-args=--flag=value"
        parser.add_argument(f"--{role}-args", default="", metavar="FLAGS", help=what)
    parser.add_argument(
        "--decode-policy", default=DEFAULT, metavar="NAME[+NAME]", help="of the decode worker"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="POLICY.KEY=VALUE", help="its settings"
    )
    parser.add_argument(
        "--mode", choices=("pull", "push"), default="pull", help="D pulls or P pushes the KV"
    )
    parser.add_argument("--seed", type=int, default=0, help="fixes the prompts")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write all samples as JSON")
    args = parser.parse_args(argv)
    if args.rounds < 0 or args.identical < 0:
        parser.error("--rounds and --identical: must not be negative")
    if not args.rounds and not args.identical:
        parser.error("--rounds 0 without --identical: nothing to do")
    if args.longs < 1 or args.every <= 0 or args.shorts < 1 or args.decoded < 1:
        parser.error("--longs, --every, --shorts, --decoded: must be positive")
    if args.save and not args.save.parent.is_dir():
        parser.error(f"--save {args.save}: there is no folder {args.save.parent}; make it first")
    return args


if __name__ == "__main__":
    sys.exit(main())
