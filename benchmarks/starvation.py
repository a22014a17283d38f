"""Measure how long requests that a policy holds wait in a real worker, beside the policy's bound.

    python -m benchmarks.starvation

Short requests arrive without end, so each policy would hold its requests forever. Each entry of
`SCENES` runs two workers of the tiny model: one with a bound of a few seconds, one with a bound
that is never reached, as a control. Waits are read from the engine's trace, from arrival to the
first step that computes part of the request; the worker's /metrics are printed beside them. There
are slots for all requests, and the engine's steps are full.

After its bound a request still waits for the step in progress and for overdue requests before it:
a wait is late above the bound plus one second. A request that waits less than the bound was not
held. The exit status is 1 if either happened, or if a request started without a bound.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from prometheus_client.parser import text_string_to_metric_families as read_text
from rich import box
from rich.console import Console
from rich.table import Table

from vllm_sched.bench.client.wire import COMPLETIONS, Address, Wire, WireError
from vllm_sched.bench.compare.compare import ProgressReporter, running
from vllm_sched.bench.compare.runner import NO_REUSE, request_body
from vllm_sched.bench.compare.workloads import TOKEN_IDS
from vllm_sched.bench.results import engine_trace
from vllm_sched.bench.results.engine_trace import PREFILL, WAITING, Stories
from vllm_sched.errors import VllmSchedError
from vllm_sched.workers.launch import Side, Worker, trace_flags, trace_variables, worker
from vllm_sched.workers.tiny_model import tiny_model

SLOTS, SHORTS = 64, 48  # of the worker; short requests in flight
NEVER_S = 1e6
LATE_S = 1.0  # that a step and the machine may add to a bound
CLOCK_TOLERANCE_S = 0.05
TIMEOUT_S = 600.0  # longer than any scene
POLL_S, PAUSE_S = 0.2, 1.0  # the worker updates its metrics as often; between two rounds
UNBOUNDED_FACTOR = 2.5  # bounds that the run without a bound lasts
CONSOLE_WIDTH = 110  # in a file
FLAGS = (
    "--max-num-seqs", str(SLOTS), "--max-num-batched-tokens", "512", "--max-model-len", "16384",
    "--no-enable-prefix-caching",
)  # fmt: skip


@dataclass(frozen=True)
class RequestKind:
    """The size and lane of a request."""

    what: str
    prompt_tokens: int
    lane: str = ""
    output_tokens: int = 4


@dataclass(frozen=True)
class Scene:
    """Policies, the requests that they hold, and the load that never ends."""

    policies: Mapping[str, Mapping[str, object]]
    bounds: tuple[tuple[str, str], ...]  # policy and the name of its setting
    held: tuple[RequestKind, ...]  # arrive together, in each round
    shorts: RequestKind
    background: tuple[RequestKind, ...] = ()  # prefilled all the time
    short_count: int = SHORTS

    def side(self, bound_s: float) -> Side:
        """Return a worker's policies with this bound."""
        settings = {name: dict(values) for name, values in self.policies.items()}
        for policy, key in self.bounds:
            settings[policy][key] = bound_s
        return Side.from_policies(settings)


# A running long prefill gets two tokens of each step, so it outlasts the scene on any machine.
SLOW_PREFILL: Final = {"long_prefill_share": 0.005}
# Shorts of 2,000 to 4,000 tokens: with smaller ones the server would be the bottleneck.
SHORTS_ARE_NOT_LONG: Final = {"long_prefill_token_threshold": 4500}
RUNNING_LONG: Final = RequestKind("being read", 12_000)
SCENES: Final = {
    "long_prompt": Scene(
        {"long_prompt": SLOW_PREFILL | SHORTS_ARE_NOT_LONG},
        (("long_prompt", "max_wait_s"),),
        # As many as there are places for overdue requests.
        (RequestKind("long", 8000),) * 3,
        RequestKind("short", 2000),
        (RUNNING_LONG,),
        # Overdue requests are ordered by arrival: no earlier short may be left at the bound.
        short_count=20,
    ),
    "lanes": Scene(
        {"lanes": {}},
        (("lanes", "normal_max_wait_s"), ("lanes", "batch_max_wait_s")),
        (RequestKind("normal", 200), RequestKind("batch", 200, "batch")),
        RequestKind("urgent", 4000, "urgent"),
    ),
    "lanes, long_prompt": Scene(
        {"lanes": {}, "long_prompt": SLOW_PREFILL | SHORTS_ARE_NOT_LONG},
        (("lanes", "batch_max_wait_s"), ("long_prompt", "max_wait_s")),
        # Held by both policies; their bounds must not add up.
        (RequestKind("long batch", 8000, "batch"),),
        RequestKind("urgent", 4000, "urgent"),
        (RequestKind("being read", 12_000, "urgent"),),
    ),
}


