"""Compare orders of one tenant's waiting requests: agents' turns beside fresh long prompts.

    python -m benchmarks.turn_priority --seeds 1 2 3 --weights 0 0.5 1 2 4

The router's core and vLLM's schedulers run in virtual time, with costs measured on an H100: the
output is the same on any machine. Two workers take four requests each, so that requests wait in
the router. A weight counts the predicted prefill in a request's key; 0 is first come, first served.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any
from unittest.mock import patch

from proxy.config import FleetConfig
from proxy.core.queue import urgency
from vllm_sched.bench.results.outcome import Outcome
from vllm_sched.bench.results.stats import percentile
from vllm_sched.bench.traffic.schedule import Schedule
from vllm_sched.bench.traffic.types import Request, TrafficSource
from vllm_sched.sim.engines.fluid_engine import FluidEngine
from vllm_sched.sim.fleet.fleet import SimulatedFleet
from vllm_sched.sim.fleet.models import of_profile

WORKERS, SLOTS, SESSIONS = 2, 4, 8
PROFILE, CONTEXT, KV_TOKENS = "h100-llama-3.1-8b-bf16-tp1", 400_000, 4_000_000
TURN, FRESH, WARM = "turn", "fresh", "warm"
START_S, SECONDS = 400.0, 2000.0


class Agents(TrafficSource):
    """Turns of sessions whose prompts are mostly cached, and prompts that nobody has cached."""

    name, timed, rate = "agents", True, 1.0

    def __init__(self, turns_per_s: float, fresh_per_s: float, output: tuple[int, int]) -> None:
        self.turns_per_s, self.fresh_per_s, self.output = turns_per_s, fresh_per_s, output

    def requests(self, rng: random.Random) -> Iterator[Request]:
        """Yield the first turn of each session, then the load."""
        cached = [rng.randint(100_000, 300_000) for _ in range(SESSIONS)]
        drawn = [
            Request(number * START_S / SESSIONS, WARM, tokens, 1, shared=((f"s{number}", tokens),))
            for number, tokens in enumerate(cached)
        ]
        for klass, rate in ((TURN, self.turns_per_s), (FRESH, self.fresh_per_s)):
            now = START_S
            while (now := now + rng.expovariate(rate)) < START_S + SECONDS:
                if klass == FRESH:
                    drawn.append(Request(now, FRESH, rng.randint(50_000, 200_000), self.output[0]))
                    continue
                session = rng.randrange(SESSIONS)
                new = int(math.exp(rng.uniform(math.log(200), math.log(8_000))))
                tokens = cached[session]
                shared = ((f"s{session}", tokens),)
                drawn.append(
                    Request(now, TURN, tokens + new, rng.randint(*self.output), "", shared)
                )
        yield from sorted(drawn, key=lambda request: request.at)


def fleet() -> SimulatedFleet:
    """Return a router with full workers of one kind."""
    model = replace(
        of_profile(PROFILE), max_model_len=CONTEXT, kv_tokens=KV_TOKENS,
        policies={"long_prompt": {}},
    )  # fmt: skip
    names = [f"w{number}" for number in range(WORKERS)]
    workers = [
        {"name": name, "url": f"http://{name}", "max_requests": SLOTS, "max_model_len": CONTEXT}
        for name in names
    ]
    router: dict[str, Any] = {"queue": {"max_wait_s": 600.0}}
    config = FleetConfig.model_validate({"model": "m", "workers": workers, "router": router})
    return SimulatedFleet(
        config, {n: replace(model, name=n) for n in names}, FluidEngine, coarse=True
    )


def play(
    seed: int, weight: float, turns: float, fresh: float, output: tuple[int, int]
) -> Sequence[Outcome]:
    """Return the outcomes of a load with this weight."""
    with patch.object(urgency, "PREFILL_WEIGHT", weight):
        return (
            fleet()
            .play(
                Schedule(
                    source=Agents(turns, fresh, output), seed=seed, duration_s=START_S + SECONDS
                )
            )
            .outcomes
        )


def main(argv: Sequence[str] | None = None) -> None:
    """Print the times to first token for each weight."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--weights", type=float, nargs="+", default=[0, 0.5, 1, 2, 4])
    parser.add_argument("--turns", type=float, default=1.2, help="turns per second")
    parser.add_argument("--fresh", type=float, default=0.05, help="fresh prompts per second")
    parser.add_argument("--output", type=int, nargs=2, default=(60, 400), help="tokens of turns")
    args = parser.parse_args(argv)
    print("weight  turns' TTFT p50  p90  p99  fresh prompts' mean  p99, in seconds  failed")
    for weight in args.weights:
        played = [
            outcome
            for s in args.seeds
            for outcome in play(s, weight, args.turns, args.fresh, tuple(args.output))
        ]
        good = {
            klass: [o.ttft for o in played if o.klass == klass and o.good]
            for klass in (TURN, FRESH)
        }
        turns, fresh = good[TURN], good[FRESH]
        failed = sum(not outcome.good for outcome in played)
        figures = [percentile(turns, q) for q in (50, 90, 99)]
        figures += [fmean(fresh), percentile(fresh, 99)]
        print(f"{weight:6g}", *(f"{figure or 0:8.2f}" for figure in figures), f"{failed:6d}")


if __name__ == "__main__":
    main()
