"""Measure what metrics add to a step, per set of policies, with 256 running requests.

One scheduler takes pairs of steps, with its metrics and without, in random order, because all
running requests need new blocks in the same steps. The figure is the median difference of processor
time of `schedule()` and `update_from_output()`. Metrics are written five times a second, so a write
is timed separately, after the steps of a fifth of a second (at most 13), which share its cost. The
sum is compared with the scheduler's time and with the fastest published GPU step of that shape.

    python -m benchmarks.seen_cost [--sets long_prompt every] [--step-ms 10]
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.step_cost import KINDS, RUNNING, SETS, Policies, make_loaded, take_step
from vllm_sched.cost import profiles
from vllm_sched.cost.step_time import StepShape
from vllm_sched.engine import metrics

# Warm-up steps and the limit of timed steps: the long prompt lasts for 150.
WARM_UP_STEPS, MAX_STEPS = 15, 130
WRITES = 10
PROFILE, CONTEXT = "h200-8b", 100  # context tokens per decode
TARGET = 0.01


def whole_step_s() -> float:
    """Return the seconds of a GPU step like the timed ones, without the prefill."""
    return profiles.find(PROFILE).time.seconds(
        StepShape(decodes=RUNNING, context_tokens=RUNNING * CONTEXT)
    )


def warmed_up(kind: type[Any], policies: Policies) -> tuple[Any, Any]:
    """Return a scheduler after its warm-up steps, and its telemetry with writes disabled."""
    scheduler = make_loaded(kind, policies, 10)
    telemetry = scheduler._telemetry
    assert telemetry is not None, "its metrics are off"
    telemetry.metrics.is_due = lambda _: False
    for _ in range(WARM_UP_STEPS):
        take_step(scheduler)
    return scheduler, telemetry


def step_seconds(kind: type[Any], policies: Policies, steps: int, seed: int) -> tuple[float, float]:
    """Return the median seconds of a step without metrics, and of what metrics add."""
    scheduler, telemetry = warmed_up(kind, policies)
    rng = random.Random(seed)
    pairs = []
    for _ in range(steps // 2):
        took = {}
        for on in (True, False) if rng.random() < 0.5 else (False, True):
            scheduler._telemetry = telemetry if on else None
            took[on] = take_step(scheduler)[1]
        pairs.append(took)
    assert len(scheduler.running) == RUNNING
    return (
        statistics.median(took[False] for took in pairs),
        statistics.median(took[True] - took[False] for took in pairs),
    )


def write_seconds(kind: type[Any], policies: Policies, between: int) -> float:
    """Return the median seconds of a write of the metrics, after `between` steps."""
    scheduler, telemetry = warmed_up(kind, policies)
    writes = []
    for _ in range(WRITES):
        telemetry.metrics.is_due = lambda _: False
        for _ in range(between):
            take_step(scheduler)
        telemetry.metrics.is_due = lambda _: True
        start = time.process_time()
        telemetry.write_if_due(scheduler, time.monotonic())
        writes.append(time.process_time() - start)
    assert len(scheduler.running) == RUNNING
    return statistics.median(writes[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=110, help="per round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--kind", choices=KINDS, default="async")
    parser.add_argument(
        "--step-ms",
        type=float,
        default=whole_step_s() * 1000,
        help=f"time of a step (default: %(default).1f, {RUNNING} decodes on {PROFILE})",
    )
    arguments = parser.parse_args()
    if not 2 <= arguments.steps <= MAX_STEPS:
        parser.error(f"--steps: 2 to {MAX_STEPS}")
    step_s = arguments.step_ms / 1000
    between = max(round(metrics.WRITE_EVERY_S / step_s), 1)

    table = Table(
        *("policies", "schedule() and update, us", "metrics add us", "without writes"),
        *("a write us", "of schedule() and update", f"of a step of {arguments.step_ms:.1f} ms"),
    )
    gc.disable()
    metrics.open_folder()
    for label in arguments.sets:
        rounds = []
        for seed in range(arguments.rounds):
            kind = KINDS[arguments.kind][1]
            steps = step_seconds(kind, SETS[label], arguments.steps, seed)
            write_s = write_seconds(kind, SETS[label], min(between, MAX_STEPS // WRITES))
            rounds.append((*steps, write_s))
            gc.collect()
        bare, added, writes = zip(*rounds, strict=True)
        bare_s, write_s = statistics.median(bare), statistics.median(writes)
        added_s = statistics.median(added) + write_s / between
        shares = added_s / bare_s, added_s / step_s
        table.add_row(
            label,
            f"{bare_s * 1e6:.0f}",
            f"{added_s * 1e6:.0f}",
            " ".join(f"{seconds * 1e6:.0f}" for seconds in added),
            f"{write_s * 1e6:.0f}",
            *(f"{share:.1%} {'met' if share <= TARGET else 'missed'}" for share in shares),
        )
    Console().print(table)


if __name__ == "__main__":
    main()
