"""Whether any fleet, of any size, can meet the targets: a run on an idle worker."""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import TYPE_CHECKING

from vllm_sched.errors import UsageError
from vllm_sched.sim.planning.trials import LONG

if TYPE_CHECKING:
    from vllm_sched.sim.fleet.aggregate_flow import FlowResult
    from vllm_sched.sim.planning.question import PlanQuestion
    from vllm_sched.sim.planning.trials import FleetTrials


def check_feasible(trials: FleetTrials) -> None:
    """Raise a `UsageError` if no fleet of any size can meet the targets."""
    question, traffic = trials.question, trials.traffic
    holds = question.machine.max_model_len
    at = bisect_left(traffic.totals, holds + 1)
    fits = at / len(traffic.totals)
    if fits < question.share:
        raise UsageError(
            f"{question.source.name}: {1 - fits:.0%} of the requests are longer than the "
            f"{holds:,} tokens that a worker of {question.profiles} holds; use a "
            "larger machine or a --scale below 1"
        )
    run = trials.play_idle()
    if not trials.enough(run, strict=False):
        raise UsageError(_infeasible(trials.question, run))


def _infeasible(question: PlanQuestion, run: FlowResult) -> str:
    share = question.share
    subject, met, figures = question.source.name, run.all.share, run.all
    named = {
        "ttft": figures.ttft, "tpot": figures.tpot, "itl": figures.longest,
        "e2el": figures.e2el,
    }  # fmt: skip
    if met >= share and (longs := run.classes.get(LONG)) is not None:
        # First tokens and ends of long prompts may be late, so the gaps are too long.
        subject, met = f"the longest of {subject}", longs.kept_share
        named = {"tpot": longs.tpot, "itl": longs.longest}
    missed = [
        f"{name}:{_up(sketch.quantile(share) * 1000)}"
        for name, sketch in named.items()
        if (target := getattr(question.targets, name)) is not None
        and sketch.quantile(share) > target
    ]
    # Each target may be met, but not all together.
    wanted = f"{' '.join(missed)} at the least" if missed else "looser targets"
    return (
        f"--goodput: no number of {question.profiles} meets it: on an idle worker "
        f"{math.floor(100 * met)}% of {subject} are in time, and {share:.0%} should be; "
        f"ask for {wanted}"
    )


def _up(milliseconds: float) -> int:
    digits: int = 10 ** max(math.floor(math.log10(max(milliseconds, 1.0))) - 1, 0)
    return math.ceil(milliseconds / digits) * digits
