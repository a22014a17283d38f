"""How long those whom a policy holds wait in a real worker, beside the bound that it promises.

    python -m benchmarks.starvation

Shorts never stop, and each policy would hold somebody for as long as they come. Two workers of the
tiny model for each line of `SCENES`: in one the bound is a few seconds, in the other it is never
met, and shows that the shorts would really go on. Waits are the engine's own, from its trace, from
a request's coming to the first step that computes anything of it; beside them stands what the
worker says on its /metrics. There are slots for everybody: nobody waits for one. Steps are full:
what keeps the shorts waiting is the engine, not the servers and clients around it.

A policy promises that it holds nobody beyond its bound; who is let in then still waits for the step
in progress, and for those overdue before him. So a second more counts as late here, and less than
the bound as not held. The exit status says whether anybody was either, or was let in without a
bound.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final

from prometheus_client.parser import text_string_to_metric_families as read_text
from rich import box
from rich.console import Console
from rich.table import Table

from vllm_sched.bench.client.wire import COMPLETIONS, Address, Wire, WireError
from vllm_sched.bench.compare.compare import ProgressReporter, running
from vllm_sched.bench.compare.runner import NO_REUSE, request_body
from vllm_sched.bench.compare.workloads import TOKEN_IDS
from vllm_sched.bench.results import engine_trace
from vllm_sched.bench.results.engine_trace import PREFILL, WAITING
from vllm_sched.errors import VllmSchedError
from vllm_sched.workers.launch import Side, Worker, trace_flags, tracing, worker
from vllm_sched.workers.tiny_model import tiny_model

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from vllm_sched.bench.results.engine_trace import Stories

SLOTS, CROWD = 64, 48  # places in the worker, and shorts that are not done at all times, at most
NEVER_S = 1e6
LATE_S = 1.0  # that a step, and what the machine does meanwhile, may add to a bound
SOON_S = 0.05  # by which clocks may differ
TIMEOUT_S = 600.0  # longer than any scene
LOOK_S, REST_S = 0.2, 1.0  # the worker writes its page as often; between two rounds
LONG_ENOUGH = 2.5  # bounds that one is looked at without any
WIDTH = 110  # in a file
FLAGS = (
    "--max-num-seqs", str(SLOTS), "--max-num-batched-tokens", "512", "--max-model-len", "16384",
    "--no-enable-prefix-caching",
)  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """A kind of request."""

    what: str
    prompt_tokens: int
    lane: str = ""
    output_tokens: int = 4


@dataclass(frozen=True)
class Scene:
    """Policies, those that they hold, and those that never stop."""

    policies: Mapping[str, Mapping[str, object]]
    bounds: tuple[tuple[str, str], ...]  # of which policy, and the setting's name
    held: tuple[Asked, ...]  # who come at the same time, in each round
    shorts: Asked
    before: tuple[Asked, ...] = ()  # who are being read all the time
    crowd: int = CROWD  # shorts

    def side(self, bound_s: float) -> Side:
        """Return what a worker runs."""
        settings = {name: dict(given) for name, given in self.policies.items()}
        for policy, key in self.bounds:
            settings[policy][key] = bound_s
        return Side.of(settings)


# A long prompt that is being read has two tokens of each step, so it is read for longer than any
# scene takes, on fast machines too.
SLOWLY: Final = {"long_prefill_share": 0.005}
# Steps are brief: of very short prompts the server could not bring as many as an engine reads.
NOT_LONG: Final = {"long_prefill_token_threshold": 4500}
ANCIENT: Final = Asked("being read", 12_000)
SCENES: Final = {
    "long_prompt": Scene(
        {"long_prompt": SLOWLY | NOT_LONG},
        (("long_prompt", "max_wait_s"),),
        # As many as there are places for those who are overdue.
        (Asked("long", 8000),) * 3,
        Asked("short", 2000),
        (ANCIENT,),
        # Who is overdue goes by its arrival: of those who came before it there are to be none left.
        crowd=20,
    ),
    "lanes": Scene(
        {"lanes": {}},
        (("lanes", "normal_max_wait_s"), ("lanes", "batch_max_wait_s")),
        (Asked("normal", 200), Asked("batch", 200, "batch")),
        Asked("urgent", 4000, "urgent"),
    ),
    "lanes, long_prompt": Scene(
        {"lanes": {}, "long_prompt": SLOWLY | NOT_LONG},
        (("lanes", "batch_max_wait_s"), ("long_prompt", "max_wait_s")),
        # Held by both, whose bounds are not to add up.
        (Asked("long batch", 8000, "batch"),),
        Asked("urgent", 4000, "urgent"),
        (Asked("being read", 12_000, "urgent"),),
    ),
}


@dataclass
class Waits:
    """What became of those of one kind that a policy holds."""

    what: str
    waited_s: list[float] = field(default_factory=list)  # who began
    still_s: list[float] = field(default_factory=list)  # who had not, when they were given up


@dataclass
class Told:
    """What the worker itself says, added up."""

    released: float = 0.0  # for their long wait
    held_s: float = 0.0
    held: float = 0.0  # so many, of those that began
    fewest_waiting: float = float("inf")  # of the shorts, when it was looked at
    most_running: float = 0.0


@dataclass
class Played:
    """One worker's part of a scene."""

    kinds: dict[str, Waits]
    told: Told


