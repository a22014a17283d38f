"""`vllm-sched threshold`: find how many departures deferred prefill should wait for."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table

from vllm_sched.bench.calibrate.aiconfigurator import find_profile
from vllm_sched.bench.compare.report import show
from vllm_sched.bench.plots.chart import Chart, Series, check_chart, draw_chart
from vllm_sched.bench.results.summary import plain_table
from vllm_sched.cli.output import Output, require_folders
from vllm_sched.cost import profiles
from vllm_sched.cost.backlog_model import BacklogModel
from vllm_sched.cost.backlog_simulation import BacklogRun, simulate_backlog
from vllm_sched.cost.recursion import Recursion
from vllm_sched.cost.step_time import StepShape, StepTime
from vllm_sched.cost.threshold import MIN_GAIN, closed_form, recommended
from vllm_sched.errors import UsageError
from vllm_sched.files import write_whole
from vllm_sched.policies.deferral.hold import CONSTANT_K_SHARE
from vllm_sched.policies.deferred_prefill import DeferredPrefillSettings
from vllm_sched.sim.fleet.models import read_calibration

POINTS_DRAWN = 96
MAX_SLOTS = 4096
MAX_MEAN_TOKENS = 10_000_000  # longer than any context
PAUSED, MIXED = "separate prefills", "mixed steps"
MEANING = {
    PAUSED: "decodes pause during prefills (prefill_first, as in the paper)",
    MIXED: "prefill steps also decode (vLLM V1)",
}
HEADINGS = (
    "K", "exact\nreq/s", "vs 1", "played\nreq/s", "served\nin", "vs 1", "ITL\np50", "p99", "max",
)  # fmt: skip


def describe(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "threshold",
        help="find how many departures deferred prefill should wait for, and the gain",
        description=(
            "Find the best threshold K of deferred prefill by closed form, exact recursion and "
            "simulation; show its gain over K = 1 and its cost in the longest token gaps."
        ),
        allow_abbrev=False,
    )
    add = command.add_argument
    add("--slots", type=int, required=True, metavar="B", help="concurrent requests: max_num_seqs")
    add("--mean-output", type=float, required=True, metavar="M", help="mean tokens of an output")
    add(
        "--mean-prompt",
        type=float,
        required=True,
        metavar="L",
        help="mean tokens to prefill a prompt",
    )
    costs = command.add_mutually_exclusive_group(required=True)
    costs.add_argument(
        "--cost", type=Path, metavar="FILE.json", help="a file of `vllm-sched calibrate --save`"
    )
    costs.add_argument("--profile", metavar="NAME", help=f"a profile: {profiles.USAGE}")
    add(
        "--mixed-ms",
        type=float,
        metavar="MS",
        help="extra fixed time of a mixed step (default: from the file or the profile)",
    )
    add(
        "--budget",
        type=int,
        default=0,
        metavar="TOKENS",
        help="max_num_batched_tokens, the limit of prefill per step (default: no limit)",
    )
    add("--itl-ms", type=float, metavar="MS", help="limit K by the gap that K mean prompts cause")
    add(
        "--max-delay-ms",
        type=float,
        default=DeferredPrefillSettings().max_delay_ms,
        metavar="MS",
        help="limit K so that no request is held longer, as the policy does (default: %(default)g)",
    )
    add("--seed", type=int, default=0, help="seed of the simulation")
    add("--save", type=Path, metavar="FILE.json", help="write all figures and the curve")
    add("--plot", type=Path, metavar="FILE.svg", help="draw throughput against K")
    command.set_defaults(func=run_threshold)


@dataclass(frozen=True)
class Row:
    role: str
    k: int
    throughput: float
    simulated: BacklogRun


@dataclass(frozen=True)
class Finding:
    name: str
    backlog: BacklogModel
    formula_k: int
    best_k: int  # by recursion
    chosen_k: int  # to run
    rows: tuple[Row, ...]
    curve: tuple[tuple[int, float], ...]

    @property
    def gain(self) -> float:
        at = {row.k: row.throughput for row in self.rows}
        return at[self.chosen_k] / at[1]

    @property
    def verdict(self) -> str:
        best = f"K* = {self.formula_k} by formula, {self.best_k} by recursion"
        if self.chosen_k > 1:
            return f"{best}; run departures={self.chosen_k}: {_percent(self.gain)} throughput"
        best_ratio = max(row.throughput for row in self.rows) / self.rows[0].throughput
        if best_ratio < MIN_GAIN:
            gain = f"gains more than {_percent(best_ratio)}" if best_ratio > 1 else "gains anything"
            return f"{best}; run departures=1: no larger K {gain}"
        return f"{best}; run departures=1: no larger K is within the given limits"


def run_threshold(args: argparse.Namespace) -> int:
    check(args)
    source, time = _costs(args)
    if args.mixed_ms is not None:
        time = replace(time, mixed_s=args.mixed_ms / 1000)
    separate = _find(PAUSED, time, args)
    # Also show its best K with mixed steps, for comparison.
    findings = [separate, _find(MIXED, time, args, {separate.best_k: "best separate"})]
    console = Output()
    console.print_text(
        f"{args.slots} slots, outputs of {args.mean_output:g} and prompts of {args.mean_prompt:g} "
        f"tokens on average; costs: {source}",
        "dim",
    )
    for finding in findings:
        console.print_table(_table(finding))
        console.print_text(f"{finding.name}: {finding.verdict}", "")
    content = json.dumps(_to_json(source, time, args, findings), indent=1) + "\n"
    console.save(args.save, lambda path: write_whole(path, content))
    console.save(args.plot, partial(draw_chart, _chart(findings, args)), "drew")
    return 0


def check(args: argparse.Namespace) -> None:
    """Check the arguments, also for values that would take minutes."""
    if not 1 <= args.slots <= MAX_SLOTS:
        raise UsageError(f"--slots {args.slots}: give max_num_seqs, 1 to {MAX_SLOTS}")
    for name in ("mean_output", "mean_prompt"):
        value = getattr(args, name)
        if not 1 <= value <= MAX_MEAN_TOKENS:
            flag = name.replace("_", "-")
            raise UsageError(f"--{flag} {value:g}: give a mean in tokens, 1 to {MAX_MEAN_TOKENS}")
    for name in ("mixed_ms", "itl_ms", "max_delay_ms", "budget"):
        value = getattr(args, name)
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise UsageError(f"--{name.replace('_', '-')} {value:g}: give 0 or more")
    if args.plot:
        check_chart(args.plot)
    require_folders(args.save, args.plot)


def _costs(args: argparse.Namespace) -> tuple[str, StepTime]:
    if args.cost:
        time = read_calibration(args.cost, f"--cost {args.cost}")[1]
        if not time.seconds(StepShape(decodes=1, context_tokens=1)):
            raise UsageError(
                f"--cost {args.cost}: its decode steps take no time, which is impossible; "
                "save one with `vllm-sched calibrate --save`"
            )
        return str(args.cost), time
    profile = find_profile(args.profile)
    return f"{profile.name} ({profile.source})", profile.time


def _find(
    name: str, time: StepTime, args: argparse.Namespace, also: Mapping[int, str] | None = None
) -> Finding:
    backlog = BacklogModel.from_step_time(
        time,
        slots=args.slots,
        mean_output=args.mean_output,
        mean_prompt=args.mean_prompt,
        decodes_pause=name == PAUSED,
        budget=args.budget,
    )
    exact = Recursion(backlog)
    best_k, formula_k = exact.best(), closed_form(backlog)
    chosen_k = recommended(
        backlog,
        itl_s=None if args.itl_ms is None else args.itl_ms / 1000,
        max_delay_s=CONSTANT_K_SHARE * args.max_delay_ms / 1000,
    )
    named = [(chosen_k, "to run"), (formula_k, "formula"), (best_k, "best")]
    roles: dict[int, list[str]] = {1: []}
    for k, role in [*named, *(also or {}).items()]:
        roles.setdefault(k, []).append(role)

    def throughput(k: int) -> float:
        return exact.solve_for(k).throughput

    rows = (
        Row(", ".join(names), k, throughput(k), simulate_backlog(backlog, k, seed=args.seed))
        for k, names in sorted(roles.items())
    )
    drawn = _drawn(backlog.largest_threshold, list(roles))
    curve = tuple((k, throughput(k)) for k in drawn)
    return Finding(name, backlog, formula_k, best_k, chosen_k, tuple(rows), curve)


def _drawn(largest_threshold: int, wanted: Sequence[int]) -> list[int]:
    """Return the thresholds of the curve, closer together for small values."""
    spread = {round(largest_threshold ** (n / POINTS_DRAWN)) for n in range(POINTS_DRAWN + 1)}
    even = {max(1, round(largest_threshold * n / POINTS_DRAWN)) for n in range(POINTS_DRAWN + 1)}
    return sorted({1, *spread, *even, *wanted})


def _table(finding: Finding) -> Table:
    title = f"{finding.name}: {MEANING[finding.name]}"
    layout = plain_table((), HEADINGS, title=title, title_justify="left", title_style="bold")
    base = finding.rows[0]
    for row in finding.rows:
        played = row.simulated
        layout.add_row(
            str(row.k),
            f"{row.throughput:.2f}",
            _percent(row.throughput / base.throughput),
            f"{played.throughput:.2f}",
            show(played.served_s, "s"),
            _percent(played.served_s / base.simulated.served_s),
            show(played.itl_p50_s, "s"),
            show(played.itl_p99_s, "s"),
            show(played.itl_max_s, "s"),
            style="bold" if row.k == finding.chosen_k else "",
        )
    return layout


def _percent(ratio: float) -> str:
    return f"{(ratio - 1) * 100:+.1f} %"


def _chart(findings: Sequence[Finding], args: argparse.Namespace) -> Chart:
    exact, simulated, marks = [], [], []
    for finding in findings:
        scale = 100 / finding.curve[0][1]
        curve = [(k, scale * throughput) for k, throughput in finding.curve]
        dots = [(row.k, scale * row.simulated.throughput) for row in finding.rows]
        exact.append(Series(f"{finding.name}, exact", curve))
        simulated.append(Series(f"{finding.name}, simulated", dots, dots=True))
        for k, word in ((finding.chosen_k, "to run"), (finding.best_k, "best")):
            if k > 1:
                marks.append((k, f"{word}, {finding.name}: {k}"))
    return Chart(
        title=f"Throughput against K: {args.slots} slots, outputs of {args.mean_output:g}, prompts "
        f"of {args.mean_prompt:g} tokens",
        subtitle=f"costs: {args.cost or args.profile}",
        x="departures to wait for (K)",
        y="throughput, % of that at K = 1",
        series=[*exact, *simulated],
        log_x=True,
        from_zero=False,
        marks=marks,
    )


def _to_json(
    source: str, time: StepTime, args: argparse.Namespace, findings: Sequence[Finding]
) -> dict[str, Any]:
    return {
        "costs": source,
        "step_time": time.to_json(),
        "slots": args.slots,
        "mean_output": args.mean_output,
        "mean_prompt": args.mean_prompt,
        "regimes": {
            finding.name: {
                "regime": asdict(finding.backlog),
                "closed_form": finding.formula_k,
                "recursion": finding.best_k,
                "run": finding.chosen_k,
                "gain": finding.gain,
                "rows": [asdict(row) for row in finding.rows],
                "curve": finding.curve,
            }
            for finding in findings
        },
    }
