"""The choice between machines, equal ones and pairs for prefill and decode."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from proxy.core.model.role import Role
from tests.cost.linear_times import LINEAR_8B
from tests.sim.planning.test_plan import question
from vllm_sched.cli.fleet.fleet import note_missing_limits, note_narrow_workers, read
from vllm_sched.cost.profiles import measured
from vllm_sched.errors import UsageError
from vllm_sched.sim.fleet.models import of_profile
from vllm_sched.sim.planning.fleet_file import write
from vllm_sched.sim.planning.fleet_shapes import ONE_POOL, PREFILL_DECODE, FleetShape
from vllm_sched.sim.planning.machine_choice import (
    CLOSE,
    Candidate,
    compare_machines,
    fewest,
    highest,
    precision,
    rate_on,
)
from vllm_sched.sim.planning.plan import machines_of, plan
from vllm_sched.sim.planning.progress import PlanProgress
from vllm_sched.sim.planning.search import FleetSearch
from vllm_sched.sim.types import WorkerModel

MACHINE = replace(of_profile("h100-8b"), time=LINEAR_8B)
SLOW = replace(MACHINE, profile="slow", time=replace(LINEAR_8B, decode_fixed_s=0.2))
LARGE = replace(MACHINE, profile="large", gpus=2)
FP8 = replace(MACHINE, profile="fp8", flags=("--quantization=fp8",))


def quick(**given: Any) -> Any:
    return question("1500x60", "ttft:500 tpot:40", effort=0.05, draws=2, **given)


def test_machine_with_the_highest_rate_is_planned() -> None:
    found = plan(quick(), 2, machines=[SLOW, LARGE, MACHINE])
    assert found.question.machine is MACHINE
    alone = [each for each in found.candidates if each.question.prefill_machine is None]
    assert [each.question.machine.profile for each in alone] == ["slow", "large", "h100-8b"]
    assert alone[0].why
    assert 0 < alone[1].result < alone[2].result
    # A single machine is not compared.
    assert plan(quick(), 2, machines=[MACHINE]).candidates == []


def test_machines_that_cannot_serve_are_refused_with_their_reasons() -> None:
    with pytest.raises(UsageError, match="no machine can serve") as caught:
        plan(quick(), 2, machines=[SLOW, replace(SLOW, profile="slower")])
    assert "\n  slow: --goodput: " in str(caught.value)
    assert "\n  slower: --goodput: " in str(caught.value)


def test_machines_larger_than_the_fleet_are_left_out() -> None:
    found = plan(quick(), 1, machines=[LARGE, MACHINE])
    assert found.question.machine is MACHINE
    assert found.candidates == []
    with pytest.raises(UsageError, match="--gpus 1: a worker of large, four takes 2; give 2"):
        plan(quick(), 1, machines=[LARGE, replace(LARGE, profile="four", gpus=4)])


@pytest.mark.parametrize("families", [(ONE_POOL,), (ONE_POOL, PREFILL_DECODE)])
def test_pairs_are_of_the_best_precision(families: tuple[str, ...]) -> None:
    asked = replace(quick(), families=families)
    larger = replace(LARGE, profile="large fp8", flags=FP8.flags)
    # Rates fall in this order, and the slow one fails.
    machines = [FP8, larger, MACHINE, LARGE, replace(SLOW, flags=FP8.flags, gpus=4)]
    rates = {each.profile: 9.0 - at for at, each in enumerate(machines[:-1])}

    known: list[float] = []

    def coarse(search: FleetSearch, best: float) -> float:
        known.append(best)
        return rates[search.question.machine.profile]

    found = compare_machines(asked, machines, coarse, highest, PlanProgress())
    pairs = [
        (each.question.prefill_machine.profile, each.question.machine.profile)
        for each in found
        if each.question.prefill_machine is not None
    ]
    wanted = [("fp8", "large fp8"), ("large fp8", "fp8")]
    assert pairs == (wanted if PREFILL_DECODE in families else [])
    assert known == [0.0] * 4 + [9.0] * len(pairs)  # only close pairs matter
    assert all(
        each.question.families == (PREFILL_DECODE,)
        for each in found
        if each.question.prefill_machine is not None
    )
    assert [bool(each.why) for each in found[:5]] == [False] * 4 + [True]


def test_few_close_candidates_are_planned_in_full() -> None:
    asked = quick()
    rated = [Candidate(asked, result) for result in (7.0, 10.0, 8.7, 8.6)]
    assert [each.result for each in highest(rated)] == [10.0, 8.7]
    assert [each.result for each in highest([*rated[:1], rated[1]])] == [10.0]
    assert CLOSE * 10.0 > 7.0
    sized = [Candidate(asked, result) for result in (24.0, 8.0, 9.0)]
    assert [each.result for each in fewest([*sized, Candidate(asked, why="no")])] == [8.0, 9.0]
    assert highest([Candidate(asked, why="no")]) == []


def test_coarse_rate_needs_a_fleet() -> None:
    search = FleetSearch(quick(families=(PREFILL_DECODE,)))
    with pytest.raises(UsageError, match="no rate in time"):
        rate_on(1)(search, 0.0)
    rate = rate_on(2)(search, 0.0)
    assert rate > 0
    assert rate_on(2)(search, rate) == pytest.approx(rate, rel=0.15)
    with pytest.raises(UsageError, match=r"less than [0-9.]+ requests/s in time"):
        rate_on(2)(search, 2 * rate)


def test_only_machines_with_the_same_blocks_exchange_them() -> None:
    assert precision(MACHINE) == precision(LARGE) != precision(FP8)
    assert precision(MACHINE) != precision(replace(MACHINE, kv_token_bytes=7))


@pytest.mark.parametrize("given", [["model=llama-3.1-70b,system=h100"], ["h100-8b", "h200-8b"]])
def test_open_profile_names_each_size_and_precision(given: list[str]) -> None:
    found = {each.profile for each in machines_of(given)}
    if len(given) > 1:
        assert found == {*given}
        return
    keys = [key for key in measured() if (key.model, key.system) == ("llama-3.1-70b", "h100")]
    assert found == {key.name for key in keys}
    assert {(key.dtype, key.tp) for key in keys} > {("bf16", 4), ("fp8", 1), ("fp8", 8)}


def unequal() -> tuple[WorkerModel, WorkerModel]:
    prefill, decode = machines_of(["h100-llama-3.1-70b-fp8-tp2", "h100-llama-3.1-70b-fp8-tp4"])
    return prefill, decode


def test_unequal_workers_are_placed_by_role() -> None:
    prefill, decode = unequal()
    shape = FleetShape(prefill=3, decode=2)
    placed = shape.place_workers(decode, prefill)
    gpus = [(each.role, each.model.gpus) for each in placed]
    assert gpus == [(Role.PREFILL, 2)] * 3 + [(Role.DECODE, 4)] * 2
    assert shape.gpus(decode, prefill) == 14
    assert shape.gpus(decode) == 20


@pytest.mark.parametrize(
    ("profile", "model"),
    [
        ("model=meta-llama/Meta-Llama-3.1-405B system=b300 tp=8", "meta-llama/Meta-Llama-3.1-405B"),
        ("model=llama-3.1-8b,system=l40s", "meta-llama/Llama-3.1-8B-Instruct"),
        ("h100-qwen3-32b-bf16-tp2", "Qwen/Qwen3-32B"),
        ("tp=1/cost.json", "model"),
    ],
)
def test_fleet_file_names_the_checkpoint_of_the_profile(
    tmp_path: Path, profile: str, model: str
) -> None:
    found = plan(quick(machine=replace(MACHINE, profile=profile)), 1)
    write(found, tmp_path / "fleet.yaml", model="", command="plan", traffic="--workload w")
    text = (tmp_path / "fleet.yaml").read_text()
    assert f"\nmodel: {model}\n" in text
    assert f"#     vllm-sched serve {model} --" in text


def test_fleet_file_of_unequal_workers_has_their_flags(tmp_path: Path) -> None:
    prefill, decode = unequal()
    asked = replace(
        question("4000x100", "ttft:4000 tpot:40", effort=0.05, draws=2),
        machine=decode, prefill_machine=prefill, families=(PREFILL_DECODE,),
    )  # fmt: skip
    found = plan(asked, 6)
    assert found.gpus_of(found.best) <= 6
    path = tmp_path / "fleet.yaml"
    write(found, path, model="", command="", traffic="")
    config = read(path)
    assert not [*note_narrow_workers(config), *note_missing_limits(config)]
    for worker in config.workers:
        assert worker.launch is not None
        tp = 2 if worker.role == "prefill" else 4
        assert {f"--tensor-parallel-size={tp}", "--quantization=fp8"} <= {*worker.launch.args}
        assert worker.profile == f"h100-llama-3.1-70b-fp8-tp{tp}"
    roles = ("prefill", "decode")
    # The commands in the head of the file start the same workers.
    serve = [shlex.split(line[1:]) for line in path.read_text().splitlines() if " serve " in line]
    assert [words.pop(0) for words in serve] == ["VLLM_NIXL_SIDE_CHANNEL_HOST=THIS_HOST"] * 2
    assert [words[:3] for words in serve] == [["vllm-sched", "serve", config.model]] * 2
    for words, role, side in zip(serve, roles, ("producer", "consumer"), strict=True):
        worker = next(each for each in config.workers if each.role == role)
        assert worker.launch is not None
        assert words[3:5] == ["--policy", "none"]
        assert words[5:-1] == [*worker.launch.args]
        transfer = json.loads(words[-1].partition("=")[2])
        assert transfer["kv_role"] == f"kv_{side}"
        assert transfer["kv_load_failure_policy"] == "recompute"
