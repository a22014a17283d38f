"""What takes the store long: a slice at a time, and the tenants in turn."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from proxy.batches import validate as lines_module
from proxy.batches.maintenance import Maintenance, Slices, end_batch, validate_input
from proxy.batches.storage import store as store_module
from proxy.batches.storage.rows import ListPage
from proxy.batches.storage.store import Store
from proxy.batches.storage.store_thread import StoreThread
from proxy.batches.types import Batch, Status, StoreFullError
from proxy.core.tenants.tenants import TenantSpec
from tests.present import present
from tests.proxy.batches.office import CHAT, Office, lines
from tests.proxy.batches.test_tenants import KEYS, take
from tests.proxy.wire import scripts
from tests.proxy.wire.conftest import Start

NOW, KEEP_S = 1_000_000.0, 1000.0


@pytest.fixture
def chores() -> Maintenance:
    """Have some, whose store is none."""

    async def keep(what: Callable[..., Any], *args: object) -> Any:
        return what(cast("Store", None), *args)

    return Maintenance(cast(StoreThread, keep))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """Open one."""
    store = Store(tmp_path, KEEP_S)
    yield store
    store.close()


@pytest.fixture
def slices_of_ten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have that many lines done at once."""
    monkeypatch.setattr(lines_module, "SLICE_LINES", 10)
    monkeypatch.setattr(store_module, "MAX_LINES", 10)


def batch_of(name: str, tenant: str, file: str = "f") -> Batch:
    return Batch(name, tenant, CHAT, file, "1m", Status.VALIDATING, NOW, NOW + 60)


class Diary:
    """Chores of so many slices each, and the order in which they were done."""

    def __init__(self, chores: Maintenance) -> None:
        self.done: list[str] = []
        self._chores = chores

    def add(self, name: str, tenant: str, slices: int, *, ends: bool = False) -> None:
        def work(_: Store) -> Slices:
            for number in range(slices):
                self.done.append(name)
                if number < slices - 1:
                    yield
            return "done"

        self._chores.add(batch_of(name, tenant), work, ends=ends)

    async def write(self) -> str:
        while self._chores.waiting(()) is not None:
            await self._chores.turn(())
        return " ".join(self.done)


async def test_tenants_have_slices_in_turn_and_one_input_each(chores: Maintenance) -> None:
    diary = Diary(chores)
    diary.add("a1", "ann", 3)
    diary.add("a2", "ann", 1)
    diary.add("b1", "bob", 2)
    diary.add("c1", "cid", 1)
    assert await diary.write() == "a1 b1 c1 a1 b1 a1 a2"


async def test_what_ends_goes_before_what_begins(chores: Maintenance) -> None:
    diary = Diary(chores)
    diary.add("a1", "ann", 2)
    assert await chores.turn(()) is None
    diary.add("a2", "ann", 1, ends=True)
    assert await diary.write() == "a1 a2 a1"


async def test_an_end_takes_the_place_of_what_was_read(chores: Maintenance) -> None:
    diary = Diary(chores)
    diary.add("a1", "ann", 9)
    await chores.turn(())
    assert "a1" in chores
    assert not chores.ends("a1")
    diary.add("a1", "ann", 1, ends=True)
    assert chores.ends("a1")
    assert await chores.turn(()) == "batch a1: done"
    assert "a1" not in chores
    assert await diary.write() == "a1 a1"


async def test_nothing_is_begun_for_who_has_no_room(chores: Maintenance) -> None:
    diary = Diary(chores)
    diary.add("a1", "ann", 2)
    assert chores.waiting({"ann"}) is None
    assert await chores.turn({"ann"}) is None
    assert diary.done == []
    await chores.turn(())
    await chores.turn({"ann"})
    assert diary.done == ["a1", "a1"], "what is begun goes on"


async def test_what_fails_is_begun_anew(chores: Maintenance) -> None:
    def full(_: Store) -> Slices:
        yield
        raise StoreFullError("full")

    chores.add(batch_of("a1", "ann"), full)
    assert await chores.turn(()) is None
    with pytest.raises(StoreFullError):
        await chores.turn(())
    assert "a1" not in chores


