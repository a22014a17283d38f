"""`chunk_budget` on data-parallel ranks that step together, in virtual time."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import pytest
from vllm.config import ModelConfig, VllmConfig

from vllm_sched.cost.step_time import StepTime
from vllm_sched.engine import simulated
from vllm_sched.engine.parallel import dp_group
from vllm_sched.engine.simulated import EngineSettings, NewRequest, SimulatedEngine
from vllm_sched.policies.types import Policy, StepResult

MACHINE = StepTime(
    decode_fixed_s=0.012,
    decode_s=1e-4,
    context_s=2e-8,
    prefill_fixed_s=0.012,
    prefill_s=4.5e-5,
    pair_s=1e-9,
    mixed_s=1e-3,
)
TARGET_S, NOISE = 0.1, 0.02
PROMPTS = (2_000, 12_000)
SECONDS, LEARNT_S = 22.0, 8.0


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the shared file into the test's folder."""
    monkeypatch.setattr(dp_group, "MEMORY", tmp_path)
    return tmp_path


def expert_ranks(size: int, monkeypatch: pytest.MonkeyPatch) -> list[SimulatedEngine]:
    usual, ranks = simulated._config, iter(range(size))

    def config(settings: EngineSettings) -> VllmConfig:
        made = usual(settings)
        made.parallel_config = copy.copy(made.parallel_config)
        made.parallel_config.data_parallel_size = size
        made.parallel_config.data_parallel_rank = next(ranks)
        return made

    settings = EngineSettings(
        max_model_len=20_000,
        kv_tokens=600_000,
        block_tokens=128,
        prefix_caching=False,
        async_scheduling=False,
        policies={"chunk_budget": {"itl_ms": 1000 * TARGET_S}},
    )
    with monkeypatch.context() as patched:
        patched.setattr(simulated, "_config", config)
        patched.setattr(ModelConfig, "is_moe", True)
        return [SimulatedEngine(settings) for _ in range(size)]


def observe_own_time(policy: Policy, took: Sequence[float], rank: int, result: StepResult) -> None:
    """Report only the rank's own part of a step to its policy."""
    policy.observe(dataclasses.replace(result, seconds=took[rank], others=()))


class Played(NamedTuple):
    """Results of the ranks after the learning phase."""

    chunks: list[float]  # the mean of each rank
    late: float  # share of steps with prefill above the target
    ttft_p99: list[float]


def play(
    engines: Sequence[SimulatedEngine],
    loads: Sequence[float],
    joins_s: float = 0.0,
    *,
    own_times: bool = False,
) -> Played:
    """Step all ranks together; a load is in prompt tokens per second of a rank.

    The last rank's prompts begin at `joins_s`. With `own_times` each rank learns its own part of a
    step.
    """
    rng = random.Random(0)
    took = [0.0] * len(engines)
    if own_times:
        for rank, engine in enumerate(engines):
            policy = engine.scheduler._policies[0]
            engine.scheduler._planner.hooks.observe = [
                partial(observe_own_time, policy, took, rank)
            ]
    arrivals = []
    for rank, load in enumerate(loads):
        arrivals += [(0.0, rank, NewRequest(f"stream-{rank}-{n}", 64, 10_000)) for n in range(8)]
        at = joins_s if rank == len(loads) - 1 else 1.0
        while load and (at := at + rng.expovariate(load / fmean(PROMPTS))) < SECONDS:
            arrivals.append((at, rank, NewRequest(f"long-{at}", rng.randint(*PROMPTS), 4)))
    arrivals.sort(key=lambda arrival: arrival[0], reverse=True)
    now, born = 0.0, dict[str, float]()
    steps_s: list[float] = []
    chunks: list[list[int]] = [[] for _ in engines]
    ttft: list[list[float]] = [[] for _ in engines]
    while now < SECONDS:
        while arrivals and arrivals[-1][0] <= now:
            at, rank, request = arrivals.pop()
            engines[rank].add(request, now)
            born[request.id] = at
        steps = [engine.schedule(now) for engine in engines]
        for rank, step in enumerate(steps):
            shape_s = MACHINE.seconds(step.shape) if step else 0.0
            took[rank] = shape_s * rng.lognormvariate(0, NOISE)
        now += max(took)
        if now > LEARNT_S and any(step and step.shape.kind == "mixed" for step in steps):
            steps_s.append(max(took))
        for rank, (engine, step) in enumerate(zip(engines, steps, strict=True)):
            if step is None:
                continue
            if now > max(LEARNT_S, joins_s + LEARNT_S) and step.shape.kind == "mixed":
                chunks[rank].append(step.shape.prefill_tokens)
            for answer in engine.finish(step, now):
                if answer.id.startswith("long") and (at := born.pop(answer.id, None)) is not None:
                    ttft[rank].append(now - at)
    late = fmean(seconds > TARGET_S for seconds in steps_s)
    waits = [sorted(samples)[int(0.99 * len(samples))] if samples else 0.0 for samples in ttft]
    return Played([fmean(samples) if samples else 0.0 for samples in chunks], late, waits)


@pytest.mark.parametrize(
    ("loads", "joins_s"),
    [
        ((3_000, 12_000, 12_000, 12_000), 1.0),
        ((8_000, 0, 0, 0), 1.0),
        ((12_000, 12_000, 12_000, 6_000), 8.0),
    ],
    ids=["saturated", "one rank", "late rank"],
)
def test_ranks_size_chunks_as_with_their_own_step_times(
    loads: tuple[float, ...], joins_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = play(expert_ranks(len(loads), monkeypatch), loads, joins_s)
    known = play(expert_ranks(len(loads), monkeypatch), loads, joins_s, own_times=True)
    for chunk, best in zip(played.chunks, known.chunks, strict=True):
        assert chunk >= 0.85 * best
    for wait, best in zip(played.ttft_p99, known.ttft_p99, strict=True):
        assert wait <= 1.3 * best
    assert played.late <= max(1.2 * known.late, 0.01)


def test_file_is_removed_when_ranks_shut_down(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = expert_ranks(2, monkeypatch)
    assert len(list(folder.iterdir())) == 1
    for engine in engines:
        engine.scheduler.shutdown()
    assert not list(folder.iterdir())


def test_ranks_continue_without_a_shared_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dp_group, "MEMORY", folder / "missing")
    monkeypatch.setattr(dp_group.tempfile, "gettempdir", lambda: str(folder / "missing"))
    with caplog.at_level("WARNING", logger="vllm.vllm_sched"):
        engines = expert_ranks(2, monkeypatch)
    assert [engine.scheduler._dp_group for engine in engines] == [None, None]
    assert "cannot share step sizes" in caplog.text
    engines[0].add(NewRequest("a", 64, 2), 0.0)
    step = engines[0].schedule(0.0)
    assert step is not None
    assert engines[0].finish(step, 0.1)
