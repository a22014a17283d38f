"""Play sessions in closed loop on a fleet in virtual time, and measure turns and tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from benchmarks.agents.peers import CacheAware, WeightedScores
from benchmarks.agents.sessions import MAX_MODEL_LEN, Session, sessions
from benchmarks.agents.sides import SIDES, Side
from benchmarks.agents.targets import TPOT_S, Alone
from proxy.config import FleetConfig
from vllm_sched.bench.results.stats import percentile
from vllm_sched.bench.traffic.sessions.conversation import PlannedTurn
from vllm_sched.bench.traffic.types import Request
from vllm_sched.errors import UsageError
from vllm_sched.sim.engines.exact_engine import ExactEngine
from vllm_sched.sim.engines.fluid_engine import FluidEngine
from vllm_sched.sim.fleet.base_fleet import RequestFlight
from vllm_sched.sim.fleet.events import ARRIVAL_RANK
from vllm_sched.sim.fleet.fleet import SimulatedFleet
from vllm_sched.sim.fleet.models import worker_models
from vllm_sched.sim.types import Job

PROFILE: Final = "h200-qwen3-30b-a3b-fp8-tp2"
WORKERS: Final = 4
BLOCK_TOKENS: Final = 128
START_S: Final = 15.0  # between the first sessions, whose whole prompts are to be computed
WARM_UP_S: Final = 300.0  # after the last of them
Over: TypeAlias = Callable[[float], None]


class Served(NamedTuple):
    session: int
    turn: PlannedTurn
    at: float  # sent
    ttft: float
    tpot: float
    cached: int
    failed: bool
    worker: str


@dataclass(slots=True)
class Task:
    number: int
    session: Session
    began: float
    ended: float = 0.0


@dataclass(frozen=True, slots=True)
class Load:
    count: int  # sessions that begin after the first ones
    at_once: int
    seed: int
    fluid: bool = False
    slots: int | None = None  # of each worker, if not the side's


@dataclass(frozen=True, slots=True)
class Figures:
    goodput: float  # turns in time per second
    in_time: float  # share of turns
    turns_per_s: float
    task_p50: float
    task_p90: float
    stretch_p50: float  # of a task's time alone
    stretch_p90: float
    ttft_p50: float
    ttft_p90: float
    ttft_p99: float
    tpot_p90: float
    hit: float
    tokens_per_s: float
    failed: int
    late_ttft: float  # share of turns with a late first token
    late_first: float  # share of first turns that are late
    preemptions: int


class SessionFleet(SimulatedFleet):
    """Sends a turn when the last one has ended and its tool has run."""

    def __init__(self, side: Side, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._side = side
        self.alone = Alone(next(iter(self.models.values())))
        if side.deadlines:
            for engine in self.engines.values():
                submit = partial(self._submit, engine.submit)
                engine.submit = submit  # type: ignore[method-assign]
        self.served: list[Served] = []
        self.tasks: list[Task] = []
        self._under_way: dict[int, tuple[Task, PlannedTurn]] = {}
        self._open = 0
        self.last_start = 0.0

    def play_sessions(self, load: Load) -> None:
        queue = self._queue
        queue.schedule(0.0, partial(self._read_gauges, self.router))
        under_way, coming = sessions(load.at_once, load.count, load.seed)
        self._open = load.at_once
        for number, session in enumerate(under_way):
            resume = partial(self._begin, chain([session], coming))
            queue.schedule(START_S * number, resume, rank=ARRIVAL_RANK)
        while self._open:
            queue.step()

    def _begin(self, coming: Iterator[Session], now: float) -> None:
        session = next(coming, None)
        if session is None:
            self._open -= 1
            return
        self.last_start = now
        task = Task(len(self.tasks), session, now)
        self.tasks.append(task)

        def over(now: float) -> None:
            task.ended = now
            self._begin(coming, now)

        self._send_turn(task, session, 0, over, now)

    def _send_turn(self, task: Task, turns: Session, at: int, over: Over, now: float) -> None:
        turn = turns[at]
        self._under_way[len(self._outcomes)] = task, turn
        left = 1 + len(turn.forks)

        def ended(now: float) -> None:
            """Go on when the answer is there and all sub-agents have ended."""
            nonlocal left
            left -= 1
            if left:
                return
            if at + 1 == len(turns):
                over(now)
            else:
                again = partial(self._send_turn, task, turns, at + 1, over)
                self._queue.schedule(now + turns[at + 1].think_s, again, rank=ARRIVAL_RANK)

        def answered(now: float) -> None:
            for fork in turn.forks:
                self._send_turn(task, fork, 0, ended, now)
            ended(now)

        self._arrive(turn.request, now, answered)

    def _arrive(self, request: Request, now: float, ended: Over | None) -> None:
        if not self._side.sessions:
            request = replace(request, session="")
        super()._arrive(request, now, ended)

    def _submit(self, submit: Callable[[Job, float], None], job: Job, now: float) -> None:
        """Submit a request with its targets, as `router.pass_targets` sends them."""
        flight = self._flights[job.id]
        due = flight.outcome.at + self.alone.ttft_limit_s(flight.request)
        targets = {"deadline_ms": (due - now) * 1000, "tpot_ms": TPOT_S * 1000}
        submit(replace(job, extra_args=targets), now)

    def _end_request(self, flight: RequestFlight, now: float, *, pause_s: float = 0.0) -> None:
        task, turn = self._under_way.pop(flight.number)
        outcome = flight.outcome
        failed = bool(outcome.error) or not outcome.ticks
        self.served.append(
            Served(
                task.number, turn, outcome.at, 0.0 if failed else outcome.ttft,
                outcome.tpot or 0.0, flight.cached_tokens, failed, outcome.worker or "",
            )
        )  # fmt: skip
        super()._end_request(flight, now, pause_s=pause_s)


def fleet_of(side: Side, load: Load) -> SessionFleet:
    args = {"max-model-len": MAX_MODEL_LEN, "block-size": BLOCK_TOKENS}
    config = FleetConfig.model_validate(
        {
            "model": "m",
            "workers": [
                {
                    "name": f"w{n}", "profile": PROFILE,
                    "max_requests": load.slots or side.max_requests,
                    "launch": {
                        "args": [f"--{key}={value}" for key, value in args.items()],
                        "policies": side.policies,
                    },
                }
                for n in range(WORKERS)
            ],
            "router": {"queue": {"max_wait_s": 600}},
            "routing": dict(side.routing),
        }
    )  # fmt: skip
    models = worker_models(config, Path("fleet.yaml"))
    fleet = SessionFleet(side, config, models, FluidEngine if load.fluid else ExactEngine)
    if side.peer == "cache_aware":
        fleet.router.placer.rule = CacheAware()
    elif side.peer:
        fleet.router.placer.rule = WeightedScores(fleet.engines)
    return fleet


def play(job: tuple[str, Load]) -> Figures:
    """Return what a side does with a load."""
    side, load = job
    fleet = fleet_of(SIDES[side], load)
    fleet.play_sessions(load)
    return figures(fleet, load)


def figures(fleet: SessionFleet, load: Load) -> Figures:
    """Return the figures from the warm-up to the start of the last session."""
    start, end = START_S * load.at_once + WARM_UP_S, fleet.last_start
    seconds = end - start
    turns = [turn for turn in fleet.served if start <= turn.at < end]
    if not turns:
        raise UsageError(f"no turn was sent after the warm-up of {start:g} s; play more --sessions")
    late = [is_late(turn, fleet.alone) for turn in turns]
    judged = list(zip(turns, late, strict=True))
    good = sum(not (too_late or turn.failed or turn.tpot > TPOT_S) for turn, too_late in judged)
    late_firsts = [too_late for turn, too_late in judged if not turn.turn.request.turn]
    tasks = [task for task in fleet.tasks if task.began >= start]
    took = [task.ended - task.began for task in tasks]
    alone = [alone_s(task.session, fleet.alone) for task in tasks]
    stretch = [task / idle for task, idle in zip(took, alone, strict=True)]
    ttfts = [turn.ttft for turn in turns]
    prompts = sum(turn.turn.request.prompt_tokens for turn in turns)
    outputs = sum(turn.turn.request.output_tokens for turn in turns)
    engines = [engine.facts() for engine in fleet.engines.values()]

    def at(samples: Sequence[float], percent: float) -> float:
        return percentile(samples, percent) or 0.0

    return Figures(
        goodput=good / seconds,
        in_time=good / len(turns),
        turns_per_s=len(turns) / seconds,
        task_p50=at(took, 50),
        task_p90=at(took, 90),
        stretch_p50=at(stretch, 50),
        stretch_p90=at(stretch, 90),
        ttft_p50=at(ttfts, 50),
        ttft_p90=at(ttfts, 90),
        ttft_p99=at(ttfts, 99),
        tpot_p90=at([turn.tpot for turn in turns], 90),
        hit=sum(turn.cached for turn in turns) / prompts,
        tokens_per_s=(prompts + outputs) / seconds,
        failed=sum(turn.failed for turn in turns),
        late_ttft=sum(late) / len(turns),
        late_first=sum(late_firsts) / max(len(late_firsts), 1),
        preemptions=sum(facts.get("preemptions", 0) for facts in engines),
    )


def is_late(served: Served, alone: Alone) -> bool:
    return served.failed or served.ttft > alone.ttft_limit_s(served.turn.request)


def alone_s(session: Session, alone: Alone) -> float:
    """Return the time of a session on an idle worker with its cache, tools included.

    Sub-agents run side by side.
    """
    total_s = 0.0
    for turn in session:
        request = turn.request
        total_s += alone.turn_s(request)
        total_s += turn.think_s if request.turn else 0.0
        total_s += max((alone_s(fork, alone) for fork in turn.forks), default=0.0)
    return total_s
