"""`vllm-sched plan` and AIConfigurator's planner: the rates of each other's best design.

The question has fixed lengths: prompts of 4,000 and outputs of 500 tokens, Llama 3.1 70B in bf16 on
24 H100, TTFT 3 s, TPOT 50 ms. AIConfigurator's answer is that of

    aiconfigurator cli default --model meta-llama/Meta-Llama-3.1-70B --backend vllm \
        --system h100_sxm --total-gpus 24 --isl 4000 --osl 500 --ttft 3000 --tpot 50

(0.12.0). It assumes a constant concurrency; even gaps between requests are nearest to that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table

from vllm_sched.bench.results.goodput import parse
from vllm_sched.bench.traffic.catalogue import find
from vllm_sched.cost.transfer import TransferTime
from vllm_sched.sim.fleet.models import TRANSFER_SETUP_S, of_profile, transfer_of
from vllm_sched.sim.planning.fleet_shapes import CHUNKS, DEFAULT, FleetShape
from vllm_sched.sim.planning.question import PlanQuestion
from vllm_sched.sim.planning.search import FleetSearch
from vllm_sched.sim.types import WorkerModel

EVEN = 1000.0  # burstiness
ITL_MS = 50
SPLIT = FleetShape(prefill=8, decode=1, disaggregate_above=1)
POOL = FleetShape(general=6, itl_ms=ITL_MS)


@dataclass(frozen=True)
class Design:
    name: str
    theirs: float | None  # requests/s by AIConfigurator
    shape: FleetShape
    machine: WorkerModel
    prefill: WorkerModel | None = None


def machine(tp: int) -> WorkerModel:
    return of_profile(f"h100-llama-3.1-70b-bf16-tp{tp}")


def without_descriptors(model: WorkerModel) -> WorkerModel:
    """Return a worker whose transfers take only their bytes' time."""
    byte_s = transfer_of(model.gpus).byte_s
    return replace(model, transfer=TransferTime(TRANSFER_SETUP_S, 0.0, byte_s))


def designs() -> Iterator[Design]:
    yield Design("6 workers of tp 4", 12.22, replace(POOL, policy=DEFAULT), machine(4))
    yield Design("the same with chunk_budget", None, replace(POOL, policy=CHUNKS), machine(4))
    yield Design("8 prefill of tp 2 + 1 decode of tp 8", 14.31, SPLIT, machine(8), machine(2))
    free = without_descriptors(machine(8)), without_descriptors(machine(2))
    yield Design("the same, transfers without costs per piece", 14.31, SPLIT, *free)


def rate(design: Design, burstiness: float | None) -> str:
    question = PlanQuestion(
        source=find("4000x500"), machine=design.machine, prefill_machine=design.prefill,
        targets=parse(["ttft:3000", f"tpot:{ITL_MS}"]), burstiness=burstiness,
    )  # fmt: skip
    served = FleetSearch(question).judge(design.shape, 14.0)
    return "-" if served is None else f"{served.rate:.3g}"


def main() -> None:
    table = Table("design", "AIConfigurator", "here, even gaps", "here, random gaps")
    for design in designs():
        theirs = "-" if design.theirs is None else f"{design.theirs}"
        table.add_row(design.name, theirs, rate(design, EVEN), rate(design, None))
    Console().print(table)


if __name__ == "__main__":
    main()
