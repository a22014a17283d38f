"""Plan a fleet for a traffic, a number of GPUs and targets.

The search uses fluid engines (`search`). With vLLM installed, the best fleets may be played again
and ranked with real schedulers.
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
from vllm_sched.sim.fleet.models import assuming, of_profile
from vllm_sched.sim.planning.capacity_bound import Capacity
from vllm_sched.sim.planning.fleet_shapes import ONE_POOL
from vllm_sched.sim.planning.search import FleetSearch, ServedRate, rank_fleets
from vllm_sched.sim.planning.trials import WARM_SHARE, longest_kept

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_sched.bench.results.outcome import Outcome
    from vllm_sched.sim.planning.fleet_shapes import FleetShape
    from vllm_sched.sim.planning.question import PlanQuestion
    from vllm_sched.sim.planning.search import Tell
    from vllm_sched.sim.types import WorkerModel

MODEL_NAMES: Final = {
    "-8b": "meta-llama/Llama-3.1-8B-Instruct",
    "-13b": "facebook/opt-13b",
    "-70b": "meta-llama/Llama-3.3-70B-Instruct",
    "qwen3-32b": "Qwen/Qwen3-32B",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
    "qwen3-235b-a22b": "Qwen/Qwen3-235B-A22B",
    "deepseek-v3": "deepseek-ai/DeepSeek-V3",
}
# Progress after the search, the exact runs, and the run with one more worker.
SEARCH_DONE, EXACT_DONE, MORE_DONE = 0.7, 0.8, 0.9
EXACT_REQUESTS, MAX_EXACT_REQUESTS, EXACT_DURATION_S = 300, 1500, 30.0
EXACT_TRIES, EXACT_STEP = 5, 0.85


class ExactProof(NamedTuple):
    rate: float
    share: float  # in time
    longest: float  # share of the longest prompts, in time or tolerably late
    requests: int


@dataclass(frozen=True, slots=True)
class FleetPlan:
    question: PlanQuestion
    gpus_each: int
    ranking: list[ServedRate]  # the best of each family, best first
    more: ServedRate | None  # with one more worker; None if it serves no more
    fewer: ServedRate | None  # with one worker fewer; None if there is no such fleet
    capacity: Capacity
    prompt: float
    output: float
    runs: int
    requests: int  # per draw
    exact: dict[str, ExactProof]  # by shape
    exactly: bool = False  # rates are from real schedulers
    stopped_at: float | None = None  # progress at which the user stopped the search

    @property
    def best(self) -> ServedRate:
        return self.ranking[0]

    @property
    def prefill_bytes_per_s(self) -> float:
        """Bytes/s of hand-overs at the best rate, if every prompt is handed over."""
        return self.best.rate * self.prompt * self.question.machine.kv_token_bytes


def machine_of(
    profile: str, bandwidth: float | None = None, mixed_s: float | None = None
) -> tuple[WorkerModel, int]:
    machine = assuming(of_profile(profile), bandwidth, mixed_s)
    return machine, machine.gpus


def workers_of(gpus: int, gpus_each: int, profile: str) -> int:
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
    """Return the best fleet, or raise a `UsageError`.

    Ctrl-C returns the best fleet so far, if there is one.
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
        known.plainly = search.best(workers, (0.02, SEARCH_DONE))
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
        known.plainly = known.plainly or search.so_far(workers)
        if not known.plainly:
            raise
        stopped_at = search.done
    plain = known.plain
    # These rates are from fluid engines: scale them like the best fleet's rate.
    off = known.ranking[0].rate / plain.rate
    more, fewer = (
        each and replace(each, rate=each.rate * off) for each in (known.more, known.fewer)
    )
    traffic = search.trials.traffic
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
        search.trials.runs,
        search.trials.count(plain.rate, fine=True),
        known.proofs,
        bool(known.exactly),
        stopped_at,
    )


@dataclass(slots=True)
class _Known:
    plainly: list[ServedRate] = field(default_factory=list)  # ranking by fluid engines
    exactly: list[ServedRate] = field(default_factory=list)  # ranking by real schedulers
    proofs: dict[str, ExactProof] = field(default_factory=dict)
    more: ServedRate | None = None
    fewer: ServedRate | None = None

    @property
    def ranking(self) -> list[ServedRate]:
        return self.exactly or self.plainly

    @property
    def plain(self) -> ServedRate:
        """The best fleet, with its rate by fluid engines."""
        best = self.ranking[0]
        rate = next(each.rate for each in self.plainly if each.shape == best.shape)
        return replace(best, rate=rate)


def _otherwise(search: FleetSearch, known: _Known, workers: int) -> None:
    plain = known.plain
    known.more = search.more(plain, (EXACT_DONE if known.exactly else SEARCH_DONE, MORE_DONE))
    known.fewer = search.fewer(plain, (MORE_DONE, 1.0))
    if known.fewer is None and workers > 1:  # two pools need two workers
        known.fewer = next(iter(search.family(ONE_POOL, workers - 1, (MORE_DONE, 1.0))), None)


