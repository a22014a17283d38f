"""The room of a plain worker's cache: what several begin with takes it once."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from vllm_sched.bench.traffic.types import Piece
from vllm_sched.sim.engines.kv_blocks import CachedPrefixes, KvBlocks, Task
from vllm_sched.sim.types import Job


def task(need: int, *shared: Piece) -> Task:
    return Task(Job("a", need - 10, 10, shared=shared), 1, 0.0, need)


def room_of(tokens: int) -> KvBlocks:
    return KvBlocks(tokens, CachedPrefixes(tokens))


def test_what_several_begin_with_takes_room_once() -> None:
    room = room_of(2000)
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


def test_what_is_not_computed_yet_is_shared_by_nobody() -> None:
    room = room_of(1500)
    room.take(task(1000, ("system", 800)))
    assert not room.fits(task(1000, ("system", 800)))


def test_without_a_cache_of_prefixes_each_has_its_own() -> None:
    room = KvBlocks(1500, CachedPrefixes(0))
    first = task(1000, ("system", 800))
    room.take(first)
    room.computed(first)
    assert not room.fits(task(1000, ("system", 800)))


def test_what_runs_is_not_forgotten_before_what_does_not() -> None:
    room = room_of(2000)
    runs, done = task(700, ("runs", 600)), task(700, ("done", 600))
    for each in (runs, done):
        room.take(each)
        room.computed(each)
    room.give(done)
    room.computed(large := _taken(room, task(1200)))
    assert room.prefixes.held((("runs", 600),)) == 600
    assert room.prefixes.held((("done", 600),)) == 0
    assert room.used == 1900
    room.give(large)


def test_whoever_left_last_is_forgotten_last() -> None:
    """However long ago it came."""
    room = room_of(2000)
    stays, leaves = task(700, ("stays", 600)), task(700, ("leaves", 600))
    for each in (stays, leaves):
        room.take(each)
        room.computed(each)
    room.give(leaves)
    room.give(stays)
    room.computed(_taken(room, task(1200)))
    assert room.prefixes.held((("stays", 600),)) == 600
    assert room.prefixes.held((("leaves", 600),)) == 0


def test_of_a_prompt_its_end_is_forgotten_first() -> None:
    prefixes = CachedPrefixes(1000)
    chain = (("a", 300), ("b", 300), ("c", 300))
    prefixes.keep(chain, 1000)
    prefixes.keep((), 700)
    assert prefixes.held(chain) == 600


PIECES = st.sampled_from([(), (("a", 30),), (("a", 50),), (("a", 50), ("b", 20)), (("b", 20),)])


@given(st.lists(st.tuples(st.integers(100, 200), PIECES, st.booleans()), max_size=30))
def test_whoever_comes_and_goes_all_room_is_free_in_the_end(
    crowd: Sequence[tuple[int, tuple[Piece, ...], bool]],
) -> None:
    room, inside = room_of(600), list[Task]()
    for need, shared, computed in crowd:
        each = task(need, *shared)
        while not room.fits(each):
            room.give(inside.pop(0))
        room.take(each)
        inside.append(each)
        if computed:
            room.computed(each)
        # Each has all that it needs. Who left may have had 20 more of "a" than those who stay.
        needs = [each.need for each in inside]
        assert max(needs) <= room.used <= sum(needs) + 20
    for each in inside:
        room.give(each)
    assert room.used == 0


def _taken(room: KvBlocks, each: Task) -> Task:
    room.take(each)
    return each
