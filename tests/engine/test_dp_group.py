"""The file in which data-parallel ranks of a node publish the shapes of their steps."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engine.stubs import STUBS
from vllm_sched.cost.step_time import StepShape
from vllm_sched.engine.parallel import dp_group
from vllm_sched.engine.parallel.dp_group import MAX_STEP_S, RANK_BYTES, RING_RECORDS, DpGroup

FIRST, SECOND = StepShape(512, 4096.5, 8, 700, 1, 2048), StepShape(64, 2048.0, 9, 710, 1, 0)
# Publishes different steps on rank 1, and dies during a step.
WRITER = """
import os, sys
from pathlib import Path
from vllm_sched.cost.step_time import StepShape
from vllm_sched.engine.parallel.dp_group import DpGroup
group = DpGroup(Path(sys.argv[1]), 1, 2)
print(flush=True)
for number in range(1, 20_000):
    group.begin(number, 10.0, StepShape(number, float(number), number, number, number, number))
    group.end(number, 20.0)
group.begin(20_000, 30.0, StepShape(512, 4096.5, 8, 700, 1, 2048))
os._exit(9)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ranks"


@pytest.fixture
def ranks(path: Path) -> tuple[DpGroup, DpGroup]:
    return DpGroup(path, 0, 2), DpGroup(path, 1, 2)


def test_rank_reads_the_steps_of_other_ranks_at_a_time(ranks: tuple[DpGroup, DpGroup]) -> None:
    reader, writer = ranks
    assert reader.other_shapes_at(10.0) == []
    writer.begin(1, 10.0, FIRST)
    assert reader.other_shapes_at(10.05) == [FIRST]
    assert writer.other_shapes_at(10.05) == []
    # The first of two steps in flight counts as computed.
    writer.begin(2, 10.01, SECOND)
    assert reader.other_shapes_at(10.05) == [FIRST]
    writer.end(1, 10.1)
    # The reader's result comes later than the writer's next step.
    assert reader.other_shapes_at(10.05) == [FIRST]
    assert reader.other_shapes_at(10.15) == [SECOND]


def test_step_without_a_result_ends_with_the_next(ranks: tuple[DpGroup, DpGroup]) -> None:
    reader, writer = ranks
    writer.begin(1, 10.0, FIRST)
    writer.begin(2, 10.1, SECOND)
    writer.end(2, 10.2)
    assert reader.other_shapes_at(10.3) == []


@pytest.mark.parametrize(
    ("size", "is_moe", "grouped"), [(2, True, True), (2, False, False), (1, True, False)]
)
def test_only_ranks_of_an_expert_model_form_a_group(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, size: int, is_moe: bool, grouped: bool
) -> None:
    monkeypatch.setattr(dp_group, "MEMORY", tmp_path)
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(is_moe=is_moe),
        parallel_config=SimpleNamespace(
            data_parallel_size=size,
            data_parallel_rank=0,
            data_parallel_master_ip="127.0.0.1",
            data_parallel_master_port=1,
        ),
    )
    assert (dp_group.group_of(config) is not None) is grouped


def test_ring_holds_the_last_steps(ranks: tuple[DpGroup, DpGroup]) -> None:
    reader, writer = ranks
    for number in range(RING_RECORDS):
        writer.begin(number, number / 100, StepShape(number))
    assert reader.other_shapes_at(0.005) == [StepShape(0)]
    reader, writer = DpGroup(writer._path, 0, 2), DpGroup(writer._path, 1, 2)
    for number in range(3 * RING_RECORDS):
        writer.begin(number, float(number), StepShape(number))
        assert reader.other_shapes_at(number + 0.5) == [StepShape(number)]
        writer.end(number, number + 1.0)
    # Steps without results overwrite each other.
    for number in range(3 * RING_RECORDS, 6 * RING_RECORDS):
        writer.begin(number, float(number), StepShape(number))
    assert len(reader.other_shapes_at(6.0 * RING_RECORDS)) <= 1


def test_reader_survives_a_writer_that_dies(path: Path) -> None:
    reader = DpGroup(path, 0, 2)
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    with subprocess.Popen(
        [sys.executable, "-c", STUBS + WRITER, path], env=environment, stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        while writer.poll() is None:
            for shape in reader.other_shapes_at(15.0):
                assert len(set(dataclasses.astuple(shape))) == 1
    assert writer.returncode == 9
    # The writer's last step never ended, so it counts until `MAX_STEP_S`.
    assert reader.other_shapes_at(30.1) == [FIRST]
    assert reader.other_shapes_at(30.1 + MAX_STEP_S) == []


def test_restarted_rank_erases_its_old_steps(ranks: tuple[DpGroup, DpGroup]) -> None:
    reader, writer = ranks
    writer.begin(1, 10.0, FIRST)
    DpGroup(writer._path, 1, 2)
    assert reader.other_shapes_at(10.05) == []


def test_torn_record_is_ignored(path: Path, ranks: tuple[DpGroup, DpGroup]) -> None:
    reader, writer = ranks
    writer.begin(1, 10.0, FIRST)
    before = path.read_bytes()
    for at in range(RANK_BYTES, 2 * RANK_BYTES):
        torn = bytearray(before)
        torn[at] ^= 0x41
        with path.open("r+b") as file:
            file.write(torn)
        assert reader.other_shapes_at(10.05) in ([], [FIRST])
    with path.open("r+b") as file:
        file.write(before)
    assert reader.other_shapes_at(10.05) == [FIRST]


def test_record_that_is_being_written_hides_no_earlier_record(
    ranks: tuple[DpGroup, DpGroup],
) -> None:
    reader, writer = ranks
    writer.begin(1, 10.0, FIRST)
    writer.begin(2, 10.1, SECOND)
    writer._map[dp_group._record_offset(RANK_BYTES, 2)] ^= 0x41
    assert reader.other_shapes_at(10.05) == [FIRST]


def test_symbolic_link_is_refused(path: Path) -> None:
    path.symlink_to(path.with_name("elsewhere"))
    with pytest.raises(OSError, match="symbolic"):
        DpGroup(path, 0, 2)
    assert not path.with_name("elsewhere").exists()
