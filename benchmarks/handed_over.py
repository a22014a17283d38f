"""What does `auto` hand over, and what do streams and shorts have of it?

    python -m benchmarks.handed_over

One prefill and one decode worker of the tiny model in virtual time, with vLLM's own schedulers and
the router's core; a step takes what was measured of one processor (docs/evaluation.md), a transfer
nothing. Prompts of 100 tokens come twice a second, prompts of 12,000 as each row says; of the last
rows two at once with eight of 100 on their heels, while four answers are written from beginning to
end. Prints a row for each, the same on any machine.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, repeat, takewhile
from statistics import fmean

from proxy.config import FleetConfig
from tests.sim.making import Listed
from vllm_sched.bench.results.outcome import Outcome
from vllm_sched.bench.results.stats import percentile
from vllm_sched.bench.traffic.schedule import Schedule
from vllm_sched.bench.traffic.types import Request
from vllm_sched.cost.step_time import StepTime
from vllm_sched.sim.engines.exact_engine import ExactEngine
from vllm_sched.sim.fleet.fleet import PlayedFleet, SimulatedFleet
from vllm_sched.sim.types import WorkerModel

ONE_PROCESSOR = StepTime(
    decode_fixed_s=3.52e-3, decode_s=96e-6, context_s=196e-9, prefill_fixed_s=5.63e-3,
    prefill_s=19e-6, pair_s=20e-9, read_s=1.43e-6, mixed_s=0.7e-3,
)  # fmt: skip
LONG, SHORT, STREAM = "long", "short", "stream"
LONG_TOKENS, SHORT_TOKENS = 12_000, 100
LASTS_S, SHORTS_RATE = 300.0, 2.0
EVERY_S, TOGETHER, HEELS, ROUNDS = 7.0, 2, 8, 9
STREAMS, STREAM_TOKENS = 4, 16_000
APART, ALIKE = ("prefill", "decode"), ("general", "general")


@dataclass(frozen=True)
class Scene:
    """A row of the table."""

    longs: str
    asked: Sequence[Request]
    output: int
    seats: int = 256
    roles: tuple[str, str] = APART


def _times(rng: random.Random, rate: float) -> Iterator[float]:
    gaps = (rng.expovariate(rate) for _ in repeat(None))
    return takewhile(lambda at: at < LASTS_S, accumulate(gaps))


def at_rate(rate: float, output: int) -> list[Request]:
    """Draw longs and shorts one by one."""
    rng = random.Random(1)
    longs = [Request(at, LONG, LONG_TOKENS, output) for at in _times(rng, rate)]
    shorts = [Request(at, SHORT, SHORT_TOKENS, output) for at in _times(rng, SHORTS_RATE)]
    return sorted((*longs, *shorts), key=lambda request: request.at)


def in_blocks(output: int) -> list[Request]:
    """Have longs come together, shorts on their heels, while streams run."""
    asked = [Request(0.1 * n, STREAM, SHORT_TOKENS, STREAM_TOKENS) for n in range(STREAMS)]
    for at in (EVERY_S * (n + 1) for n in range(ROUNDS)):
        asked += [Request(at, LONG, LONG_TOKENS, output)] * TOGETHER
        asked += [Request(at + 0.01, SHORT, SHORT_TOKENS, output)] * HEELS
    return asked


SCENES = (
    *(
        Scene(f"{rate:g}/s", at_rate(rate, output), output, seats)
        for rate, output, seats in ((0.2, 100, 256), (0.45, 100, 4), (0.35, 400, 8))
    ),
    Scene("two at once", in_blocks(16), 16),
    Scene("two at once, general workers, least_loaded", in_blocks(16), 16, roles=ALIKE),
)


def play(scene: Scene) -> PlayedFleet:
    """Play one."""
    apart = scene.roles == APART
    worker = WorkerModel(
        name="", time=ONE_PROCESSOR, max_model_len=16_384, kv_tokens=65_536, block_tokens=32,
        max_num_batched_tokens=512, prefix_caching=False, async_scheduling=False, transfers=apart,
    )  # fmt: skip
    config = FleetConfig.model_validate(
        {
            "model": "tiny",
            "workers": [
                {"name": f"{role}-{n}", "role": role, "max_model_len": 16_384, "profile": "tiny",
                 "launch": {"args": [f"--max-num-seqs={scene.seats}"]}}
                for n, role in enumerate(scene.roles)
            ],
            **({"transfer": "nixl"} if apart else {"routing": {"policy": "least_loaded"}}),
        }
    )  # fmt: skip
    models = {
        each.name: replace(
            worker, name=each.name, max_num_seqs=256 if each.role == "prefill" else scene.seats
        )
        for each in config.workers
    }
    return SimulatedFleet(config, models, ExactEngine).play(Schedule(source=Listed(*scene.asked)))


def row(scene: Scene, outcomes: Iterable[Outcome]) -> list[str]:
    """Say how a scene went."""
    of: dict[str, list[Outcome]] = {LONG: [], SHORT: [], STREAM: []}
    for each in outcomes:
        of[each.klass].append(each)
    handed = sum(">" in each.worker for each in of[LONG])
    return [
        scene.longs,
        str(scene.output),
        str(scene.seats),
        _waits(of[LONG]),
        _waits(of[SHORT], tail=True),
        _gap(of[SHORT]) + (f"; streams {_gap(of[STREAM])}" if of[STREAM] else ""),
        f"{handed} of {len(of[LONG])}",
    ]


def _waits(outcomes: Sequence[Outcome], *, tail: bool = False) -> str:
    waits = [each.ttft for each in outcomes if each.good]
    text = f"{fmean(waits):.2f}"
    text += f" / {percentile(waits, 99):.2f} s" if tail else " s"
    lost = len(outcomes) - len(waits)
    return text + (f"; {lost} of {len(outcomes)} unanswered" if lost else "")


def _gap(outcomes: Iterable[Outcome]) -> str:
    gaps = [gap for each in outcomes for gap in each.itls]
    return f"{(percentile(gaps, 99) or 0.0) * 1e3:.0f} ms"


def main() -> None:
    """Print the table."""
    titles = ("long prompts", "answers", "seats", "TTFT of longs, mean", "of shorts, mean / p99")
    print("|".join(("", *titles, "ITL p99 of shorts", "handed over", "")))
    for scene in SCENES:
        print("|".join(("", *row(scene, play(scene).outcomes), "")), flush=True)


if __name__ == "__main__":
    main()
