"""From a traffic, so many GPUs and targets to a fleet, with what would be otherwise.

The search is by plain workers (`search`). Where vLLM is installed the best may be played again with
its real schedulers, and are then ordered by what those say.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

import yaml

from vllm_sched.errors import UsageError
from vllm_sched.sim.capacity import Capacity
from vllm_sched.sim.models import MACHINES, TRANSFER, of_profile
from vllm_sched.sim.search import Question, Search, Served, ordered
from vllm_sched.sim.shapes import ONE_POOL

if TYPE_CHECKING:
    from pathlib import Path

    from vllm_sched.cost.transfer import TransferTime
    from vllm_sched.sim.search import Tell
    from vllm_sched.sim.types import WorkerModel

NAMES: Final = {
    "-8b": "meta-llama/Llama-3.1-8B-Instruct",
    "-13b": "facebook/opt-13b",
    "-70b": "meta-llama/Llama-3.3-70B-Instruct",
}
SEARCHED: Final = 0.8  # the share of the work that is the search itself
EXACT_REQUESTS, MOST_EXACT_REQUESTS, EXACT_LASTS_S = 300, 1500, 30.0
EXACT_TRIES, EXACT_STEP = 5, 0.85


@dataclass(frozen=True, slots=True)
class Plan:
    """What was found."""

    question: Question
    gpus_each: int
    ranking: list[Served]  # the best of each family, best first
    more: Served | None  # with one worker more, and fewer
    fewer: Served | None
    capacity: Capacity
    prompt: float
    output: float
    runs: int
    exact: dict[str, tuple[float, float]]  # by shape: a rate, and the share in time

    @property
    def best(self) -> Served:
        """The fleet to take."""
        return self.ranking[0]

    @property
    def prefill_bytes_per_s(self) -> float:
        """Bytes a second that all hand-overs of the best rate would move."""
        return self.best.rate * self.prompt * self.question.machine.kv_token_bytes


def machine_of(profile: str, transfer: TransferTime = TRANSFER) -> tuple[WorkerModel, int]:
    """Return a worker of a profile, and how many GPUs it takes."""
    known = MACHINES.get(profile)
    return replace(of_profile(profile), transfer=transfer), known.gpus if known else 1


def workers_of(gpus: int, gpus_each: int, profile: str) -> int:
    """How many workers there are."""
    if gpus < gpus_each:
        raise UsageError(
            f"--gpus {gpus}: a worker of {profile} takes {gpus_each}; give {gpus_each} or more, or "
            "another --profile"
        )
    return gpus // gpus_each


def plan(
    question: Question,
    gpus: int,
    gpus_each: int,
    *,
    rate: float | None = None,
    exact: bool = False,
    tell: Tell = lambda _what, _share: None,
) -> Plan:
    """Find the best fleet; the error says what cannot be had."""
    if not question.targets:
        raise UsageError("--goodput: name the targets to plan for, as in ttft:3000 tpot:100")
    workers = workers_of(gpus, gpus_each, question.machine.profile)
    search = Search(question, tell)
    tell("an idle worker", 0.0)
    search.check()
    ranking = search.best(workers, (0.02, SEARCHED))
    if not ranking:
        raise UsageError(
            f"--goodput: no fleet of {workers} {question.machine.profile} serves "
            f"{question.source.name} at any rate; give looser targets"
        )
    if rate is not None:
        _check_rate(rate, ranking[0], gpus, gpus_each, question.machine.profile)
    tell("one worker more, and one fewer", SEARCHED)
    more = search.resized(ranking[0], workers + 1)
    fewer = search.resized(ranking[0], workers - 1)
    if fewer is None and workers > 1:  # one worker is no two pools
        fewer = next(iter(search.family(ONE_POOL, workers - 1, (SEARCHED, SEARCHED))), None)
    played: dict[str, tuple[float, float]] = {}
    if exact:
        require_vllm()
        ranking, played = _exactly(search, ranking, tell)
    traffic = search.traffic
    tell("done", 1.0)
    return Plan(
        question,
        gpus_each,
        ranking,
        more,
        fewer,
        Capacity.of(question.machine, traffic.prompt, traffic.output),
        traffic.prompt,
        traffic.output,
        search.runs,
        played,
    )


def _check_rate(rate: float, best: Served, gpus: int, gpus_each: int, profile: str) -> None:
    if best.rate >= rate:
        return
    # Larger fleets are used better, if anything.
    wanted = -(-best.shape.workers * rate // best.rate)
    raise UsageError(
        f"--request-rate {rate:g}: {gpus} GPUs of {profile} serve {best.rate:.3g} requests/s at "
        f"most ({best.shape}); give about --gpus {int(wanted) * gpus_each}, looser targets, or no "
        "rate to see that plan"
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
    search: Search, ranking: list[Served], tell: Tell
) -> tuple[list[Served], dict[str, tuple[float, float]]]:
    """Lower the rates of the first two until real schedulers serve them too."""
    played: dict[str, tuple[float, float]] = {}
    again: list[Served] = []
    for at, served in enumerate(ranking[:2]):
        tell(f"exactly: {served.shape}", SEARCHED + 0.1 * (at + 1))
        rate = served.rate
        share = play_exactly(search.question, served, rate)
        for _ in range(EXACT_TRIES - 1):
            if share >= search.question.share:
                break
            rate *= EXACT_STEP
            share = play_exactly(search.question, served, rate)
        played[str(served.shape)] = rate, share
        again.append(replace(served, rate=rate))
    return [*ordered(again), *ranking[2:]], played


def play_exactly(question: Question, served: Served, rate: float) -> float:
    """Return the share in time with real schedulers."""
    from proxy.config import FleetConfig
    from vllm_sched.sim.exact import ExactEngine
    from vllm_sched.sim.fleet import SimulatedFleet

    placed = served.shape.placed(question.machine)
    config = FleetConfig(**served.shape.to_fleet(question.machine, "model", 1))
    models = {each.model.name: each.model for each in placed}
    fleet = SimulatedFleet(config, models, ExactEngine, seed=question.seed)
    count = min(max(round(rate * EXACT_LASTS_S), EXACT_REQUESTS), MOST_EXACT_REQUESTS)
    played = fleet.play(question.schedule(rate, count))
    met = sum(map(question.targets.met_by, played.outcomes))
    return met / len(played.outcomes)


# As a fleet file


def fleet_of(found: Plan, model: str = "") -> dict[str, Any]:
    """Give the content of a fleet file for the best."""
    profile = found.question.machine.profile
    named = (name for part, name in NAMES.items() if part in profile)
    return found.best.shape.to_fleet(
        found.question.machine, model or next(named, "model"), found.gpus_each
    )


def write(found: Plan, path: Path, *, model: str, command: str) -> None:
    """Write the fleet file."""
    targets = " ".join(
        f"{name}:{value:g}"
        for name, value in found.question.targets.as_ms().items()
        if value is not None
    )
    head = [
        f"# {found.best.shape}",
        "#",
        f"# Planned for {found.question.source.name} within {targets}: serves about "
        f"{found.best.rate:.3g} requests/s. By",
        f"#     {command}",
        "#",
        f"#     vllm-sched check {path.name}",
        f"#     vllm-sched simulate {path.name} --workload {found.question.source.name}",
        "#",
        "# To run it give each worker the url where it listens; or, with all GPUs in this machine,",
        "# its own of them under launch.env (CUDA_VISIBLE_DEVICES), and `vllm-sched up`.",
    ]
    content = yaml.safe_dump(fleet_of(found, model), sort_keys=False, width=100)
    path.write_text("\n".join(head) + "\n" + content)
