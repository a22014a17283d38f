"""Compare engines that know requests' deadlines and gaps with engines that do not.

    python -m benchmarks.engine_deadlines --seeds 1 2 3

Real schedulers in virtual time, with costs measured on an H100. A share of the requests is
tight, the others are loose; slots are short. The output is the share of each that met its deadline
for the first token, the share whose mean gap met its target, and the mean time to first token.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from benchmarks.agreement import by_job
from benchmarks.frontier.loads import chat_rate
from tests.sim.making import run
from vllm_sched.sim.engines.exact_engine import ExactEngine
from vllm_sched.sim.fleet.models import of_profile
from vllm_sched.sim.types import Job

PROFILES = "h100-llama-3.1-8b-bf16-tp1", "h100-qwen3-30b-a3b-bf16-tp1"
SLOTS = 24
TIGHT, LOOSE = "tight", "loose"
FIRST_S: Mapping[str, float] = {TIGHT: 1.0, LOOSE: 10.0}
EACH_S: Mapping[str, float] = {TIGHT: 0.03, LOOSE: 0.2}
BOTH: Mapping[str, Mapping[str, Any]] = {"lanes": {}, "long_prompt": {}}
CHUNKS: Mapping[str, Mapping[str, Any]] = {"long_prompt": {}, "chunk_budget": {"itl_ms": 30}}
VARIANTS: Mapping[str, tuple[Mapping[str, Mapping[str, Any]], tuple[str, ...]]] = {
    "lanes": ({"lanes": {}}, ()),
    "lanes, deadlines": ({"lanes": {}}, ("deadline_ms",)),
    "lanes, long_prompt": (BOTH, ()),
    "lanes, long_prompt, deadlines": (BOTH, ("deadline_ms",)),
    "chunk_budget": (CHUNKS, ()),
    "chunk_budget, gaps": (CHUNKS, ("tpot_ms",)),
}


def load(profile: str, seed: int, share: float, tight: float) -> list[tuple[float, Job]]:
    """Return arrivals in bursts, at this share of what the slots can serve."""
    rng, now = random.Random(seed), 0.0
    rate = share * chat_rate(of_profile(profile), SLOTS)
    arrivals = []
    for number in range(400):
        now += rng.gammavariate(0.25, 4 / rate)
        klass = TIGHT if rng.random() < tight else LOOSE
        prompt = rng.randint(4_000, 30_000) if rng.random() < 0.1 else rng.randint(60, 1_000)
        job = Job(
            f"r{number}", prompt, rng.randint(60, 240), text=rng.getrandbits(60), klass=klass,
            extra_args={"deadline_ms": FIRST_S[klass] * 1000, "tpot_ms": EACH_S[klass] * 1000},
        )  # fmt: skip
        arrivals.append((now, job))
    return arrivals


def play(
    profile: str, name: str, seed: int, share: float, tight: float
) -> dict[str, list[tuple[float, float]]]:
    """Return the time to first token and the mean gap of each request, by half."""
    policies, passed = VARIANTS[name]
    model = replace(
        of_profile(profile), max_num_seqs=SLOTS, max_num_batched_tokens=2048, policies=policies
    )
    arrivals = [
        (at, replace(job, extra_args={key: job.extra_args[key] for key in passed}))
        for at, job in load(profile, seed, share, tight)
    ]
    times = by_job(run(ExactEngine(model), arrivals))
    by_class: dict[str, list[tuple[float, float]]] = {TIGHT: [], LOOSE: []}
    for at, job in arrivals:
        own = times[job.id]
        by_class[job.klass].append((own[0] - at, (own[-1] - own[0]) / max(len(own) - 1, 1)))
    return by_class


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", default=PROFILES[0], choices=PROFILES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--loads", type=float, nargs="+", default=[0.6, 0.8, 1.0])
    parser.add_argument("--tight", type=float, default=0.5, help="share of tight requests")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS))
    args = parser.parse_args(argv)
    print("load  tight: first, gap met, TTFT mean  loose: the same")
    for share in args.loads:
        for name in args.variants:
            runs = [play(args.profile, name, seed, share, args.tight) for seed in args.seeds]
            figures = []
            for half in (TIGHT, LOOSE):
                seen = [times for one in runs for times in one[half]]
                figures += [
                    fmean(first <= FIRST_S[half] for first, _ in seen),
                    fmean(gap <= EACH_S[half] for _, gap in seen),
                    fmean(first for first, _ in seen),
                ]
            print(f"{share:4g}", *(f"{figure:7.3f}" for figure in figures), name, flush=True)


if __name__ == "__main__":
    main()
