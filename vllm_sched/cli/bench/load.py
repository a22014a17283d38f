"""Options, progress and Ctrl-C handling for `bench` and `sweep`."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from vllm_sched.bench.client.endpoint import CHAT, Endpoint, EndpointOptions, probe_endpoint
from vllm_sched.bench.client.player import TIMEOUT_S, PlayedRun, RunProgress
from vllm_sched.bench.client.wire import COMPLETIONS
from vllm_sched.bench.results.outcome import Outcome
from vllm_sched.bench.results.result import BenchResult
from vllm_sched.bench.traffic.catalogue import FORMS, NAMES, SESSION_NAMES, find
from vllm_sched.bench.traffic.schedule import Schedule
from vllm_sched.bench.traffic.traces import BLOCK_TOKENS
from vllm_sched.cli.output import Output, require_folders, require_place
from vllm_sched.cli.progress_bar import ProgressLines, progress
from vllm_sched.errors import UsageError

WORKLOAD_HELP = f"{', '.join((*NAMES, *SESSION_NAMES))}; {FORMS} (default: %(default)s)"
T = TypeVar("T")
KEY_VARIABLE = "OPENAI_API_KEY"
REFRESH_S = 0.5
NOTE_AFTER_S = 1.0


def add_endpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", required=True, metavar="URL", help="URL of a worker or a router")
    parser.add_argument("--model", default="", help="default: the first model of the endpoint")
    parser.add_argument(
        "--endpoint",
        default=COMPLETIONS,
        choices=(COMPLETIONS, CHAT),
        help="the API (default: %(default)s)",
    )
    parser.add_argument(
        "--api-key", default="", metavar="KEY", help=f"default: the environment's {KEY_VARIABLE}"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=TIMEOUT_S,
        metavar="SECONDS",
        help="a request fails if it takes longer (default: %(default)g)",
    )
    parser.add_argument(
        "--no-ignore-eos",
        dest="ignore_eos",
        action="store_false",
        help="let the model end a response before its planned length",
    )
    parser.add_argument(
        "--prompt-salt",
        metavar="TEXT",
        help="use the prompts of an earlier run (default: new prompts, which are in no prefix "
        "cache)",
    )


def add_workload(parser: argparse.ArgumentParser) -> argparse._MutuallyExclusiveGroup:
    """Add the options of the workload; return the group of load options."""
    parser.add_argument("--workload", default="azure-conv", metavar="NAME|FILE", help=WORKLOAD_HELP)
    loop = parser.add_mutually_exclusive_group()
    loop.add_argument(
        "--request-rate",
        type=float,
        metavar="R",
        help="requests, or new sessions, per second (default: the rate or the times of the "
        "workload)",
    )
    loop.add_argument(
        "--concurrency",
        type=int,
        metavar="C",
        help="closed loop: number of concurrent requests, or sessions",
    )
    parser.add_argument(
        "--burstiness",
        type=float,
        metavar="B",
        help=(
            "burstiness of the gaps between requests: 1 is Poisson, less is burstier (default: 1, "
            "or the workload's own with its own rate)"
        ),
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of lengths and times")
    return loop


def schedule_of(args: argparse.Namespace, *, insist: bool = False) -> Schedule:
    """Return the schedule of the options; with `insist`, the workload must have its own times."""
    source = find(args.workload, block_tokens=args.block_tokens, sessions=True)
    if insist and not source.timed:
        raise UsageError(
            f"--trace: {source.name} has no times of its own; give a --request-rate or a FILE.jsonl"
        )
    schedule = Schedule(
        source=source,
        seed=args.seed,
        rate=args.request_rate,
        burstiness=args.burstiness,
        concurrency=args.concurrency,
        **traffic_of(args),
    )
    if schedule.concurrency is None and not schedule.timed:
        schedule.arrivals()  # raises for invalid values before the run starts
    return schedule


def requests_of(schedule: Schedule) -> int | None:
    """Return the number of requests; None for sessions, which have any number of turns."""
    counts = [count for count in (schedule.count, schedule.source.count) if count is not None]
    return None if schedule.source.has_sessions else min(counts, default=None)


def add_traffic(
    parser: argparse.ArgumentParser, *, lasts: str = "60, with sessions 600, or the trace"
) -> None:
    parser.add_argument("--duration", type=float, metavar="SECONDS", help=f"default: {lasts}")
    parser.add_argument("--num-requests", type=int, metavar="N", help="requests, or sessions")
    parser.add_argument(
        "--scale", type=float, default=1.0, metavar="F", help="factor for all lengths, such as 0.1"
    )
    parser.add_argument(
        "--tenants", type=int, default=0, metavar="N", help="number of users; the first sends most"
    )
    parser.add_argument(
        "--prefix-hit",
        type=float,
        metavar="SHARE",
        help="share of prompt tokens in a prefix of an earlier request (default: the workload's)",
    )
    add_block_tokens(parser)
    add_goodput(parser)


def add_goodput(parser: argparse.ArgumentParser, *, required: bool = False) -> None:
    parser.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        required=required,
        metavar="NAME:MS",
        help="targets: ttft, tpot, itl (the longest gap) and e2el, in milliseconds",
    )


def add_block_tokens(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--block-tokens",
        type=int,
        default=BLOCK_TOKENS,
        metavar="N",
        help="tokens per entry of a trace's hash_ids (default: %(default)s)",
    )


def traffic_of(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "duration_s": args.duration,
        "count": args.num_requests,
        "scale": args.scale,
        "tenants": args.tenants,
        "prefix_hit": args.prefix_hit,
    }


def salt_of(args: argparse.Namespace) -> str:
    return args.prompt_salt if args.prompt_salt is not None else os.urandom(4).hex()


def endpoint_options(args: argparse.Namespace, *, explain: bool = False) -> EndpointOptions:
    if not args.timeout > 0:
        raise UsageError(f"--timeout {args.timeout:g}: must be more than 0 seconds")
    # A key read from a file often ends in a carriage return, which is invalid in a header.
    key = (args.api_key or os.environ.get(KEY_VARIABLE, "")).strip()
    return EndpointOptions(args.url, args.model, args.endpoint, key, args.ignore_eos, explain)


def check_outputs(save: Path | None, plot: Path | None) -> None:
    """Check the output paths before a measurement of minutes starts."""
    require_folders(save)
    if plot:
        require_place(plot)
        from vllm_sched.bench.plots import check_available

        check_available()


def require_requests(result: BenchResult) -> None:
    if result.outcomes:
        return
    schedule = result.schedule
    if schedule.concurrency is not None and (end := schedule.ends_after_s) is not None:
        raise UsageError(f"--duration {end:g}: ended before a request was sent; make it longer")
    raise UsageError(f"{schedule.source.name}: no request was sent, because none is left")


def require_ended(outcomes: Sequence[Outcome]) -> None:
    """Raise KeyboardInterrupt if a run was stopped before any request ended: keep old results."""
    if all(outcome.interrupted for outcome in outcomes):
        raise KeyboardInterrupt


def save_and_draw(result: BenchResult, args: argparse.Namespace, console: Output) -> None:
    console.save(args.save, result.save)
    if args.plot:
        from vllm_sched.bench.plots import draw_run

        console.save(args.plot, partial(draw_run, result), "drew")


def check_endpoint(command: str, options: EndpointOptions) -> Endpoint:
    """Return the endpoint; if it takes long to answer, print what is waited for."""

    async def check() -> Endpoint:
        text = f"waiting for {options.url}: it must list its models, then answer a small request"
        loop, lines = asyncio.get_running_loop(), ProgressLines(command)
        note = loop.call_later(NOTE_AFTER_S, lines.print_line, text)
        try:
            return await probe_endpoint(options)
        finally:
            note.cancel()

    return asyncio.run(check())


def run_interruptibly(work: Callable[[asyncio.Event], Awaitable[T]]) -> T:
    """Run with an event that Ctrl-C sets, to show partial results; a second Ctrl-C exits."""

    async def run() -> T:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()

        def interrupt() -> None:
            stop.set()
            loop.remove_signal_handler(signal.SIGINT)

        loop.add_signal_handler(signal.SIGINT, interrupt)
        return await work(stop)

    return uvloop.run(run())


async def play_with_progress(
    console: Output,
    command: str,
    label: str,
    schedule: Schedule,
    play: Callable[[RunProgress], Awaitable[PlayedRun]],
) -> PlayedRun:
    """Play a schedule and show progress: a bar on a terminal, otherwise lines."""
    run = RunProgress()
    end = schedule.ends_after_s
    total = end or requests_of(schedule)
    more = ""
    if schedule.timed and total is not None and schedule.count is None and end is None:
        more = f", requests: {total:,} in {total / schedule.source.rate:,.6g} s"
    # Refreshed rarely, because this process also times the tokens.
    with progress(console, command, label, total, more=more, refreshes=False) as show:

        def report(*, last: bool = False) -> None:
            seconds, text = time.perf_counter() - run.began, _progress_text(run)
            show(seconds if end else run.ended, text, line=f"{seconds:,.0f} s, {text}", last=last)

        async def report_regularly() -> None:
            while True:
                report()
                await asyncio.sleep(REFRESH_S)

        showing = asyncio.create_task(report_regularly())
        try:
            played = await play(run)
        finally:
            showing.cancel()
        report(last=True)
    return played


def _progress_text(run: RunProgress) -> str:
    failed = f", {run.failed:,} failed" if run.failed else ""
    return f"{run.done:,} done, {run.in_flight:,} in flight{failed}"
