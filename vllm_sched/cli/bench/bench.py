"""`vllm-sched bench`: play a workload against an endpoint and report the results."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from vllm_sched.bench.client.endpoint import CHAT, Endpoint
from vllm_sched.bench.client.player import PlayedRun, play
from vllm_sched.bench.results import goodput
from vllm_sched.bench.results.result import BenchResult
from vllm_sched.bench.results.sessions import session_table
from vllm_sched.bench.results.summary import table
from vllm_sched.bench.traffic.schedule import Schedule
from vllm_sched.cli.bench.load import (
    add_endpoint,
    add_traffic,
    add_workload,
    check_endpoint,
    check_outputs,
    endpoint_options,
    play_with_progress,
    require_ended,
    require_requests,
    run_interruptibly,
    salt_of,
    save_and_draw,
    schedule_of,
)
from vllm_sched.cli.exits import INTERRUPTED
from vllm_sched.cli.output import Output

ERRORS_SHOWN = 5


def describe(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="play a workload against any OpenAI endpoint",
        description=(
            "Send requests at the times of a workload without waiting for earlier responses (an "
            "open loop). Latencies count from these times. Prompts are random words. In a session, "
            "a turn follows the last answer and repeats the conversation."
        ),
    )
    add_endpoint(parser)
    add_workload(parser).add_argument(
        "--trace", action="store_true", help="fail unless the workload has times of its own"
    )
    add_traffic(parser)
    parser.add_argument("--save", type=Path, metavar="FILE.json", help="write every sample")
    parser.add_argument(
        "--plot", type=Path, metavar="DIR", help="draw TTFT, ITL, tenants and routing decisions"
    )
    parser.set_defaults(func=run_bench)


def run_bench(args: argparse.Namespace) -> int:
    """Run the command; return 1 if a request failed."""
    targets = goodput.parse(args.goodput)
    schedule = schedule_of(args, insist=args.trace)
    check_outputs(args.save, args.plot)
    console = Output()
    salt = salt_of(args)
    endpoint = check_endpoint("bench", endpoint_options(args, explain=bool(args.plot)))
    label = f"{schedule.source.name} against {endpoint.model} at {endpoint.address}"
    played = run_interruptibly(
        lambda stop: play_with_progress(
            console,
            "bench",
            label,
            schedule,
            lambda progress: play(
                endpoint, schedule, salt=salt, timeout_s=args.timeout, progress=progress, stop=stop
            ),
        )
    )
    if played.interrupted:
        require_ended(played.outcomes)
    notes = {"prompt_salt": salt}
    result = as_result(played, endpoint, schedule, targets, notes)
    if not played.interrupted:
        require_requests(result)
    print_result(result, played, console)
    save_and_draw(result, args, console)
    if played.interrupted:
        return INTERRUPTED
    return int(any(outcome.error for outcome in played.outcomes))


def as_result(
    played: PlayedRun,
    endpoint: Endpoint,
    schedule: Schedule,
    targets: goodput.Targets,
    notes: Mapping[str, object],
) -> BenchResult:
    return BenchResult(
        schedule=schedule,
        targets=targets,
        outcomes=played.outcomes,
        duration=played.duration,
        backend="openai-chat" if endpoint.path == CHAT else "openai",
        model=endpoint.model,
        notes={
            "tokens_per_word": endpoint.measure.per_word,
            "max_model_len": endpoint.max_model_len,
            "client_busy": played.busy,
            "client_stall_s": played.stall,
            "client_late_p99_s": played.late_p99,
            "cut_requests": played.cut,
            "short_answers": played.short,
            **notes,
        },
        warnings=[*endpoint.doubts, *played.warnings(), *schedule.falls_short],
        sessions=played.sessions,
    )


def print_result(result: BenchResult, played: PlayedRun, console: Output) -> None:
    if played.interrupted:
        console.print_text("interrupted: partial results", "yellow")
    print_tables(result, console)
    console.print_text(
        f"{len(result.outcomes)} requests sent in {result.duration:.1f} s; the client sent 99 % of "
        f"them within {played.late_p99 * 1000:.0f} ms of their time, with {played.busy:.0%} of a "
        "CPU",
        "dim",
    )
    for warning in result.warnings:
        console.print_text(warning, "yellow")
    print_errors([outcome.error for outcome in result.outcomes if outcome.error], console)


def print_tables(result: BenchResult, console: Output) -> None:
    console.print_table(table(result.classes(), result.targets))
    if figures := result.session_figures():
        console.print_table(session_table(figures))


def print_errors(errors: Sequence[str], console: Output) -> None:
    kinds: dict[str, int] = {}
    for error in errors:
        kinds[error] = kinds.get(error, 0) + 1
    for error, count in sorted(kinds.items(), key=lambda item: -item[1])[:ERRORS_SHOWN]:
        console.print_text(f"{count} failed: {error}", "red")
    if len(kinds) > ERRORS_SHOWN:
        console.print(f"and {len(kinds) - ERRORS_SHOWN} other errors", style="red")
