"""Run each policy's trial on real workers and compare it with its targets.

    python -m benchmarks.policies rotation chunk_budget lanes deferred_prefill --rounds 3

All workers of a trial run at once and take turns. `deferred_prefill` has eight: 18 GB of memory.
Nothing else should run.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence

from rich.console import Console

from benchmarks.policies.promise import table
from benchmarks.policies.trials import TRIALS
from vllm_sched.bench.compare.compare import ProgressReporter
from vllm_sched.errors import VllmSchedError
from vllm_sched.workers.tiny_model import tiny_model


def main(argv: Sequence[str] | None = None) -> int:
    """Print all figures; return 1 if a request failed."""
    args = _parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 180)
    model = args.model or str(tiny_model())
    failed = False
    for name in args.trials:
        console.print(f"{name}, load average {os.getloadavg()[0]:.1f} at the start", style="bold")
        try:
            with ProgressReporter(console) as reporter:
                result = asyncio.run(TRIALS[name](model, args.rounds, args.seed, reporter))
        except VllmSchedError as error:
            console.print(f"{name}: {error}", style="red", markup=False, highlight=False)
            failed = True
            continue
        for shown in (result.table, table(name, result.promises)):
            console.print(shown)
        if result.warning:
            console.print(result.warning, style="yellow", highlight=False)
        failed = failed or result.failed
    return int(failed)


def _parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="policies", description="compare policies with their targets"
    )
    parser.add_argument(
        "trials", nargs="*", metavar="TRIAL", help=f"{', '.join(TRIALS)}; default: all"
    )
    parser.add_argument("--model", help="a model vLLM can serve (default: a tiny random Llama)")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds")
    parser.add_argument("--seed", type=int, default=0, help="fixes the prompts")
    args = parser.parse_args(argv)
    args.trials = args.trials or list(TRIALS)
    if unknown := [name for name in args.trials if name not in TRIALS]:
        parser.error(f"{unknown[0]!r} is no trial; use one of: {', '.join(TRIALS)}")
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: at least 1 is needed")
    return args


if __name__ == "__main__":
    sys.exit(main())
