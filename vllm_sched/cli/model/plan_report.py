"""What `vllm-sched plan` prints and draws."""

from __future__ import annotations

import argparse
import math
import shlex
from collections.abc import Iterator
from typing import Final

from rich.table import Table

from vllm_sched.bench.compare.report import format_count
from vllm_sched.bench.plots.chart import Chart, Series
from vllm_sched.bench.results.summary import milliseconds, plain_table
from vllm_sched.bench.traffic.sampled import Sampled
from vllm_sched.bench.traffic.traces import BLOCK_TOKENS
from vllm_sched.bench.traffic.types import TrafficSource
from vllm_sched.cli.model.simulate import EXACT, FLUID
from vllm_sched.cli.output import Output
from vllm_sched.cost.profiles import QUANTIZED
from vllm_sched.sim.planning.plan import FleetPlan
from vllm_sched.sim.planning.search import EQUAL_RATE_SHARE

EXACT_REQUESTS: Final = 2000  # real schedulers take some minutes for more
UNEVEN_TRACE_RATIO: Final = 1.5  # how much heavier a part of a trace must be for a warning
MAX_SHOWN: Final = 10  # machines
TIGHT: Final = (0, 1, 0, 0)  # padding
# How the judging draws relate to the draws of the search.
NEW_DRAWS_NOTE: Final = "none of them used in the search"
TRACE_DRAWS_NOTE: Final = (
    "which differ only in their gaps and in where they begin in the trace; they share lines with "
    "each other and with the search"
)


def show(console: Output, plan: FleetPlan, args: argparse.Namespace) -> None:
    if plan.stopped_at is not None:
        console.print_text(
            f"interrupted at {plan.stopped_at:.0%}: these are the best fleets so far; others may "
            "serve more",
            "yellow",
        )
    for line in _head(plan):
        console.print_text(line)
    if plan.candidates:
        console.print_table(_machines(plan))
    for line, style in _of_trace(plan.question.source):
        console.print_text(line, style)
    for at, served in enumerate(plan.ranking):
        line = f"{_place(at) + ':':<11}{served.shape}"
        console.print_text(line, "" if at else "bold")
    console.print_table(_fleets(plan))
    rates = [served.rate for served in plan.ranking]
    if rates != sorted(rates, reverse=True):
        console.print_text(
            f"rates within {EQUAL_RATE_SHARE:.0%} count as equal: the simpler fleet comes first",
            "dim",
        )
    if left := plan.gpus - plan.gpus_of(plan.best):
        worker_gpus = plan.question.machine.gpus
        console.print_text(
            f"{left} of {plan.gpus} GPUs are unused: a worker takes {worker_gpus}", "yellow"
        )
    for line in (*_neighbours(plan), *_required(plan, args.request_rate), *_exact_checks(plan)):
        console.print_text(line, "")
    console.print_table(_frontier(plan))
    console.print_table(_capacity(plan))
    machine = plan.question.machine
    if machine.assumed:
        taken = ", ".join(f"{name} {getattr(machine, name):,}" for name in machine.assumed)
        console.print_text(
            f"{machine.profile} does not contain these sizes; assumed: {taken}; add them "
            "to the file",
            "yellow",
        )
    for line in (*_judged_by(plan), *_check_by_hand(plan, args)):
        console.print_text(line)


def _head(plan: FleetPlan) -> Iterator[str]:
    question = plan.question
    scope = "" if question.prefill_machine else "all of one profile: "
    yield (
        f"{question.source.name}, prompts of {plan.prompt:,.0f} and outputs of "
        f"{plan.output:,.0f} tokens on average, on {format_count(plan.gpus, 'GPU')} as "
        f"{format_count(plan.best.shape.workers, 'worker')}, {scope}{question.profiles}"
    )
    if QUANTIZED in question.machine.flags:
        yield (
            "fp8 weights change a model's responses a little: check their quality, or give "
            "dtype=bf16"
        )


def _machines(plan: FleetPlan) -> Table:
    """Return the machines that were compared, by their coarse results."""
    result = "GPUs" if plan.by_gpus else "req./s"
    layout = plain_table(["machines, compared coarsely"], [result], long_texts=True, padding=TIGHT)
    order = sorted(
        plan.candidates,
        key=lambda candidate: (
            bool(candidate.why),
            candidate.result if plan.by_gpus else -candidate.result,
        ),
    )
    for candidate in order[:MAX_SHOWN]:
        ours = candidate.question.machines == plan.question.machines
        result = "-" if candidate.why else f"{candidate.result:.3g}"
        layout.add_row(candidate.question.profiles, result, style="bold" if ours else "")
    return layout


