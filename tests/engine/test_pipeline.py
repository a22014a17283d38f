"""`chunk_budget` with pipeline parallelism: the gaps of streams, in virtual time."""

from __future__ import annotations

import copy
from collections import deque

import pytest
from vllm.config import VllmConfig

from vllm_sched.cost.step_time import StepTime
from vllm_sched.engine import simulated
from vllm_sched.engine.simulated import EngineSettings, NewRequest, SimulatedEngine, SimulatedStep

# Sum over all stages.
MACHINE = StepTime(
    decode_fixed_s=0.016, decode_s=1e-4, prefill_fixed_s=0.016, prefill_s=5e-5, pair_s=1e-9
)
TARGET_S = 0.1


def pipelined_engine(stages: int, monkeypatch: pytest.MonkeyPatch) -> SimulatedEngine:
    usual = simulated._config

    def config(settings: EngineSettings) -> VllmConfig:
        made = usual(settings)
        made.parallel_config = copy.copy(made.parallel_config)
        made.parallel_config.pipeline_parallel_size = stages
        return made

    monkeypatch.setattr(simulated, "_config", config)
    return SimulatedEngine(
        EngineSettings(
            max_model_len=20_000,
            kv_tokens=600_000,
            prefix_caching=False,
            async_scheduling=False,
            policies={"chunk_budget": {"itl_ms": 1000 * TARGET_S}},
        )
    )


def play(engine: SimulatedEngine, stages: int, seconds: float) -> tuple[list[float], int]:
    """Return the gaps of streams beside long prompts, and the prefill tokens."""
    now, last_token, gaps, prefill = 0.0, dict[str, float](), list[float](), 0
    free_at = [0.0] * stages  # end of each stage's last step
    under_way: deque[tuple[SimulatedStep, float]] = deque()
    for number in range(16):
        engine.add(NewRequest(f"stream-{number}", 64, 10_000), now)
    next_long = 2.0
    while now < seconds:
        if now >= next_long:
            engine.add(NewRequest(f"long-{now}", 12_000, 2), now)
            next_long += 2.0
        while len(under_way) < stages and (step := engine.schedule(now)) is not None:
            at = now
            for stage in range(stages):
                at = max(at, free_at[stage]) + MACHINE.seconds(step.shape) / stages
                free_at[stage] = at
            under_way.append((step, at))
            prefill += step.shape.prefill_tokens
        step, now = under_way.popleft()
        for event in engine.finish(step, now):
            if event.tokens and event.id.startswith("stream"):
                if event.id in last_token and now > 10.0:
                    gaps.append(now - last_token[event.id])
                last_token[event.id] = now
    return sorted(gaps), prefill


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_gaps_of_streams_stay_within_the_target(
    stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = pipelined_engine(stages, monkeypatch)
    gaps, prefill = play(engine, stages, 40.0)
    assert gaps[int(0.99 * len(gaps))] <= TARGET_S
    assert gaps[int(0.99 * len(gaps))] >= 0.5 * TARGET_S
    # The target is used: prompts of 6,000 tokens/s are computed as they arrive.
    assert prefill >= 0.9 * 19 * 12_000
