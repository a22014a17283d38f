"""From a traffic, so many GPUs and targets to a fleet, with what would be otherwise.

The search is by plain workers (`search`). Where vLLM is installed the best may be played again with
its real schedulers, and are then ordered by what those say.
"""

from __future__ import annotations

import math
import os
import shlex
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import yaml

from vllm_sched.bench.compare.report import format_count
from vllm_sched.bench.results.goodput import Targets
from vllm_sched.bench.results.trend import Trend
from vllm_sched.bench.traffic.schedule import MAX_REQUESTS
from vllm_sched.errors import UsageError
from vllm_sched.files import write_whole
from vllm_sched.sim.engines.quantile_sketch import QuantileSketch
from vllm_sched.sim.fleet.aggregate_flow import ClassFigures, FlowResult
from vllm_sched.sim.fleet.models import MACHINES, assuming, of_profile
from vllm_sched.sim.planning.capacity_bound import Capacity
from vllm_sched.sim.planning.fleet_shapes import ONE_POOL
from vllm_sched.sim.planning.search import (
    WARM,
    FleetSearch,
    PlanQuestion,
    ServedRate,
    longest_kept,
    ordered,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_sched.bench.results.outcome import Outcome
    from vllm_sched.sim.planning.fleet_shapes import FleetShape
    from vllm_sched.sim.planning.search import Tell
    from vllm_sched.sim.types import WorkerModel

NAMES: Final = {
    "-8b": "meta-llama/Llama-3.1-8B-Instruct",
    "-13b": "facebook/opt-13b",
    "-70b": "meta-llama/Llama-3.3-70B-Instruct",
}
# The share of the work that is the search itself, that with real schedulers, and one worker more.
SEARCHED, EXACTED, MORE = 0.7, 0.8, 0.9
EXACT_REQUESTS, MOST_EXACT_REQUESTS, EXACT_LASTS_S = 300, 1500, 30.0
EXACT_TRIES, EXACT_STEP = 5, 0.85


class ExactProof(NamedTuple):
    """What real schedulers said of a fleet."""

    rate: float
    share: float  # in time
    longest: float  # of the longest prompts, in time or as late as may be borne
    requests: int


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """What was found."""

    question: PlanQuestion
    gpus_each: int
    ranking: list[ServedRate]  # the best of each family, best first
    more: ServedRate | None  # with one worker more; None if it serves no more
    fewer: ServedRate | None  # with one fewer; None if there is no such fleet
    capacity: Capacity
    prompt: float
    output: float
    runs: int
    requests: int  # of each draw
    exact: dict[str, ExactProof]  # by shape
    exactly: bool = False  # whether the ranking and its rates are those of real schedulers
    stopped_at: float | None = None  # how much of the search was done when the user had enough

    @property
    def best(self) -> ServedRate:
        """The fleet to take."""
        return self.ranking[0]

    @property
    def prefill_bytes_per_s(self) -> float:
        """Bytes a second that all hand-overs of the best rate would move."""
        return self.best.rate * self.prompt * self.question.machine.kv_token_bytes


def machine_of(
    profile: str, bandwidth: float | None = None, mixed_s: float | None = None
) -> tuple[WorkerModel, int]:
    """Return a worker of a profile, and how many GPUs it takes."""
    machine = assuming(of_profile(profile), bandwidth, mixed_s)
    return machine, machine.gpus


def workers_of(gpus: int, gpus_each: int, profile: str) -> int:
    """How many workers there are."""
    if gpus < gpus_each:
        raise UsageError(
            f"--gpus {gpus}: a worker of {profile} takes {gpus_each}; give {gpus_each} or more, or "
            "another --profile"
        )
    return gpus // gpus_each


def plan(
    question: PlanQuestion,
    gpus: int,
    gpus_each: int,
    *,
    rate: float | None = None,
    exact: bool = False,
    tell: Tell = lambda _what, _share: None,
) -> FleetPlan:
    """Find the best fleet; the error says what cannot be had.

    Ctrl-C ends it with the best that was judged by then, if there is one.
    """
    if not question.targets:
        raise UsageError("--goodput: name the targets to plan for, as in ttft:3000 tpot:100")
    workers = workers_of(gpus, gpus_each, question.machine.profile)
    search = FleetSearch(question, tell)
    _check_size(search, workers, gpus, gpus_each)
    known, stopped_at = _Known(), None
    try:
        search.tell("an idle worker", 0.0)
        search.check()
        known.plainly = search.best(workers, (0.02, SEARCHED))
        if not known.plainly:
            raise UsageError(
                f"--goodput: no fleet of {workers} {question.machine.profile} serves "
                f"{question.source.name} at any rate; give looser targets"
            )
        if rate is not None:
            _check_rate(rate, known.plainly[0], gpus, gpus_each, question.machine.profile)
        if exact:
            require_vllm()
            known.exactly = _exactly(search, known.plainly, known.proofs)
        _otherwise(search, known, workers)
        search.tell("done", 1.0)
    except KeyboardInterrupt:
        # Nothing that is thrown away here is used by what follows, and it takes no time.
        known.plainly = known.plainly or search.so_far(workers)
        if not known.plainly:
            raise
        stopped_at = search.done
    plain = known.plain
    # These are of plain workers: taken to be as far off as the best was.
    off = known.ranking[0].rate / plain.rate
    more, fewer = (
        each and replace(each, rate=each.rate * off) for each in (known.more, known.fewer)
    )
    traffic = search.traffic
    return FleetPlan(
        question,
        gpus_each,
        known.ranking,
        more,
        fewer,
        replace(
            Capacity.of(question.machine, traffic.prompt, traffic.output),
            requests_per_s=traffic.most_each,
        ),
        traffic.prompt,
        traffic.output,
        search.runs,
        search.count(plain.rate, fine=True),
        known.proofs,
        bool(known.exactly),
        stopped_at,
    )


@dataclass(slots=True)
class _Known:
    """What is known by now."""

    plainly: list[ServedRate] = field(default_factory=list)  # the ranking, by plain workers
    exactly: list[ServedRate] = field(default_factory=list)  # and by real schedulers
    proofs: dict[str, ExactProof] = field(default_factory=dict)
    more: ServedRate | None = None
    fewer: ServedRate | None = None

    @property
    def ranking(self) -> list[ServedRate]:
        """The fleets, best first."""
        return self.exactly or self.plainly

    @property
    def plain(self) -> ServedRate:
        """The best, with its rate by plain workers."""
        best = self.ranking[0]
        rate = next(each.rate for each in self.plainly if each.shape == best.shape)
        return replace(best, rate=rate)


def _otherwise(search: FleetSearch, known: _Known, workers: int) -> None:
    """Find out what one worker more or fewer would do."""
    plain = known.plain
    known.more = search.more(plain, (EXACTED if known.exactly else SEARCHED, MORE))
    known.fewer = search.fewer(plain, (MORE, 1.0))
    if known.fewer is None and workers > 1:  # one worker is no two pools
        known.fewer = next(iter(search.family(ONE_POOL, workers - 1, (MORE, 1.0))), None)


def _check_size(search: FleetSearch, workers: int, gpus: int, gpus_each: int) -> None:
    """Refuse what is too large to be simulated now, not once the search comes so far."""
    largest = workers + 1  # the plan says what one more would serve
    most = largest * search.traffic.most_each
    if math.isinf(most) or (count := search.count(most, fine=True)) <= MAX_REQUESTS:
        return
    fits = (largest * MAX_REQUESTS // count - 1) * gpus_each
    remedy = (
        f"plan for {fits:,} at most, and take that fleet several times over"
        if fits >= gpus_each
        else "give a shorter --goodput ttft"
    )
    raise UsageError(
        f"--gpus {gpus}: one simulation of all that they and a worker more compute would have "
        f"{count:,} requests, and has at most {MAX_REQUESTS:,}; {remedy}"
    )


def _check_rate(rate: float, best: ServedRate, gpus: int, gpus_each: int, profile: str) -> None:
    if best.rate >= rate:
        return
    # Larger fleets are used better, if anything.
    wanted = -(-best.shape.workers * rate // best.rate)
    raise UsageError(
        f"--request-rate {rate:g}: {format_count(gpus, 'GPU')} of {profile} can serve "
        f"{best.rate:.3g} requests/s ({best.shape}); give about --gpus {int(wanted) * gpus_each}, "
        "looser targets, or no rate to see that plan"
    )


# With real schedulers


def has_vllm() -> bool:
    """Whether the exact engine can be played."""
    return find_spec("vllm") is not None


def require_vllm() -> None:
    """Say what is missing for the exact engine."""
    if not has_vllm():
        raise UsageError(
            "--exact: the exact engine steps vLLM's own schedulers, and vLLM is not installed; "
            "install it (pip install 'vllm-sched[vllm]') or leave --exact out"
        )


def _exactly(
    search: FleetSearch, ranking: list[ServedRate], played: dict[str, ExactProof]
) -> list[ServedRate]:
    """Lower the rates of the best of each kind until real schedulers serve them too."""
    again: list[ServedRate] = []
    for at, served in enumerate(ranking):
        done = SEARCHED + (EXACTED - SEARCHED) * at / len(ranking)
        search.tell(f"exactly: {served.shape}", done)
        rate = served.rate
        run = play_exactly(search, served.shape, rate)
        for _ in range(EXACT_TRIES - 1):
            if search.enough(run, brief=True):
                break
            rate *= EXACT_STEP
            run = play_exactly(search, served.shape, rate)
        proof = ExactProof(rate, run.all.share, longest_kept(run), run.all.arrived)
        played[str(served.shape)] = proof
        if search.enough(run, brief=True):
            again.append(ServedRate(served.shape, rate, run))
    if not again:
        lowest = ", ".join(
            f"{each.rate:.3g} ({each.share:.0%}, {each.longest:.0%})" for each in played.values()
        )
        raise UsageError(
            f"--exact: with vLLM's own schedulers none of the best fleets has "
            f"{search.question.share:.0%} in time, and as many of the longest, at {lowest} "
            "requests/s; give looser targets, or leave --exact out"
        )
    return ordered(again)


def play_exactly(search: FleetSearch, shape: FleetShape, rate: float) -> FlowResult:
    """Play a fleet with real schedulers; with requests by which nothing was chosen or judged."""
    from proxy.config import FleetConfig
    from vllm_sched.sim.engines.exact_engine import ExactEngine
    from vllm_sched.sim.fleet.fleet import SimulatedFleet

    question = search.question
    config = FleetConfig(**shape.to_fleet(question.machine, "model", question.machine.gpus))
    models = {each.model.name: each.model for each in shape.placed(question.machine)}
    fleet = SimulatedFleet(config, models, ExactEngine, seed=question.seed)
    count = min(max(round(rate * EXACT_LASTS_S), EXACT_REQUESTS), MOST_EXACT_REQUESTS)

    def told(_now: float, _sent: int, done: int) -> None:
        search.note(f"exactly: {shape} at {rate:.3g}/s: {done:,} of {count:,} requests")

    told(0.0, 0, 0)
    played = fleet.play(question.schedule(rate, count, question.draws + 1), told)
    return counted(search, played.outcomes, played.duration)


def counted(search: FleetSearch, outcomes: Sequence[Outcome], duration_s: float) -> FlowResult:
    """Count what a simulation kept of each request, as `Flow` does."""
    total, classes, gaps = ClassFigures(), dict[str, ClassFigures](), QuantileSketch()
    for each in outcomes:
        of_class = classes.setdefault(search.class_of(each.prompt_tokens), ClassFigures())
        for figures in (total, of_class):
            _count(figures, each, search)
        for gap in each.itls if each.good else ():
            gaps.add(gap)
    span, trend = max((each.at for each in outcomes), default=0.0), Trend()
    for each in outcomes:
        if each.good and each.at >= WARM * span:
            trend.add(each.at, each.ttft)
    refused = total.arrived - total.done
    return FlowResult(total, classes, refused, span, duration_s, gaps, trend.growth)


def _count(figures: ClassFigures, outcome: Outcome, search: FleetSearch) -> None:
    figures.arrived += 1
    if not outcome.good:
        return
    targets = search.question.targets
    met = targets.met_by(outcome)
    borne = Targets(search.borne_s(outcome.prompt_tokens), targets.tpot, targets.itl)
    figures.done += 1
    figures.met += met
    figures.kept += met or borne.met_by(outcome)
    figures.prompt_tokens += outcome.prompt_tokens
    figures.output_tokens += outcome.completed
    figures.ttft.add(outcome.ttft)
    if targets.e2el is not None:
        figures.e2el.add(outcome.latency)
    if outcome.tpot is not None:
        figures.tpot.add(outcome.tpot)
        figures.longest.add(max(outcome.itls))


# As a fleet file


def fleet_of(found: FleetPlan, model: str, folder: Path) -> dict[str, Any]:
    """Give the content of a fleet file for the best; `folder` is where it will lie."""
    machine = found.question.machine
    named = (name for part, name in NAMES.items() if part in machine.profile)
    machine = replace(machine, profile=_seen_from(folder, machine.profile))
    return found.best.shape.to_fleet(machine, model or next(named, "model"), found.gpus_each)


def _seen_from(folder: Path, profile: str) -> str:
    """Name a profile as a fleet file does: if it is a file, by the way to it from there."""
    if profile in MACHINES or Path(profile).is_absolute():
        return profile
    # Of real folders: from one that is a link `..` leads to where the other lies.
    path = Path(profile)
    return os.path.relpath(path.parent.resolve() / path.name, folder.resolve())


def _unfinished(found: FleetPlan) -> list[str]:
    if found.stopped_at is None:
        return []
    return [
        f"# The search was interrupted at {found.stopped_at:.0%}: the best that it had judged.",
        "#",
    ]


def write(found: FleetPlan, path: Path, *, model: str, command: str, traffic: str) -> None:
    """Write the fleet file; `traffic` is what `simulate` is asked for to see the same."""
    targets = " ".join(
        f"{name}:{value:g}"
        for name, value in found.question.targets.as_ms().items()
        if value is not None
    )
    file = shlex.quote(str(path))  # from where it was planned: a trace is named from there too
    head = [
        f"# {found.best.shape}",
        "#",
        *_unfinished(found),
        f"# Planned for {found.question.source.name} within {targets}: serves about "
        f"{found.best.rate:.3g} requests/s. By",
        f"#     {command}",
        "#",
        f"#     vllm-sched check {file}",
        f"#     vllm-sched simulate {file} {traffic}",
        "#",
        "# To run it give each worker the url where it listens; or, with all GPUs in this machine,",
        "# its own of them under launch.env (CUDA_VISIBLE_DEVICES), and `vllm-sched up`.",
    ]
    content = yaml.safe_dump(fleet_of(found, model, path.parent), sort_keys=False, width=100)
    text = "\n".join(head) + "\n" + content
    # Names of files, which may be of any bytes, are among the words of the command.
    write_whole(path, text, errors="backslashreplace")
