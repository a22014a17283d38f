"""`long_prompt` without long prompts performs like vLLM's own scheduler."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest

from tests.cost.linear_times import LINEAR_8B
from tests.sim.making import ends, firsts, job, run, worker
from vllm_sched.bench.traffic.tables import TABLES
from vllm_sched.cost.step_time import StepTime
from vllm_sched.sim.engines.exact_engine import ExactEngine
from vllm_sched.sim.types import Job

Arrivals = list[tuple[float, Job]]
# A small embedding model: 250,000 tokens/s.
EMBEDDING = StepTime(decode_fixed_s=0.004, prefill_fixed_s=0.004, prefill_s=4e-6)
CONTEXT = 8192


@dataclass(frozen=True, slots=True)
class Served:
    """The throughput of a run and its times to first token."""

    requests_per_s: float
    ttft_p99_s: float
    ttft_s: dict[str, float]


def serve(arrivals: Arrivals, policies: dict[str, Any], **engine: Any) -> Served:
    """Play the arrivals on a real scheduler in virtual time."""
    settings = {"async_scheduling": True, "max_num_seqs": 256, "kv_tokens": 400_000} | engine
    events = run(ExactEngine(worker(policies=policies, **settings)), arrivals)
    arrived = {each.id: at for at, each in arrivals}
    ttft = {name: at - arrived[name] for name, at in firsts(events).items()}
    return Served(
        len(arrivals) / max(ends(events).values()),
        sorted(ttft.values())[int(0.99 * len(ttft))],
        ttft,
    )


def embeddings() -> Arrivals:
    """Return texts of 220 tokens on average that arrive at once."""
    rng = random.Random(1)
    sizes = [max(8, min(int(rng.expovariate(1 / 220)), 510)) for _ in range(500)]
    return [(0.0, job(f"{number}", tokens, 1)) for number, tokens in enumerate(sizes)]


def chats(rate: float, outputs: int) -> Arrivals:
    """Return chats with at most `outputs` output tokens, at this rate."""
    rng = random.Random(2)
    source = TABLES["azure-conv"].requests(rng)
    now, arrivals = 0.0, []
    for number in range(350):
        chat = next(source).fit_to(CONTEXT)
        tokens = min(chat.output_tokens, outputs)
        arrivals.append((now, job(f"{number}", chat.prompt_tokens, tokens)))
        now += rng.expovariate(rate)
    return arrivals


H100 = LINEAR_8B
SCENES = {
    "embeddings": (embeddings(), {"time": EMBEDDING, "max_model_len": 512}),
    "a prefill worker": (chats(1000.0, 1), {"time": H100, "max_model_len": CONTEXT}),
    "chats": (chats(17.0, 24), {"time": H100, "max_model_len": CONTEXT}),
}


@pytest.mark.parametrize("scene", SCENES)
def test_prompts_that_fit_a_step_are_as_fast_as_in_vllm(scene: str) -> None:
    arrivals, engine = SCENES[scene]
    engine = engine | {"max_num_batched_tokens": 8192}
    without = serve(arrivals, {}, **engine)
    with_policy = serve(arrivals, {"long_prompt": {}}, **engine)
    assert with_policy.requests_per_s >= 0.98 * without.requests_per_s
    assert with_policy.ttft_p99_s <= 1.02 * without.ttft_p99_s


def test_shorts_pass_prompts_of_many_steps() -> None:
    time = StepTime(decode_fixed_s=0.005, prefill_fixed_s=0.005, prefill_s=2e-4, decode_s=1e-4)
    arrivals = [(0.0, job(f"decodes-{n}", 20, 400)) for n in range(4)]
    arrivals += [(1.0, job(f"long-{n}", 12_000, 16)) for n in range(2)]
    arrivals += [(1.3 + 0.15 * n, job(f"short-{n}", 100, 16)) for n in range(8)]
    engine = {"time": time, "max_model_len": 16_384, "max_num_batched_tokens": 512}

    def slowest(policies: dict[str, Any], kind: str) -> float:
        ttft = serve(arrivals, policies, **engine).ttft_s
        return max(seconds for name, seconds in ttft.items() if name.startswith(kind))

    assert slowest({"long_prompt": {}}, "short") < 0.07 * slowest({}, "short")
    assert slowest({"long_prompt": {}}, "long") < 1.05 * slowest({}, "long")
