"""Prompts go where their beginnings were sent, whichever process sent them."""

from __future__ import annotations

import random
from collections.abc import Callable

from proxy.core.model.role import Role
from proxy.core.model.types import Outcome
from proxy.processes.shared.shared_memory import LOG, SharedTable
from tests.proxy.core.making import ask, placed, spec
from tests.proxy.processes.making import Crew

Crews = Callable[..., Crew]
WORKERS = tuple(spec(f"w{i}") for i in range(5))


def submit(crew: Crew, index: int, prefix: tuple[int, ...]) -> str:
    """Have a process place a prompt that begins so; name the worker."""
    lease = placed(crew.routers[index].submit(ask(4000, prefix=prefix), crew.now))
    crew.tell()
    crew.finish(index, lease)
    crew.now += 1.0
    return lease.worker.name


def test_a_conversation_stays_where_it_began(crews: Crews) -> None:
    crew = crews(3, *WORKERS)
    for start in range(20):
        prefix = tuple(range(1000 * start, 1000 * start + 20))
        first = submit(crew, start % 3, prefix)
        for index in range(3):
            prefix = (*prefix, prefix[-1] + 1)
            assert submit(crew, index, prefix) == first


def test_what_others_log_is_not_logged_again(crews: Crews) -> None:
    crew = crews(2, *WORKERS)
    submit(crew, 0, (1, 2, 3))
    crew.look()
    assert crew.sharings[0].sheet.read_log(0)[0] == 4
    assert crew.sharings[1].sheet.read_log(0)[0] == 0


def test_a_process_that_begins_again_is_read_from_the_start(crews: Crews) -> None:
    crew = crews(2, *WORKERS)
    submit(crew, 0, tuple(range(20)))
    crew.look()
    crew.restart(0)
    prefix = tuple(range(500, 520))
    first = submit(crew, 0, prefix)
    assert submit(crew, 1, prefix) == first


def test_what_is_handed_over_is_where_it_has_come_to_all(crews: Crews) -> None:
    """Before, who has the same prompt would have the decode worker compute it, by any process."""
    sides = spec("p0", Role.PREFILL), spec("d0", Role.DECODE)
    crew = crews(2, *sides, transfer=True, disaggregate_above=2000)
    prefix = tuple(range(1, 21))
    lease = placed(crew.routers[0].submit(ask(4000, prefix=prefix), crew.now))
    crew.tell()
    other = placed(crew.routers[1].submit(ask(4000, prefix=prefix), crew.now))
    assert (lease.prefill is None, other.prefill is None) == (False, False)
    crew.finish(1, other, Outcome.CLIENT_GONE)
    crew.routers[0].leases.prefilled(lease, crew.now, None)
    crew.routers[0].leases.first_token(lease, crew.now)
    crew.tell()
    assert placed(crew.routers[1].submit(ask(4000, prefix=prefix), crew.now)).prefill is None


def test_the_log_goes_round() -> None:
    rng = random.Random(3)
    table = SharedTable.make(1)
    try:
        sheet, reader = table.sheet(0), table.sheet(0)
        read, seen, written = 0, [], []
        for number in range(3000):
            record = number % 900, tuple(rng.getrandbits(64) for _ in range(rng.randint(1, 96)))
            sheet.write_log(*record)
            written.append(record)
            if rng.random() < 0.2:
                read, found = reader.read_log(read)
                seen += found
        assert seen == written[: len(seen)]
        assert len(seen) > 2900
        assert read > 5 * LOG
        # Who has missed a round begins where it is.
        assert reader.read_log(read - LOG - 1) == (reader.read_log(read)[0], [])
    finally:
        table.close()
