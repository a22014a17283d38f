"""The steps of the other data-parallel ranks on this node, in a memory-mapped file.

Ranks of an expert model step together, as long as the slowest rank takes. To learn what a step
costs, a rank needs the shapes of all ranks. Each rank has a ring of records; a record with a wrong
checksum is ignored. There are no locks and no system calls.
"""

from __future__ import annotations

import hashlib
import logging
import math
import mmap
import os
import struct
import tempfile
import zlib
from collections import deque
from pathlib import Path
from typing import Final, NamedTuple

from vllm.config import ParallelConfig, VllmConfig

from vllm_sched.cost.step_time import StepShape
from vllm_sched.metrics_folder import MEMORY

# More than the steps in flight: 2, or one per pipeline stage.
RING_RECORDS: Final = 32
# Number, monotonic times of scheduling and end, shape.
FIELDS: Final = struct.Struct("<Qddqdqqqq")
CHECKSUM: Final = struct.Struct("<Q")
RECORD_BYTES: Final = FIELDS.size + CHECKSUM.size
# The number of the newest record, before the ring.
NEWEST: Final = struct.Struct("<Q")
RANK_BYTES: Final = NEWEST.size + RING_RECORDS * RECORD_BYTES
# Older records without an end belong to a dead rank.
MAX_STEP_S: Final = 10.0
logger = logging.getLogger("vllm.vllm_sched")


class OpenStep(NamedTuple):
    """A step without an end, and the number of its record."""

    step: int
    number: int
    scheduled_at: float
    shape: StepShape


class DpGroup:
    """The file of the ranks on this node; ranks on other nodes are not seen."""

    def __init__(self, path: Path, rank: int, size: int) -> None:
        self._path = path
        self._other_ranks = [number for number in range(size) if number != rank]
        self._start = rank * RANK_BYTES
        self._map = _map_file(path, size * RANK_BYTES)
        self._map[self._start : self._start + RANK_BYTES] = bytes(RANK_BYTES)
        self._newest = 0
        self._open_steps: deque[OpenStep] = deque(maxlen=RING_RECORDS)

    def begin(self, step: int, scheduled_at: float, shape: StepShape) -> None:
        self._newest += 1
        opened = OpenStep(step, self._newest, scheduled_at, shape)
        self._open_steps.append(opened)
        self._write(opened, math.inf)
        NEWEST.pack_into(self._map, self._start, self._newest)

    def end(self, step: int, end: float) -> None:
        while self._open_steps and self._open_steps[0].step <= step:
            self._write(self._open_steps.popleft(), end)

    def other_shapes_at(self, time: float) -> list[StepShape]:
        shapes = (self._shape_at(rank * RANK_BYTES, time) for rank in self._other_ranks)
        return [shape for shape in shapes if shape is not None]

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)

    def _write(self, opened: OpenStep, end: float) -> None:
        shape = opened.shape
        fields = FIELDS.pack(
            opened.number, opened.scheduled_at, end, shape.prefill_tokens, shape.pairs,
            shape.decodes, shape.context_tokens, shape.prompts, shape.read_tokens,
        )  # fmt: skip
        offset = _record_offset(self._start, opened.number)
        self._map[offset : offset + RECORD_BYTES] = fields + CHECKSUM.pack(zlib.crc32(fields))

    def _shape_at(self, start: int, time: float) -> StepShape | None:
        (newest,) = NEWEST.unpack_from(self._map, start)
        shape = None
        for number in range(newest, max(newest - RING_RECORDS, 0), -1):
            offset = _record_offset(start, number)
            fields = self._map[offset : offset + FIELDS.size]
            (checksum,) = CHECKSUM.unpack_from(self._map, offset + FIELDS.size)
            if checksum != zlib.crc32(fields):
                continue
            record_number, scheduled_at, end, *counts = FIELDS.unpack(fields)
            if record_number != number or end <= time or scheduled_at < time - MAX_STEP_S:
                break
            if scheduled_at <= time:
                shape = StepShape(*counts)
        return shape


def group_of(config: VllmConfig) -> DpGroup | None:
    """Return the group of this rank; None for independent ranks, or without a file."""
    parallel = config.parallel_config
    # Ranks of a dense model have a data_parallel_size of 1.
    if parallel.data_parallel_size <= 1 or not config.model_config.is_moe:
        return None
    path = _path(parallel)
    try:
        return DpGroup(path, parallel.data_parallel_rank, parallel.data_parallel_size)
    except OSError as error:
        logger.warning(
            "cannot share step sizes between data-parallel ranks (%s): policies attribute the "
            "slowest rank's step time to this rank",
            error,
        )
        return None


def _path(parallel: ParallelConfig) -> Path:
    address = (
        os.geteuid(),
        parallel.data_parallel_size,
        parallel.data_parallel_master_ip,
        parallel.data_parallel_master_port,
        getattr(parallel, "_coord_store_port", 0),
    )
    name = hashlib.sha256(repr(address).encode()).hexdigest()[:16]
    folder = MEMORY if os.access(MEMORY, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
    return folder / f"vllm-sched-ranks-{name}"


def _record_offset(start: int, number: int) -> int:
    return start + NEWEST.size + number % RING_RECORDS * RECORD_BYTES


def _map_file(path: Path, size: int) -> mmap.mmap:
    """Map a file; refuse a link or another user's file."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        file = os.fstat(descriptor)
        if file.st_uid != os.geteuid():
            raise PermissionError(f"{path} belongs to another user")
        if file.st_size < size:
            # A later write without memory would kill the process.
            os.posix_fallocate(descriptor, 0, size)
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)
