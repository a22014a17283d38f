"""What a hand-over spares those that are being answered: real workers, NIXL over CPU buffers.

    python -m benchmarks.isolation --rounds 5 --save out/isolation.json
    python -m benchmarks.isolation --rounds 0 --identical 100
    python -m benchmarks.isolation --above 1000 --decode-args=--max-num-batched-tokens=256

Two general workers under least_loaded, and one prefill and one decode worker, on the same two
processors, in turns: four streams run while 12,000-token prompts and short ones arrive. Each line
of what was promised is judged: gaps, times to first token, and what the router itself tells of its
transfers and of what it predicted. Then the same prompts by every route, token by token: one
worker, two, a short and a long one, and all handed over, which is counted. 11 GB of memory; nothing
else should run.
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

from benchmarks.isolation import identical, moved, stage, verdict
from benchmarks.policies import promise
from vllm_sched.bench.compare import report
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
BUSY = 1.0  # load average above which the figures are worth little


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, judge and print; 1 when a request failed, was answered otherwise or another way."""
    args = _arguments(argv)
    console = Console(width=None if sys.stdout.isatty() else 150)
    busy = os.getloadavg()[0]
    try:
        with (
            tempfile.TemporaryDirectory(prefix="isolation-") as folder,
            ProgressReporter(console) as narrator,
        ):
            measured, found = asyncio.run(_run(args, Path(folder), narrator))
    except VllmSchedError as error:
        console.print(f"isolation: {error}", style="red", markup=False, highlight=False)
        return 1
    failed = False
    if measured is not None:
        result, transfers = measured
        labels = [each.label for each in result.sides]
        console.print(
            report.table(result.figures, labels, [len(each.failed) for each in result.sides])
        )
        console.print(verdict.table(result))
        told = transfers.promises
        console.print(promise.table("of its transfers the router says", told))
        for warning in (result.warning(), f"load average {busy:.1f} at the start" * (busy > BUSY)):
            if warning:
                console.print(warning, style="yellow", highlight=False)
        if args.save:
            verdicts = [*verdict.to_json(verdict.verdicts(result)), *promise.to_json(told)]
            whole = {**result.to_json(), "verdicts": verdicts}
            args.save.write_text(json.dumps(whole, indent=1) + "\n")
        failed = result.failed or transfers.missing
    for each in found:
        console.print(each.said, style="red" if each.wrong else None, highlight=False)
    return int(failed or any(each.wrong for each in found))


async def _run(
    args: argparse.Namespace, folder: Path, narrator: ProgressReporter
) -> tuple[tuple[Comparison, moved.Moved] | None, list[identical.Found]]:
    config = stage.fleet(_trial(args))
    sides = stage.sides(config, folder, args.above)
    workload = stage.workload(
        longs=args.longs,
        every_s=args.every,
        shorts_per_long=args.shorts,
        decoded=args.decoded,
        seed=args.seed,
    )
    plan = ComparisonPlan(config.model, workload, args.rounds, LONE_SAMPLES)
    measured: tuple[Comparison, moved.Moved] | None = None
    found: list[identical.Found] = []
    async with (
        running(stage.started(config, folder), narrator),
        running([side.worker for side in sides], narrator),
    ):
        if args.rounds:
            router = sides[1].worker
            before = await moved.connected(router.url)
            await measure(sides, plan, narrator)
            admin = stage.admin_url(router)
            transfers = await moved.told(router.url, admin, before, plan, stage.token_bytes())
            measured = Comparison(plan, *sides), transfers
        if args.identical:
            sized, handed = stage.routers(config, folder)
            async with running([sized, handed], narrator):
                routes = stage.routes(config, sides[0].worker, sized, handed)
                asked = identical.prompts(args.identical, args.seed)
                found = await identical.differing(routes, asked, config.model, narrator.step)
    return measured, found


def _trial(args: argparse.Namespace) -> stage.Trial:
    policies = Side.parse(args.decode_policy, sets=args.set).settings
    return stage.Trial(
        tuple(shlex.split(args.prefill_args)),
        tuple(shlex.split(args.decode_args)),
        policies,
        args.mode,
    )


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="isolation", description="what a hand-over spares those that are being answered"
    )
    parser.add_argument("--rounds", type=int, default=3, help="that count; 0: no timing")
    parser.add_argument("--identical", type=int, default=0, metavar="N", help="prompts compared")
    parser.add_argument("--longs", type=int, default=4, help="12,000-token prompts a round")
    parser.add_argument("--every", type=float, default=4.0, metavar="S", help="one in so many s")
    parser.add_argument("--shorts", type=int, default=4, help="prompts of 100 tokens for each")
    parser.add_argument("--decoded", type=int, default=3500, help="tokens that a stream writes")
    parser.add_argument(
        "--above",
        type=lambda text: text if text == "auto" else int(text),
        default="auto",
        metavar="N",
        help="routing.disaggregate_above: tokens, or auto as by default",
    )
    for role in ("prefill", "decode"):
        what = f"more of vLLM's flags for the {role} worker: --{role}-args=--flag=value"
        parser.add_argument(f"--{role}-args", default="", metavar="FLAGS", help=what)
    parser.add_argument(
        "--decode-policy", default=DEFAULT, metavar="NAME[+NAME]", help="the decode worker's"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="POLICY.KEY=VALUE", help="and its settings"
    )
    parser.add_argument(
        "--mode", choices=("pull", "push"), default="pull", help="who moves the bytes, P or D"
    )
    parser.add_argument("--seed", type=int, default=0, help="fixes the prompts")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write every sample as JSON")
    args = parser.parse_args(argv)
    if args.rounds < 0 or args.identical < 0:
        parser.error("--rounds and --identical: less than 0 is nothing to do")
    if not args.rounds and not args.identical:
        parser.error("--rounds 0 without --identical: nothing to do")
    if args.longs < 1 or args.every <= 0 or args.shorts < 1 or args.decoded < 1:
        parser.error("--longs, --every, --shorts, --decoded: nobody would be disturbed")
    if args.save and not args.save.parent.is_dir():
        parser.error(f"--save {args.save}: there is no folder {args.save.parent}; make it first")
    return args


if __name__ == "__main__":
    sys.exit(main())