@dataclass
class Waits:
    """The waits of the held requests of one kind."""

    what: str
    waited_s: list[float] = field(default_factory=list)  # of started requests
    still_s: list[float] = field(default_factory=list)  # of requests cancelled before their start


@dataclass
class WorkerMetrics:
    """Sums over the worker's /metrics."""

    released: float = 0.0  # at their bound
    held_s: float = 0.0
    held: float = 0.0  # started requests
    fewest_waiting: float = float("inf")  # shorts, over all polls
    most_running: float = 0.0


@dataclass
class SceneResult:
    """The results of one worker in a scene."""

    kinds: dict[str, Waits]
    told: WorkerMetrics


def sum_of(page: str, name: str, **labels: str) -> float:
    """Return the sum of the samples of a metric that have these labels."""
    return sum(
        sample.value
        for family in read_text(page)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


class MetricsPoller:
    """Poll a worker's /metrics into `WorkerMetrics`."""

    def __init__(self, wire: Wire, scene: Scene) -> None:
        self._wire = wire
        self.metrics = WorkerMetrics()
        self._lane = scene.shorts.lane or "short"
        self._policy = next(iter(scene.policies))

    async def poll(self) -> WorkerMetrics:
        """Fetch /metrics once and return the updated sums."""
        page = (await self._wire.get("/metrics", TIMEOUT_S)).decode()
        metrics = self.metrics
        labels = {"policy": self._policy}  # two policies that hold a request both release it
        released = sum_of(page, "vllm_sched_starvation_releases_total", **labels)
        if released < metrics.released:
            raise VllmSchedError(
                f"{self._wire.address}/metrics: starvation_releases fell to {released:g}:\n"
                f"{page[:500]}"
            )
        metrics.released = released
        metrics.held_s = sum_of(page, "vllm_sched_hold_seconds_sum", **labels)
        metrics.held = sum_of(page, "vllm_sched_hold_seconds_count", **labels)
        waiting = sum_of(page, "vllm_sched_requests_waiting", lane=self._lane, **labels)
        metrics.fewest_waiting = min(metrics.fewest_waiting, waiting)
        running = sum_of(page, "vllm_sched_requests_running", **labels)
        metrics.most_running = max(metrics.most_running, running)
        return metrics


class Clients:
    """The clients of one worker."""

    def __init__(self, wire: Wire, model: str, seed: int) -> None:
        self._wire, self._model = wire, model
        self._rng = random.Random(seed)
        self.done = 0

    async def send(self, kind: RequestKind, name: str = "") -> None:
        """Send one request and read its response to the end."""
        prompt = self._rng.choices(TOKEN_IDS, k=kind.prompt_tokens)
        body = request_body(self._model, prompt, kind.output_tokens, kind.lane)
        headers = {"X-Request-Id": name}
        await self._wire.stream(COMPLETIONS, body, lambda _: None, TIMEOUT_S, headers=headers)
        self.done += 1

    async def send_forever(self, kind: RequestKind) -> None:
        """Send requests of one kind, one after the other."""
        while True:
            await self.send(kind)


@asynccontextmanager
async def background_load(clients: Clients, scene: Scene) -> AsyncIterator[None]:
    """Keep the scene's short and background requests in flight."""
    kinds = [*scene.background, *[scene.shorts] * scene.short_count]
    tasks = [asyncio.create_task(clients.send_forever(kind)) for kind in kinds]
    try:
        while clients.done < scene.short_count // 2:
            await asyncio.sleep(POLL_S)
            raise_failures(tasks)
        yield
        raise_failures(tasks)
    finally:
        await cancel(tasks)


def raise_failures(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Raise the exception of a task that failed."""
    for task in tasks:
        if task.done():
            task.result()


async def cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def play(
    scene: Scene, target: Worker, trace: Path, rounds: int, timeout_s: float
) -> SceneResult:
    """Play the rounds of a scene on one worker, each for at most the timeout."""
    names: dict[str, str] = {}
    with closing(Wire(Address.parse(target.url), NO_REUSE)) as wire:
        clients = Clients(wire, str(tiny_model()), seed=1)
        async with background_load(clients, scene):
            poller = MetricsPoller(wire, scene)
            await poller.poll()
            for number in range(1, rounds + 1):
                requests = {f"round{number}-{at}": held for at, held in enumerate(scene.held)}
                names |= {name: held.what for name, held in requests.items()}
                await play_round(clients, poller, requests, timeout_s)
                await asyncio.sleep(PAUSE_S)
            await poller.poll()
    stories = await asyncio.to_thread(engine_trace.fetch, target, trace)
    return SceneResult(waits_of(stories, names), poller.metrics)


async def play_round(
    clients: Clients, poller: MetricsPoller, requests: Mapping[str, RequestKind], timeout_s: float
) -> None:
    """Send requests that are held, and wait until all are released."""
    wanted = poller.metrics.released + len(requests)
    tasks = [asyncio.create_task(clients.send(held, name)) for name, held in requests.items()]
    try:
        async with asyncio.timeout(timeout_s):
            while (await poller.poll()).released < wanted:
                await asyncio.sleep(POLL_S)
                raise_failures(tasks)
    except TimeoutError:
        pass
    finally:
        await cancel(tasks)


def waits_of(stories: Stories, names: Mapping[str, str]) -> dict[str, Waits]:
    """Return the waits until the first step that computes part of each request, by kind."""
    kinds = {what: Waits(what) for what in names.values()}
    for name, what in names.items():
        phases = stories.get(name, ())
        waiting = sum(phase.end - phase.start for phase in phases[:1] if phase.name == WAITING)
        started = any(phase.name == PREFILL for phase in phases)
        (kinds[what].waited_s if started else kinds[what].still_s).append(waiting)
    return kinds


def failures(
    name: str, bounded: SceneResult, unbounded: SceneResult, bound_s: float
) -> Iterator[str]:
    """Yield each broken promise, and each reason why the scene shows nothing."""
    for kind in bounded.kinds.values():
        what = f"{name}, {kind.what}"
        if kind.still_s:
            yield f"{what}: {len(kind.still_s)} never started"
        if kind.waited_s and max(kind.waited_s) > bound_s + LATE_S:
            yield f"{what}: waited {max(kind.waited_s):.2f} s, the bound is {bound_s:g} s"
        if kind.waited_s and min(kind.waited_s) < bound_s - CLOCK_TOLERANCE_S:
            yield f"{what}: waited only {min(kind.waited_s):.2f} s, so it was not held"
    for kind in unbounded.kinds.values():
        if kind.waited_s:
            yield f"{name}, {kind.what}: {len(kind.waited_s)} started without a bound"
    started = sum(len(kind.waited_s) for kind in bounded.kinds.values())
    if bounded.told.released != started:
        yield f"{name}: /metrics count {bounded.told.released:g} of {started} as released"
    if unbounded.told.released:
        yield f"{name}: the worker released {unbounded.told.released:g} without a bound"
    if min(bounded.told.fewest_waiting, unbounded.told.fewest_waiting) < 1:
        yield f"{name}: at times no short request waited, so no request was held for one"
    if (most := max(bounded.told.most_running, unbounded.told.most_running)) >= SLOTS:
        yield f"{name}: {most:g} ran at once, so a request may have waited for a slot"


def make_table(bound_s: float) -> Table:
    layout = Table(box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left")
    layout.title = f"a bound of {bound_s:g} s, short requests without end"
    for heading in ("policies", "held"):
        layout.add_column(heading)
    for heading in ("requests", "shortest wait", "mean", "longest", "without a bound"):
        layout.add_column(heading, justify="right")
    return layout


def add_rows(layout: Table, name: str, bounded: SceneResult, unbounded: SceneResult) -> None:
    for what, kind in bounded.kinds.items():
        times = sorted(kind.waited_s)
        shown = (
            [f"{seconds:.2f} s" for seconds in (times[0], fmean(times), times[-1])] if times else []
        )
        still = unbounded.kinds[what].still_s
        waiting = f"{len(still)} wait after {min(still):.1f} s" if still else "started"
        layout.add_row(name, what, str(len(times)), *(shown or ["-"] * 3), waiting)


def format_metrics(name: str, metrics: WorkerMetrics, shorts: str = "short") -> str:
    """Return the worker's metrics as a sentence."""
    mean = f"{metrics.held_s / metrics.held:.2f} s" if metrics.held else "none"
    return (
        f"{name}, by its /metrics: {metrics.released:g} starvation_releases, hold_seconds of "
        f"{metrics.held:g} with a mean of {mean}; at each poll at least "
        f"{metrics.fewest_waiting:g} {shorts} requests waited, and at most "
        f"{metrics.most_running:g} of {SLOTS} slots were taken"
    )


async def run_scenes(
    args: argparse.Namespace, console: Console, folder: Path
) -> tuple[dict[str, Any], list[str]]:
    """Play the scenes; return their results and failures."""
    results: dict[str, Any] = {}
    failed: list[str] = []
    with ProgressReporter(console) as reporter:
        for name, scene in SCENES.items():
            if args.only not in name:
                continue
            made: list[tuple[Worker, Path]] = []
            for role, bound_s in (("bounded", args.bound), ("unbounded", NEVER_S)):
                trace = folder / f"{name}.{role}.json".replace(", ", "-")
                flags = [*FLAGS, *trace_flags(())]
                side = scene.side(bound_s)
                made.append((
                    worker(side, model=str(tiny_model()), flags=flags, name=role,
                           env=trace_variables(trace)),
                    trace,
                ))  # fmt: skip
            async with running([engine for engine, _ in made], reporter):
                reporter.step(f"{name}: {args.rounds} rounds with a bound of {args.bound:g} s")
                bounded = await play(
                    scene, *made[0], args.rounds, UNBOUNDED_FACTOR * args.bound + LATE_S
                )
                reporter.step(f"{name}: one round without a bound")
                unbounded = await play(scene, *made[1], 1, UNBOUNDED_FACTOR * args.bound)
            layout = make_table(args.bound)
            add_rows(layout, name, bounded, unbounded)
            console.print(layout)
            metrics = format_metrics(name, bounded.told, scene.shorts.what)
            console.print(metrics, highlight=False)
            failed += failures(name, bounded, unbounded, args.bound)
            results[name] = {"bounded": asdict(bounded), "unbounded": asdict(unbounded)}
    return results, failed


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the waits and failures; return 1 if there are failures."""
    options = argparse.ArgumentParser(prog="python -m benchmarks.starvation", description=__doc__)
    options.add_argument("--bound", type=float, default=4.0, help="bound of every policy, seconds")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--only", default="", help="run the scenes whose names contain this")
    options.add_argument("--save", type=Path, help="write the figures as JSON")
    args = options.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else CONSOLE_WIDTH)
    try:
        with tempfile.TemporaryDirectory() as folder:
            results, failed = asyncio.run(run_scenes(args, console, Path(folder)))
    except (VllmSchedError, WireError) as error:
        console.print(str(error), style="red", markup=False, highlight=False)
        return 1
    for failure in failed:
        console.print(failure, style="red", highlight=False)
    if args.save:
        args.save.write_text(json.dumps(results, indent=1) + "\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
