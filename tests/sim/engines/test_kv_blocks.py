"""The KV cache of the fluid engine: a shared prefix takes room once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_sched.bench.traffic.types import Piece
from vllm_sched.sim.engines.kv_blocks import CachedPrefixes, KvBlocks, Task
from vllm_sched.sim.types import Job


def task(need: int, *shared: Piece) -> Task:
    return Task(Job("a", need - 10, 10, shared=shared), 1, 0.0, need)


def blocks_of(tokens: int) -> KvBlocks:
    return KvBlocks(tokens, CachedPrefixes(tokens))


def test_shared_prefix_takes_room_once() -> None:
    room = blocks_of(2000)
    first, others = task(1000, ("system", 800)), [task(1000, ("system", 800)) for _ in range(3)]
    room.allocate(first)
    assert (room.used, room.fits(others[0])) == (1000, True)
    room.record_computed(first)
    for number, other in enumerate(others, 1):
        assert room.fits(other)
        room.allocate(other)
        room.record_computed(other)
        assert room.used == 1000 + 200 * number
    assert not room.fits(task(1000))
    room.free(first)
    assert room.used == 800 + 3 * 200
    for other in others:
        room.free(other)
    assert room.used == 0
    assert room.prefixes.count_cached((("system", 800),)) == 800


@pytest.mark.parametrize(("cached", "computed"), [(1500, False), (0, True)])
def test_prefix_that_is_not_computed_or_not_cached_is_not_shared(
    cached: int, computed: bool
) -> None:
    room, first = KvBlocks(1500, CachedPrefixes(cached)), task(1000, ("system", 800))
    room.allocate(first)
    if computed:
        room.record_computed(first)
    assert not room.fits(task(1000, ("system", 800)))


def test_prefix_of_a_running_task_is_not_evicted() -> None:
    room = blocks_of(2000)
    runs, done = task(700, ("runs", 600)), task(700, ("done", 600))
    for job in (runs, done):
        room.allocate(job)
        room.record_computed(job)
    room.free(done)
    large = task(1200)
    room.allocate(large)
    room.record_computed(large)
    assert room.prefixes.count_cached((("runs", 600),)) == 600
    assert room.prefixes.count_cached((("done", 600),)) == 0
    assert room.used == 1900


def test_end_of_a_prefix_is_evicted_first() -> None:
    prefixes = CachedPrefixes(1000)
    chain = (("a", 300), ("b", 300), ("c", 300))
    prefixes.store(chain, 1000)
    prefixes.store((), 700)
    assert prefixes.count_cached(chain) == 600


PIECES = st.sampled_from([(), (("a", 30),), (("a", 50),), (("a", 50), ("b", 20)), (("b", 20),)])


@given(st.lists(st.tuples(st.integers(100, 200), PIECES, st.booleans()), max_size=30))
def test_random_tasks_free_all_room(crowd: Sequence[tuple[int, tuple[Piece, ...], bool]]) -> None:
    room, inside = blocks_of(600), list[Task]()
    for need, shared, computed in crowd:
        job = task(need, *shared)
        while not room.fits(job):
            room.free(inside.pop(0))
        room.allocate(job)
        inside.append(job)
        if computed:
            room.record_computed(job)
        # A finished task may have had 20 more tokens of "a" than the rest.
        needs = [job.need for job in inside]
        assert max(needs) <= room.used <= sum(needs) + 20
    for job in inside:
        room.free(job)
    assert room.used == 0