def new_batch(store: Store, count: int) -> Batch:
    content = "\n".join(map(json.dumps, lines(count))).encode()
    file = store.add_file("t", "in", "batch", content, NOW)
    batch = batch_of("batch_1", "t", file.id)
    store.add_batch(batch)
    return batch


def count_of(store: Store, table: str) -> int:
    found: int = store.connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]  # noqa: S608
    return found


@pytest.mark.usefixtures("slices_of_ten")
def test_an_input_is_read_in_slices_and_begun_anew_whole(store: Store) -> None:
    batch = new_batch(store, 25)
    given_up = validate_input(store, batch, 100, lambda: NOW)
    for _ in range(2):
        next(given_up)
    assert count_of(store, "lines") == 20
    slices = list(validate_input(store, batch, 100, lambda: NOW))
    assert len(slices) == 2 + 2, "to forget what was read, and to read"
    [begun] = store.batches("t", ListPage(1, None))
    assert (begun.status, begun.total) == (Status.IN_PROGRESS, 25)
    assert [job.number for job in store.jobs(begun, 0, 99)] == list(range(1, 26))


@pytest.mark.usefixtures("slices_of_ten")
def test_an_input_with_too_many_lines_leaves_none(store: Store) -> None:
    batch = new_batch(store, 25)
    for _ in validate_input(store, batch, 24, lambda: NOW):
        assert store.active(), "until the last of it"
    [refused] = store.batches("t", ListPage(1, None))
    assert refused.status is Status.FAILED
    assert [each.code for each in refused.complaints] == ["too_many_lines"]
    assert count_of(store, "lines") == 0


def test_an_input_that_is_gone(store: Store) -> None:
    batch = batch_of("batch_1", "t", "file-none")
    store.add_batch(batch)
    assert list(validate_input(store, batch, 24, lambda: NOW)) == []
    [refused] = store.batches("t", ListPage(1, None))
    assert [each.code for each in refused.complaints] == ["file_not_found"]


def test_a_line_longer_than_a_slice(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_module, "SLICE_BYTES", 16)
    batch = new_batch(store, 3)
    assert len(list(validate_input(store, batch, 100, lambda: NOW))) > 6
    [begun] = store.batches("t", ListPage(1, None))
    assert (begun.total, begun.complaints) == (3, [])


def test_a_batch_is_ended_in_slices_whenever_it_was_broken_off(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "MAX_LINES", 4)
    batch = new_batch(store, 10)
    list(validate_input(store, batch, 100, lambda: NOW))
    for _ in range(3):
        next(end_batch(store, batch, Status.EXPIRED, lambda: NOW))
        assert len(store.active()) == 1
    list(end_batch(store, batch, Status.EXPIRED, lambda: NOW))
    [ended] = store.batches("t", ListPage(1, None))
    assert (ended.status, ended.failed, ended.completed) == (Status.EXPIRED, 10, 0)
    assert (count_of(store, "lines"), count_of(store, "results")) == (0, 10)


async def test_while_one_tenants_inputs_are_read_anothers_lines_run(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    office = Office(await start(), tmp_path)
    take(office, TenantSpec("ann"), TenantSpec("bob"))
    office.site.fake.always(scripts.answer())
    await office.open()
    monkeypatch.setattr(lines_module, "SLICE_LINES", 1)
    office.client.api_key = KEYS["ann"]
    large = [await office.begin(lines(3000)) for _ in range(2)]
    office.client.api_key = KEYS["bob"]
    done = await office.until(await office.begin(lines(4)))
    assert present(done.request_counts).completed == 4
    office.client.api_key = KEYS["ann"]
    for each in large:
        assert (await office.client.batches.retrieve(each.id)).status == "validating"
        await office.client.batches.cancel(each.id)
    for each in large:
        assert (await office.until(each)).status == "cancelled"
    await office.close()
