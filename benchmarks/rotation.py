"""Compare `rotation` with vLLM's scheduler: real schedulers in virtual time, 8B on an H100.

    python -m benchmarks.rotation

Figures are relative to vLLM's scheduler, medians over the seeds. The output is the same on any
machine.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from statistics import fmean, median
from typing import Any, Final, NamedTuple, TypeAlias

from benchmarks.agreement import by_job
from benchmarks.frontier.cells import MACHINES, MAX_MODEL_LEN, UPSTREAM
from benchmarks.frontier.loads import CHAT, LONG, LONG_OUTPUT_TOKENS, chats, prefill_s
from tests.sim.making import run
from vllm_sched.bench.results.stats import percentile
from vllm_sched.sim.engines.exact_engine import ExactEngine
from vllm_sched.sim.fleet.models import of_profile
from vllm_sched.sim.types import Job, WorkerModel

MACHINE, SEEDS = "H100 8B", 5
EQUAL_TOKENS, EQUAL_PROMPTS = 4_000, 8
DOCUMENT_TOKENS, DOCUMENTS = 4_500, 24
# Prompts of many lengths, and the share of the time in which they are computed.
TOKENS, PROMPTS, SHARE = (2_000, 40_000), 60, 0.8
Policies: TypeAlias = Mapping[str, Mapping[str, Any]]
ROTATION: Final[Policies] = {"rotation": {}}
LONG_ABOVE_A_STEP: Final[Policies] = {"long_prompt": {"long_prefill_token_threshold": 2048}}
VARIANTS: Final[Mapping[str, Policies]] = {
    UPSTREAM: {},
    "long_prompt": {"long_prompt": {}},
    "long_prompt 2048": LONG_ABOVE_A_STEP,
    "rotation": ROTATION,
    "rotation, long_prompt": {**ROTATION, "long_prompt": {}},
    "rotation, long_prompt 2048": {**ROTATION, **LONG_ABOVE_A_STEP},
}
Arrivals: TypeAlias = Iterator[tuple[float, Job]]


def equal(model: WorkerModel, rng: random.Random) -> Arrivals:
    """Yield equal prompts at the same time."""
    del model
    for number in range(EQUAL_PROMPTS):
        yield 0.0, document(number, EQUAL_TOKENS, rng)


def mixed(model: WorkerModel, rng: random.Random) -> Arrivals:
    """Yield prompts of very different lengths at random times."""
    least, most = TOKENS
    lengths = [round(least * (most / least) ** rng.random()) for _ in range(PROMPTS)]
    gap_s, now = fmean(prefill_s(model, tokens) for tokens in lengths) / SHARE, 0.0
    for number, tokens in enumerate(lengths):
        yield now, document(number, tokens, rng)
        now += rng.expovariate(1 / gap_s)


def beside_chats(model: WorkerModel, rng: random.Random) -> Arrivals:
    """Yield chats, and documents that arrive together."""
    whole_s = DOCUMENTS * prefill_s(model, DOCUMENT_TOKENS)
    for number in range(DOCUMENTS):
        yield whole_s / 4, document(number, DOCUMENT_TOKENS, rng)
    yield from chats(model, rng, 2 * whole_s)


def document(number: int, tokens: int, rng: random.Random) -> Job:
    name = f"{LONG}{number}"
    return Job(name, tokens, LONG_OUTPUT_TOKENS, text=rng.getrandbits(60), klass=LONG)


class Load(NamedTuple):
    """A load, and the token budget of the worker."""

    arrivals: Callable[[WorkerModel, random.Random], Arrivals]
    budget: int


LOADS: Final[Mapping[str, Load]] = {
    f"{EQUAL_PROMPTS} prompts of {EQUAL_TOKENS:,} tokens": Load(equal, 512),
    "prompts of {:,} to {:,} tokens".format(*TOKENS): Load(mixed, 2_048),
    f"chats beside {DOCUMENTS} documents of {DOCUMENT_TOKENS:,} tokens": Load(beside_chats, 2_048),
}


class Figures(NamedTuple):
    """Times to first token in seconds; NaN without such requests."""

    spread: float  # the last less the first, of prompts
    mean: float
    longest: float
    chats_p99: float


HEADINGS = ("last less first", "mean", "maximum", "chats' p99")


def play(load: Load, policies: Policies, seed: int) -> Figures:
    model = replace(
        of_profile(MACHINES[MACHINE]),
        max_num_seqs=256,
        max_num_batched_tokens=load.budget,
        max_model_len=MAX_MODEL_LEN,
        policies=policies,
    )
    arrivals = sorted(load.arrivals(model, random.Random(seed)), key=lambda arrival: arrival[0])
    times = by_job(run(ExactEngine(model), arrivals))
    ttfts: dict[str, list[float]] = {LONG: [], CHAT: []}
    for at, job in arrivals:
        ttfts[job.klass].append(times[job.id][0] - at)
    longs, p99 = ttfts[LONG], percentile(ttfts[CHAT], 99)
    none = float("nan")
    return Figures(max(longs) - min(longs), fmean(longs), max(longs), none if p99 is None else p99)


def ratios(load: Load, seeds: int) -> dict[str, Figures]:
    """Return each variant's figures over those of vLLM's scheduler."""
    by_variant = {
        name: [play(load, policies, seed) for seed in range(seeds)]
        for name, policies in VARIANTS.items()
    }
    base = by_variant[UPSTREAM]
    return {
        name: Figures(
            *(
                median(own[at] / theirs[at] for own, theirs in zip(rows, base, strict=True))
                for at in range(len(HEADINGS))
            )
        )
        for name, rows in by_variant.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=SEEDS)
    args = parser.parse_args()
    for title, load in LOADS.items():
        print(f"{title}, budget {load.budget} | {' | '.join(HEADINGS)}")
        for name, figures in ratios(load, args.seeds).items():
            print(
                name,
                *("-" if figure != figure else f"{figure:.2f}x" for figure in figures),
                sep=" | ",
            )


if __name__ == "__main__":
    main()
