"""The KV cache of the fluid engine: a shared prefix takes room once."""

from __future__ import annotations

from collections.abc import Sequence

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
    room.take(first)
    assert (room.used, room.fits(others[0])) == (1000, True)
    room.computed(first)
    for number, other in enumerate(others, 1):
        assert room.fits(other)
        room.take(other)
        room.computed(other)
        assert room.used == 1000 + 200 * number
    assert not room.fits(task(1000))
    room.give(first)
    assert room.used == 800 + 3 * 200
    for other in others:
        room.give(other)
    assert room.used == 0
    assert room.prefixes.held((("system", 800),)) == 800


def test_prefix_not_yet_computed_is_not_shared() -> None:
    room = blocks_of(1500)
    room.take(task(1000, ("system", 800)))
    assert not room.fits(task(1000, ("system", 800)))


def test_prefix_is_not_shared_without_prefix_caching() -> None:
    room = KvBlocks(1500, CachedPrefixes(0))
    first = task(1000, ("system", 800))
    room.take(first)
    room.computed(first)
    assert not room.fits(task(1000, ("system", 800)))


def test_prefix_of_a_running_task_is_not_evicted() -> None:
    room = blocks_of(2000)
    runs, done = task(700, ("runs", 600)), task(700, ("done", 600))
    for job in (runs, done):
        room.take(job)
        room.computed(job)
    room.give(done)
    room.computed(large := take_room(room, task(1200)))
    assert room.prefixes.held((("runs", 600),)) == 600
    assert room.prefixes.held((("done", 600),)) == 0
    assert room.used == 1900
    room.give(large)


def test_prefix_of_the_last_finished_task_is_evicted_last() -> None:

    room = blocks_of(2000)
    stays, leaves = task(700, ("stays", 600)), task(700, ("leaves", 600))
    for job in (stays, leaves):
        room.take(job)
        room.computed(job)
    room.give(leaves)
    room.give(stays)
    room.computed(take_room(room, task(1200)))
    assert room.prefixes.held((("stays", 600),)) == 600
    assert room.prefixes.held((("leaves", 600),)) == 0


def test_end_of_a_prefix_is_evicted_first() -> None:
    prefixes = CachedPrefixes(1000)
    chain = (("a", 300), ("b", 300), ("c", 300))
    prefixes.keep(chain, 1000)
    prefixes.keep((), 700)
    assert prefixes.held(chain) == 600


PIECES = st.sampled_from([(), (("a", 30),), (("a", 50),), (("a", 50), ("b", 20)), (("b", 20),)])


@given(st.lists(st.tuples(st.integers(100, 200), PIECES, st.booleans()), max_size=30))
def test_random_tasks_free_all_room(crowd: Sequence[tuple[int, tuple[Piece, ...], bool]]) -> None:
    room, inside = blocks_of(600), list[Task]()
    for need, shared, computed in crowd:
        job = task(need, *shared)
        while not room.fits(job):
            room.give(inside.pop(0))
        room.take(job)
        inside.append(job)
        if computed:
            room.computed(job)
        # A finished task may have had 20 more tokens of "a" than the rest.
        needs = [job.need for job in inside]
        assert max(needs) <= room.used <= sum(needs) + 20
    for job in inside:
        room.give(job)
    assert room.used == 0


def take_room(room: KvBlocks, job: Task) -> Task:
    room.take(job)
    return job