def _frontier(plan: FleetPlan) -> Table:
    layout = plain_table((), ("GPUs", "req./s", "per GPU"), padding=TIGHT)
    layout.add_column("fleet")
    for gpus, served in plan.frontier:
        layout.add_row(
            str(gpus), f"{served.rate:.3g}", f"{served.rate / gpus:.3g}", str(served.shape),
            style="bold" if served is plan.best else "",
        )  # fmt: skip
    return layout


def chart_of(plan: FleetPlan) -> Chart:
    points = [(float(gpus), served.rate) for gpus, served in plan.frontier]
    return Chart(
        title="Requests in time by number of GPUs",
        x="GPUs",
        y="requests/s in time",
        series=[
            Series(plan.question.profiles, [(0.0, 0.0), *points]),
            Series("the planned fleet", [(float(plan.gpus), plan.best.rate)], dots=True),
        ],
        subtitle=f"{plan.question.source.name}; {plan.best.shape}",
    )


def _judged_by(plan: FleetPlan) -> Iterator[str]:
    """Yield lines on how the fleets were judged."""
    question = plan.question
    if not plan.is_exact:
        of_trace = isinstance(question.source, Sampled)
        seen = TRACE_DRAWS_NOTE if of_trace else NEW_DRAWS_NOTE
        yield (
            f"each rate is the highest with {question.share:.0%} in time in each of "
            f"{question.draws} draws of {plan.requests:,} requests, {seen}"
        )
        shown = [*plan.ranking, *(served for _, served in plan.frontier)]
        if any(len(served.shares) < question.draws for served in shown):
            yield "kinds behind the best, and other sizes, were judged by fewer runs"
        yield (
            f"a further draw{' of this trace' * of_trace} has the same share in time with a "
            f"probability of about {question.draws} in {question.draws + 1}"
            + ("; this does not cover another day's traffic" if of_trace else "")
        )
    yield (
        f"by {plan.runs} simulations with the fluid engine; figures of other "
        "simulators and of real machines differ, most of all near the limit: see "
        "docs/evaluation.md"
    )
    if plan.is_exact:
        yield (
            "order and rates are from vLLM's own schedulers (the exact engine), with one more "
            "draw; those for a worker more or fewer are plain, with the same correction"
        )


def _check_by_hand(plan: FleetPlan, args: argparse.Namespace) -> Iterator[str]:
    """Yield the command that checks the best fleet, unless it was checked."""
    if plan.is_exact:
        return
    fleet = args.save or "FLEET.yaml"
    command = ["vllm-sched", "simulate", str(fleet), *simulate_options(args, plan, exact=True)]
    saved = "" if args.save else " (--save FLEET.yaml writes it)"
    what = " and the trace's first lines" if isinstance(plan.question.source, Sampled) else ""
    scope = " for all fleets" if plan.exact else ""
    yield (
        f"vLLM's own schedulers were not used{scope}; to play the best fleet with "
        f"them{what}{saved}:"
    )
    yield f"    {shlex.join(command)}"


def _of_trace(source: TrafficSource) -> Iterator[tuple[str, str]]:
    """Yield lines on the part of a trace that was played; none for other workloads."""
    if not isinstance(source, Sampled):
        return
    yield (
        f"{source.held:,} of its {source.lines:,} lines, in stretches from all parts of the file; "
        "the gaps between requests are drawn (--burstiness), not those of the trace",
        "dim",
    )
    if source.heaviest >= UNEVEN_TRACE_RATIO:
        yield (
            f"the load of {source.name} varies: requests in the heaviest fifth of the file are "
            f"{source.heaviest:.2g} times the mean, and need that much more at the same rate; to "
            "be safe, plan for that part alone",
            "yellow",
        )


def _fleets(plan: FleetPlan) -> Table:
    drawn = any(served.shares for served in plan.ranking)
    in_time = "in time,\neach draw" if drawn else "in time"
    latencies = ("TTFT\np50 / p99", "TPOT\np50 / p99", "ITL\np99 / max")
    layout = plain_table([""], ("req./s", in_time, *latencies), padding=TIGHT)
    for at, served in enumerate(plan.ranking):
        figures, gaps = served.run.all, served.run.gaps
        layout.add_row(
            _place(at),
            f"{served.rate:.3g}",
            _spread(*served.spread),
            _pair(figures.ttft.quantile(0.5), figures.ttft.quantile(0.99)),
            _pair(figures.tpot.quantile(0.5), figures.tpot.quantile(0.99)),
            _pair(gaps.quantile(0.99), gaps.most),
            style="bold" if not at else "",
        )
    return layout


def _place(at: int) -> str:
    return ("best", "runner-up")[at] if at < 2 else "then"


def _spread(worst: float, best: float) -> str:
    """Return a range of shares, or a single share if both ends are equal."""
    low, high = _percent_rounded_down(worst), _percent_rounded_down(best)
    return high if low == high else f"{low.removesuffix(' %')}-{high}"