def _check_size(search: FleetSearch, workers: int, gpus: int, gpus_each: int) -> None:
    """Refuse a fleet that is too large to simulate, before the search starts."""
    largest = workers + 1  # the plan includes one more worker
    most = largest * search.trials.traffic.most_each
    if math.isinf(most) or (count := search.trials.count(most, fine=True)) <= MAX_REQUESTS:
        return
    fits = (largest * MAX_REQUESTS // count - 1) * gpus_each
    remedy = (
        f"plan for {fits:,} at most, and deploy that fleet several times"
        if fits >= gpus_each
        else "give a shorter --goodput ttft"
    )
    raise UsageError(
        f"--gpus {gpus}: one simulation of these GPUs and one more worker would have "
        f"{count:,} requests, at most {MAX_REQUESTS:,} are possible; {remedy}"
    )


def _check_rate(rate: float, best: ServedRate, gpus: int, gpus_each: int, profile: str) -> None:
    if best.rate >= rate:
        return
    # Linear: larger fleets are at least as efficient.
    wanted = -(-best.shape.workers * rate // best.rate)
    raise UsageError(
        f"--request-rate {rate:g}: {format_count(gpus, 'GPU')} of {profile} can serve "
        f"{best.rate:.3g} requests/s ({best.shape}); give about --gpus {int(wanted) * gpus_each}, "
        "looser targets, or no rate to see that plan"
    )


# With real schedulers


def has_vllm() -> bool:
    return find_spec("vllm") is not None


def require_vllm() -> None:
    if not has_vllm():
        raise UsageError(
            "--exact: the exact engine steps vLLM's own schedulers, and vLLM is not installed; "
            "install it (pip install 'vllm-sched[vllm]') or leave --exact out"
        )


def _exactly(
    search: FleetSearch, ranking: list[ServedRate], played: dict[str, ExactProof]
) -> list[ServedRate]:
    again: list[ServedRate] = []
    for at, served in enumerate(ranking):
        done = SEARCH_DONE + (EXACT_DONE - SEARCH_DONE) * at / len(ranking)
        search.tell(f"exactly: {served.shape}", done)
        rate = served.rate
        run = play_exactly(search, served.shape, rate)
        for _ in range(EXACT_TRIES - 1):
            if search.trials.enough(run, brief=True):
                break
            rate *= EXACT_STEP
            run = play_exactly(search, served.shape, rate)
        proof = ExactProof(rate, run.all.share, longest_kept(run), run.all.arrived)
        played[str(served.shape)] = proof
        if search.trials.enough(run, brief=True):
            again.append(ServedRate(served.shape, rate, run))
    if not again:
        lowest = ", ".join(
            f"{each.rate:.3g} ({each.share:.0%}, {each.longest:.0%})" for each in played.values()
        )
        raise UsageError(
            f"--exact: with vLLM's own schedulers none of the best fleets has "
            f"{search.question.share:.0%} of all and of the longest requests in time, at {lowest} "
            "requests/s; give looser targets, or leave --exact out"
        )
    return rank_fleets(again)


def play_exactly(search: FleetSearch, shape: FleetShape, rate: float) -> FlowResult:
    """Play a fleet with real schedulers and a draw that the search has not used."""
    from proxy.config import FleetConfig
    from vllm_sched.sim.engines.exact_engine import ExactEngine
    from vllm_sched.sim.fleet.fleet import SimulatedFleet

    question = search.question
    config = FleetConfig(**shape.to_fleet(question.machine, "model", question.machine.gpus))
    models = {each.model.name: each.model for each in shape.placed(question.machine)}
    fleet = SimulatedFleet(config, models, ExactEngine, seed=question.seed)
    count = min(max(round(rate * EXACT_DURATION_S), EXACT_REQUESTS), MAX_EXACT_REQUESTS)

    def told(_now: float, _sent: int, done: int) -> None:
        search.note(f"exactly: {shape} at {rate:.3g}/s: {done:,} of {count:,} requests")

    told(0.0, 0, 0)
    played = fleet.play(question.schedule(rate, count, question.draws + 1), told)
    return count_outcomes(search, played.outcomes, played.duration)


def count_outcomes(
    search: FleetSearch, outcomes: Sequence[Outcome], duration_s: float
) -> FlowResult:
    total, classes, gaps = ClassFigures(), dict[str, ClassFigures](), QuantileSketch()
    for each in outcomes:
        of_class = classes.setdefault(search.trials.class_of(each.prompt_tokens), ClassFigures())
        for figures in (total, of_class):
            _count(figures, each, search)
        for gap in each.itls if each.good else ():
            gaps.add(gap)
    span, trend = max((each.at for each in outcomes), default=0.0), Trend()
    for each in outcomes:
        if each.good and each.at >= WARM_SHARE * span:
            trend.add(each.at, each.ttft)
    refused = total.arrived - total.done
    return FlowResult(total, classes, refused, span, duration_s, gaps, trend.growth)


def _count(figures: ClassFigures, outcome: Outcome, search: FleetSearch) -> None:
    figures.arrived += 1
    if not outcome.good:
        return
    targets = search.question.targets
    met = targets.met_by(outcome)
    borne = Targets(search.trials.borne_s(outcome.prompt_tokens), targets.tpot, targets.itl)
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


# Fleet file


def fleet_of(found: FleetPlan, model: str, folder: Path) -> dict[str, Any]:
    """Return the content of the best fleet's file, which will be in `folder`."""
    machine = found.question.machine
    named = (name for part, name in MODEL_NAMES.items() if part in machine.profile)
    machine = replace(machine, profile=_seen_from(folder, machine.profile))
    return found.best.shape.to_fleet(machine, model or next(named, "model"), found.gpus_each)


def _seen_from(folder: Path, profile: str) -> str:
    if not profile.endswith(".json") or Path(profile).is_absolute():
        return profile
    # Resolve links: `..` of a linked folder is the parent of its target.
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
    targets = " ".join(
        f"{name}:{value:g}"
        for name, value in found.question.targets.as_ms().items()
        if value is not None
    )
    file = shlex.quote(str(path))
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
    # The command may contain file names with arbitrary bytes.
    write_whole(path, text, errors="backslashreplace")