# The worker's page


def added_up(page: str, name: str, **labels: str) -> float:
    """Add up the series of one name that have these labels."""
    return sum(
        sample.value
        for family in read_text(page)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


class Page:
    """Looks at /metrics, and keeps what is told."""

    def __init__(self, wire: Wire, scene: Scene) -> None:
        self._wire = wire
        self.told = Told()
        self._lane = scene.shorts.lane or "short"
        self._policy = next(iter(scene.policies))

    async def look(self) -> Told:
        """Look once."""
        page = (await self._wire.get("/metrics", TIMEOUT_S)).decode()
        told = self.told
        ours = {"policy": self._policy}  # where two hold somebody, both release him
        released = added_up(page, "vllm_sched_starvation_releases_total", **ours)
        if released < told.released:
            raise VllmSchedError(
                f"{self._wire.address}/metrics: starvation_releases fell to {released:g}:\n"
                f"{page[:500]}"
            )
        told.released = released
        told.held_s = added_up(page, "vllm_sched_hold_seconds_sum", **ours)
        told.held = added_up(page, "vllm_sched_hold_seconds_count", **ours)
        waiting = added_up(page, "vllm_sched_requests_waiting", lane=self._lane, **ours)
        told.fewest_waiting = min(told.fewest_waiting, waiting)
        among = added_up(page, "vllm_sched_requests_running", **ours)
        told.most_running = max(told.most_running, among)
        return told


# Who asks


class Clients:
    """Those of one worker."""

    def __init__(self, wire: Wire, model: str, seed: int) -> None:
        self._wire, self._model = wire, model
        self._dice = random.Random(seed)
        self.answered = 0

    async def ask(self, asked: Asked, name: str = "") -> None:
        """Ask once, and wait for the end."""
        prompt = self._dice.choices(TOKEN_IDS, k=asked.prompt_tokens)
        body = request_body(self._model, prompt, asked.output_tokens, asked.lane)
        await self._wire.stream(COMPLETIONS, body, lambda _: None, TIMEOUT_S, request_id=name)
        self.answered += 1

    async def go_on(self, asked: Asked) -> None:
        """Ask the same again and again."""
        while True:
            await self.ask(asked)


@asynccontextmanager
async def flooded(clients: Clients, scene: Scene) -> AsyncIterator[None]:
    """Have the shorts come all the time, and nobody any more afterwards."""
    kinds = [*scene.before, *[scene.shorts] * scene.crowd]
    tasks = [asyncio.create_task(clients.go_on(each)) for each in kinds]
    try:
        while clients.answered < scene.crowd // 2:
            await asyncio.sleep(LOOK_S)
            whole(tasks)
        yield
        whole(tasks)
    finally:
        await given_up(tasks)


def whole(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Raise what one of them failed by."""
    for task in tasks:
        if task.done():
            task.result()


async def given_up(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Hang up."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


# A scene


async def play(scene: Scene, each: Worker, trace: Path, rounds: int, look_s: float) -> Played:
    """Play the rounds on one worker; each until all were let in, or for so long."""
    names: dict[str, str] = {}
    with closing(Wire(Address.parse(each.url), NO_REUSE)) as wire:
        clients = Clients(wire, str(tiny_model()), seed=1)
        async with flooded(clients, scene):
            page = Page(wire, scene)
            await page.look()
            for number in range(1, rounds + 1):
                come = {f"round{number}-{at}": held for at, held in enumerate(scene.held)}
                names |= {name: held.what for name, held in come.items()}
                await one_round(clients, page, come, look_s)
                await asyncio.sleep(REST_S)
            await page.look()
    stories = await asyncio.to_thread(engine_trace.fetch, each, trace)
    return Played(waits_of(stories, names), page.told)


async def one_round(clients: Clients, page: Page, come: Mapping[str, Asked], look_s: float) -> None:
    """Let some come who are held, until all of them are let in."""
    wanted = page.told.released + len(come)
    tasks = [asyncio.create_task(clients.ask(held, name)) for name, held in come.items()]
    try:
        async with asyncio.timeout(look_s):
            while (await page.look()).released < wanted:
                await asyncio.sleep(LOOK_S)
                whole(tasks)
    except TimeoutError:
        pass
    finally:
        await given_up(tasks)


def waits_of(stories: Stories, names: Mapping[str, str]) -> dict[str, Waits]:
    """Read how long each waited until the first step with anything of it."""
    kinds = {what: Waits(what) for what in names.values()}
    for name, what in names.items():
        phases = stories.get(name, ())
        waiting = sum(phase.end - phase.start for phase in phases[:1] if phase.name == WAITING)
        begun = any(phase.name == PREFILL for phase in phases)
        (kinds[what].waited_s if begun else kinds[what].still_s).append(waiting)
    return kinds


def wrongs(name: str, bounded: Played, unbounded: Played, bound_s: float) -> Iterator[str]:
    """Say what was not as it is promised, or not what was to be shown."""
    for kind in bounded.kinds.values():
        who = f"{name}, {kind.what}"
        if kind.still_s:
            yield f"{who}: {len(kind.still_s)} were never let in"
        if kind.waited_s and max(kind.waited_s) > bound_s + LATE_S:
            yield f"{who}: one waited {max(kind.waited_s):.2f} s, the bound is {bound_s:g} s"
        if kind.waited_s and min(kind.waited_s) < bound_s - SOON_S:
            yield f"{who}: one waited {min(kind.waited_s):.2f} s, so it was not held"
    for kind in unbounded.kinds.values():
        if kind.waited_s:
            yield f"{name}, {kind.what}: without a bound {len(kind.waited_s)} were let in"
    came = sum(len(kind.waited_s) for kind in bounded.kinds.values())
    if bounded.told.released != came:
        yield f"{name}: the worker says that {bounded.told.released:g} of {came} were released"
    if unbounded.told.released:
        yield f"{name}: the worker released {unbounded.told.released:g} without a bound"
    if min(bounded.told.fewest_waiting, unbounded.told.fewest_waiting) < 1:
        yield f"{name}: at times none of the shorts waited, so that nobody was held for them"
    if (most := max(bounded.told.most_running, unbounded.told.most_running)) >= SLOTS:
        yield f"{name}: {most:g} ran at once, so somebody may have waited for a slot"


def table(bound_s: float) -> Table:
    """Lay out the head."""
    layout = Table(box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left")
    layout.title = f"a bound of {bound_s:g} s, shorts that never stop"
    for heading in ("policies", "held"):
        layout.add_column(heading)
    for heading in ("times", "waited, least", "mean", "most", "without a bound"):
        layout.add_column(heading, justify="right")
    return layout


def add(layout: Table, name: str, bounded: Played, unbounded: Played) -> None:
    """Lay out a scene."""
    for what, kind in bounded.kinds.items():
        times = sorted(kind.waited_s)
        shown = [f"{each:.2f} s" for each in (times[0], fmean(times), times[-1])] if times else []
        still = unbounded.kinds[what].still_s
        waiting = f"{len(still)} wait after {min(still):.1f} s" if still else "was let in"
        layout.add_row(name, what, str(len(times)), *(shown or ["-"] * 3), waiting)


def page_says(name: str, told: Told, shorts: str = "shorts") -> str:
    """Say what stands on the worker's page."""
    mean = f"{told.held_s / told.held:.2f} s" if told.held else "none"
    return (
        f"{name}, by its /metrics: {told.released:g} starvation_releases, hold_seconds of "
        f"{told.held:g} with a mean of {mean}; whenever it was looked at {told.fewest_waiting:g} "
        f"or more {shorts} waited, and {told.most_running:g} or fewer of {SLOTS} slots were taken"
    )


async def survey(
    given: argparse.Namespace, console: Console, folder: Path
) -> tuple[dict[str, Any], list[str]]:
    """Play all scenes; the two workers of one start together."""
    found: dict[str, Any] = {}
    wrong: list[str] = []
    with ProgressReporter(console) as narrator:
        for name, scene in SCENES.items():
            if given.only not in name:
                continue
            made: list[tuple[Worker, Path]] = []
            for role, bound_s in (("bounded", given.bound), ("unbounded", NEVER_S)):
                trace = folder / f"{name}.{role}.json".replace(", ", "-")
                flags = [*FLAGS, *trace_flags(())]
                side = scene.side(bound_s)
                made.append((
                    worker(side, model=str(tiny_model()), flags=flags, name=role,
                           env=tracing(trace)),
                    trace,
                ))  # fmt: skip
            async with running([each for each, _ in made], narrator):
                narrator.step(f"{name}: {given.rounds} rounds with a bound of {given.bound:g} s")
                bounded = await play(
                    scene, *made[0], given.rounds, LONG_ENOUGH * given.bound + LATE_S
                )
                narrator.step(f"{name}: one without")
                unbounded = await play(scene, *made[1], 1, LONG_ENOUGH * given.bound)
            layout = table(given.bound)
            add(layout, name, bounded, unbounded)
            console.print(layout)
            said = page_says(name, bounded.told, f"{scene.shorts.what} ones")
            console.print(said, highlight=False)
            wrong += wrongs(name, bounded, unbounded, given.bound)
            found[name] = {"bounded": asdict(bounded), "unbounded": asdict(unbounded)}
    return found, wrong


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and judge."""
    options = argparse.ArgumentParser(prog="python -m benchmarks.starvation", description=__doc__)
    options.add_argument("--bound", type=float, default=4.0, help="seconds, of every policy")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--only", default="", help="scenes that have this in their names")
    options.add_argument("--save", type=Path, help="write the figures as JSON")
    given = options.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    try:
        with tempfile.TemporaryDirectory() as folder:
            found, wrong = asyncio.run(survey(given, console, Path(folder)))
    except (VllmSchedError, WireError) as error:
        console.print(str(error), style="red", markup=False, highlight=False)
        return 1
    for each in wrong:
        console.print(each, style="red", highlight=False)
    if given.save:
        given.save.write_text(json.dumps(found, indent=1) + "\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