def _percent_rounded_down(share: float) -> str:
    """Return a share rounded down, so that 100 % means that no request was late."""
    return f"{math.floor(100 * share + 1e-9)} %"


def _pair(first: float, other: float) -> str:
    """Return two latencies with one unit, to keep lines within 80 columns."""
    unit, factor = ("s", 1.0) if max(first, other) >= 1 else ("ms", 1000.0)
    return f"{round(first * factor, 2):.3g} / {round(other * factor, 2):.3g} {unit}"


def _neighbours(plan: FleetPlan) -> Iterator[str]:
    """Yield lines on the best fleets with a worker more or fewer."""
    worker_gpus = plan.question.machine.gpus
    unit = "one GPU" if worker_gpus == 1 else f"{worker_gpus} GPUs (one worker)"
    if plan.question.prefill_machine is not None:
        unit = "one worker"
    without = {
        "more": "no fleet here serves more with it; it can stay idle",
        "fewer": "there is no such fleet",
    }
    for what, other in (("more", plan.more), ("fewer", plan.fewer)):
        if other is None:
            yield f"{unit} {what}: {without[what] if plan.stopped_at is None else 'not known'}"
            continue
        change = other.rate / plan.best.rate - 1
        size = (
            f"{change:+.0%}" if abs(change) > EQUAL_RATE_SHARE else "below the search's resolution"
        )
        yield f"{unit} {what}: {other.rate:.3g} requests/s in time ({size}), {other.shape}"
    if worker_gpus > 1:
        yield f"a single GPU more or fewer changes nothing: a worker takes {worker_gpus}"


def _required(plan: FleetPlan, rate: float | None) -> Iterator[str]:
    if rate is not None:
        yield f"--request-rate {rate:g}: {rate / plan.best.rate:.0%} of the best fleet's rate"


def _exact_checks(plan: FleetPlan) -> Iterator[str]:
    """Yield lines on the fleets that vLLM's own schedulers played."""
    for shape, proof in plan.exact.items():
        target = plan.question.share
        short = " (too few)" if proof.share < target else ""
        if proof.longest < target:
            longest = _percent_rounded_down(proof.longest)
            short += f" ({longest} of the longest prompts, which starve)"
        yield (
            f"with vLLM's own schedulers {_percent_rounded_down(proof.share)} of "
            f"{proof.requests:,} in time at {proof.rate:.3g} req./s{short}: {shape}"
        )


def _capacity(plan: FleetPlan) -> Table:
    capacity, size = plan.capacity, plan.question.machine.kv_token_bytes
    layout = plain_table([""], [""], show_header=False, title_justify="left", title_style="bold")
    layout.title = "one worker, calculated"
    limiting = capacity.limiting_prompt
    where = "never" if limiting is None else f"prompts from {limiting:,} tokens"
    for name, text in (
        ("KV cache", f"{capacity.kv_tokens:,} tokens of {size / 1024:.0f} KiB"),
        ("requests of mean length that fit", f"{capacity.held:,}"),
        ("prefill of a mean prompt", milliseconds(capacity.prefill_s * 1000)),
        ("decode step of a full worker", milliseconds(capacity.step_s * 1000)),
        ("requests/s by its compute", f"{capacity.requests_per_s:.3g}"),
        ("KV written by its prefill", f"{capacity.kv_bytes_per_s / 1e9:.3g} GB/s"),
        ("KV moved by its link", f"{capacity.link_bytes_per_s / 1e9:.3g} GB/s"),
        ("transfer of a mean prompt", milliseconds(capacity.transfer_s * 1000)),
        ("transfer is slower than prefill", where),
        ("KV of all prompts at the best rate", f"{plan.prefill_bytes_per_s / 1e9:.3g} GB/s"),
    ):
        layout.add_row(name, text)
    return layout


def simulate_options(args: argparse.Namespace, plan: FleetPlan, *, exact: bool) -> list[str]:
    count = EXACT_REQUESTS if exact else plan.requests
    options = [f"--engine={EXACT if exact else FLUID}", f"--workload={args.workload}"]
    options += [f"--request-rate={plan.best.rate:.3g}", f"--num-requests={count}"]
    options += [
        f"--{name.replace('_', '-')}={value:g}"
        for name in ("burstiness", "prefix_hit", "bandwidth", "mixed_ms")
        if (value := getattr(args, name)) is not None
    ]
    if args.scale != 1:
        options.append(f"--scale={args.scale:g}")
    if args.block_tokens != BLOCK_TOKENS:
        options.append(f"--block-tokens={args.block_tokens}")
    return [*options, "--goodput", *args.goodput]
