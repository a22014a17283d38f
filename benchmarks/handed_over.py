"""Simulate what `disaggregate_above: auto` hands over, and its effect on streams and short prompts.

    python -m benchmarks.handed_over

A prefill and a decode worker of the tiny model run in virtual time, with vLLM's schedulers and the
router's core. Step times were measured on one processor; transfers take no time. Prompts of 100
tokens arrive twice a second, prompts of 12,000 tokens as each row says. In the last rows two long
prompts arrive together, then eight short ones, while four streams run. The output is the same on
any machine.
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
DURATION_S, SHORTS_RATE = 300.0, 2.0
BLOCK_INTERVAL_S, BLOCK_LONGS, BLOCK_SHORTS, BLOCKS = 7.0, 2, 8, 9
STREAMS, STREAM_TOKENS = 4, 16_000
PREFILL_DECODE, GENERAL = ("prefill", "decode"), ("general", "general")


@dataclass(frozen=True)
class Scene:
    """A row of the table."""

    longs: str
    requests: Sequence[Request]
    output: int
    slots: int = 256
    roles: tuple[str, str] = PREFILL_DECODE


def _times(rng: random.Random, rate: float) -> Iterator[float]:
    gaps = (rng.expovariate(rate) for _ in repeat(None))
    return takewhile(lambda at: at < DURATION_S, accumulate(gaps))


def at_rate(rate: float, output: int) -> list[Request]:
    """Return long and short prompts with random arrivals."""
    rng = random.Random(1)
    longs = [Request(at, LONG, LONG_TOKENS, output) for at in _times(rng, rate)]
    shorts = [Request(at, SHORT, SHORT_TOKENS, output) for at in _times(rng, SHORTS_RATE)]
    return sorted((*longs, *shorts), key=lambda request: request.at)


def in_blocks(output: int) -> list[Request]:
    """Return streams, and blocks of long prompts that are followed by short ones."""
    requests = [Request(0.1 * n, STREAM, SHORT_TOKENS, STREAM_TOKENS) for n in range(STREAMS)]
    for at in (BLOCK_INTERVAL_S * (n + 1) for n in range(BLOCKS)):
        requests += [Request(at, LONG, LONG_TOKENS, output)] * BLOCK_LONGS
        requests += [Request(at + 0.01, SHORT, SHORT_TOKENS, output)] * BLOCK_SHORTS
    return requests


SCENES = (
    *(
        Scene(f"{rate:g}/s", at_rate(rate, output), output, slots)
        for rate, output, slots in ((0.2, 100, 256), (0.45, 100, 4), (0.35, 400, 8))
    ),
    Scene("two at once", in_blocks(16), 16),
    Scene("two at once, general workers, least_loaded", in_blocks(16), 16, roles=GENERAL),
)


def play(scene: Scene) -> PlayedFleet:
    """Simulate a scene."""
    disaggregated = scene.roles == PREFILL_DECODE
    worker = WorkerModel(
        name="", time=ONE_PROCESSOR, max_model_len=16_384, kv_tokens=65_536, block_tokens=32,
        max_num_batched_tokens=512, prefix_caching=False, async_scheduling=False,
        transfers=disaggregated,
    )  # fmt: skip
    config = FleetConfig.model_validate(
        {
            "model": "tiny",
            "workers": [
                {"name": f"{role}-{n}", "role": role, "max_model_len": 16_384, "profile": "tiny",
                 "launch": {"args": [f"--max-num-seqs={scene.slots}"]}}
                for n, role in enumerate(scene.roles)
            ],
            **({"transfer": "nixl"} if disaggregated else {"routing": {"policy": "least_loaded"}}),
        }
    )  # fmt: skip
    models = {
        config_worker.name: replace(
            worker,
            name=config_worker.name,
            max_num_seqs=256 if config_worker.role == "prefill" else scene.slots,
        )
        for config_worker in config.workers
    }
    return SimulatedFleet(config, models, ExactEngine).play(
        Schedule(source=Listed(*scene.requests))
    )


def row(scene: Scene, outcomes: Iterable[Outcome]) -> list[str]:
    by_class: dict[str, list[Outcome]] = {LONG: [], SHORT: [], STREAM: []}
    for outcome in outcomes:
        by_class[outcome.klass].append(outcome)
    handed = sum(">" in outcome.worker for outcome in by_class[LONG])
    return [
        scene.longs,
        str(scene.output),
        str(scene.slots),
        _ttft(by_class[LONG]),
        _ttft(by_class[SHORT], tail=True),
        _gap(by_class[SHORT]) + (f"; streams {_gap(by_class[STREAM])}" if by_class[STREAM] else ""),
        f"{handed} of {len(by_class[LONG])}",
    ]


def _ttft(outcomes: Sequence[Outcome], *, tail: bool = False) -> str:
    ttfts = [outcome.ttft for outcome in outcomes if outcome.good]
    text = f"{fmean(ttfts):.2f}"
    text += f" / {percentile(ttfts, 99):.2f} s" if tail else " s"
    failed = len(outcomes) - len(ttfts)
    return text + (f"; {failed} of {len(outcomes)} unanswered" if failed else "")


def _gap(outcomes: Iterable[Outcome]) -> str:
    gaps = [gap for outcome in outcomes for gap in outcome.itls]
    return f"{(percentile(gaps, 99) or 0.0) * 1e3:.0f} ms"


def main() -> None:
    titles = ("long prompts", "output", "slots", "TTFT of longs, mean", "of shorts, mean / p99")
    print("|".join(("", *titles, "ITL p99 of shorts", "handed over", "")))
    for scene in SCENES:
        print("|".join(("", *row(scene, play(scene).outcomes), "")), flush=True)


if __name__ == "__main__":
    main()
