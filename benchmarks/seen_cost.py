"""What it costs a step to be seen: the metrics, per set of policies, with 256 running.

One scheduler steps with its metrics and without, in pairs whose order is drawn at random, for the
blocks of all who run are due in the same steps. What is timed is processor time of `schedule()` and
of taking the result in; what counts is the median of the pairs' differences. What was done is
counted and shown five times a second whatever a step takes, so a writing is timed by itself, after
as many steps as come in a fifth of a second (13, if those are more), which share it. Held against
the scheduler's own time, and against what a GPU takes for a step of that shape by published
figures: the shortest there are, unless told otherwise.

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

# Steps before anything is timed, and at most how many then: the long prompt lasts for 150.
SETTLING, LASTING = 15, 130
WRITINGS = 10
PROFILE, CONTEXT = "h200-8b", 100  # the engine, and tokens before each that decodes
TARGET = 0.01


def whole_step_s() -> float:
    """How long a GPU takes for a step like those that are timed, prefill aside."""
    return profiles.find(PROFILE).time.seconds(
        StepShape(decodes=RUNNING, context_tokens=RUNNING * CONTEXT)
    )


def settled(kind: type[Any], policies: Policies) -> tuple[Any, Any]:
    """Make a scheduler that has taken some steps, and what shows it, which writes when told to."""
    scheduler = make_loaded(kind, policies, 10)
    seen = scheduler._telemetry
    assert seen is not None, "its metrics are off"
    seen.metrics.due = lambda _: False
    for _ in range(SETTLING):
        take_step(scheduler)
    return scheduler, seen


def step_seconds(kind: type[Any], policies: Policies, steps: int, seed: int) -> tuple[float, float]:
    """Return the median seconds of a step without, and of what is added."""
    scheduler, seen = settled(kind, policies)
    rng = random.Random(seed)
    pairs = []
    for _ in range(steps // 2):
        took = {}
        for on in (True, False) if rng.random() < 0.5 else (False, True):
            scheduler._telemetry = seen if on else None
            took[on] = take_step(scheduler)[1]
        pairs.append(took)
    assert len(scheduler.running) == RUNNING
    return (
        statistics.median(took[False] for took in pairs),
        statistics.median(took[True] - took[False] for took in pairs),
    )


def writing_seconds(kind: type[Any], policies: Policies, between: int) -> float:
    """Return the median seconds of a writing, which comes after so many steps."""
    scheduler, seen = settled(kind, policies)
    writings = []
    for _ in range(WRITINGS):
        seen.metrics.due = lambda _: False
        for _ in range(between):
            take_step(scheduler)
        seen.metrics.due = lambda _: True
        start = time.process_time()
        seen.show(scheduler.running, scheduler.waiting, time.monotonic(), full=True)
        writings.append(time.process_time() - start)
    assert len(scheduler.running) == RUNNING
    return statistics.median(writings[2:])


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=110, help="per round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--kind", choices=KINDS, default="async")
    parser.add_argument(
        "--step-ms",
        type=float,
        default=whole_step_s() * 1000,
        help=f"what a whole step takes (default: %(default).1f, {RUNNING} decodes on {PROFILE})",
    )
    arguments = parser.parse_args()
    if not 2 <= arguments.steps <= LASTING:
        parser.error(f"--steps: 2 to {LASTING}")
    step_s = arguments.step_ms / 1000
    between = max(round(metrics.WRITE_EVERY_S / step_s), 1)

    table = Table(
        *("policies", "schedule() and result, us", "metrics add us", "steps alone", "a writing us"),
        *("of schedule() and result", f"of a step of {arguments.step_ms:.1f} ms"),
    )
    gc.disable()
    metrics.open_folder()
    for label in arguments.sets:
        rounds = []
        for seed in range(arguments.rounds):
            kind = KINDS[arguments.kind][1]
            steps = step_seconds(kind, SETS[label], arguments.steps, seed)
            writing_s = writing_seconds(kind, SETS[label], min(between, LASTING // WRITINGS))
            rounds.append((*steps, writing_s))
            gc.collect()
        unseen, added, writings = zip(*rounds, strict=True)
        unseen_s, written_s = statistics.median(unseen), statistics.median(writings)
        added_s = statistics.median(added) + written_s / between
        shares = added_s / unseen_s, added_s / step_s
        table.add_row(
            label,
            f"{unseen_s * 1e6:.0f}",
            f"{added_s * 1e6:.0f}",
            " ".join(f"{each * 1e6:.0f}" for each in added),
            f"{written_s * 1e6:.0f}",
            *(f"{each:.1%} {'met' if each <= TARGET else 'missed'}" for each in shares),
        )
    Console().print(table)


if __name__ == "__main__":
    main()
