"""Long work of the store, in slices and by tenant in turn."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
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
from tests.proxy.batches.conftest import OpenHarness
from tests.proxy.batches.harness import CHAT, NOW, content_of, lines
from tests.proxy.batches.storage.test_store import rows
from tests.proxy.batches.test_tenants import KEYS, set_tenants
from tests.proxy.wire import scripts


@pytest.fixture
def maintenance() -> Maintenance:
    """Return a maintenance without a store."""
    leading = SimpleNamespace(backend=SimpleNamespace(has_led_since=lambda _: True))

    async def run_now(function: Callable[..., Any], *args: object) -> Any:
        return function(cast("Store", leading), *args)

    return Maintenance(cast(StoreThread, run_now))


@pytest.fixture
def slices_of_ten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_module, "SLICE_LINES", 10)
    monkeypatch.setattr(store_module, "MAX_LINES", 10)


def batch_of(name: str, tenant: str, file: str = "f") -> Batch:
    return Batch(name, tenant, CHAT, file, "1m", Status.VALIDATING, NOW, NOW + 60)


class RecordedWork:
    """Adds work of some slices, and records the order of slices."""

    def __init__(self, maintenance: Maintenance) -> None:
        self.done: list[str] = []
        self._chores = maintenance

    def add(self, name: str, tenant: str, slices: int, *, ends: bool = False) -> None:
        def work(_: Store) -> Slices:
            for number in range(slices):
                self.done.append(name)
                if number < slices - 1:
                    yield
            return "done"

        self._chores.add(batch_of(name, tenant), work, ends=ends)

    async def run(self) -> str:
        while self._chores.next_operation(()) is not None:
            await self._chores.run_next_slice(())
        return " ".join(self.done)


async def test_tenants_get_slices_in_turn(maintenance: Maintenance) -> None:
    work_ = RecordedWork(maintenance)
    work_.add("a1", "ann", 3)
    work_.add("a2", "ann", 1)
    work_.add("b1", "bob", 2)
    work_.add("c1", "cid", 1)
    assert await work_.run() == "a1 b1 c1 a1 b1 a1 a2"


async def test_ending_batches_go_first_and_replace_validation(maintenance: Maintenance) -> None:
    work_ = RecordedWork(maintenance)
    work_.add("a1", "ann", 9)
    assert await maintenance.run_next_slice(()) is None
    assert "a1" in maintenance
    assert not maintenance.is_ending("a1")
    work_.add("a2", "ann", 1, ends=True)
    assert await maintenance.run_next_slice(()) == "batch a2: done"
    work_.add("a1", "ann", 1, ends=True)
    assert maintenance.is_ending("a1")
    assert await maintenance.run_next_slice(()) == "batch a1: done"
    assert "a1" not in maintenance
    assert await work_.run() == "a1 a2 a1"


async def test_no_work_begins_for_a_full_tenant(maintenance: Maintenance) -> None:
    work_ = RecordedWork(maintenance)
    work_.add("a1", "ann", 2)
    assert maintenance.next_operation({"ann"}) is None
    assert await maintenance.run_next_slice({"ann"}) is None
    assert work_.done == []
    await maintenance.run_next_slice(())
    await maintenance.run_next_slice({"ann"})
    assert work_.done == ["a1", "a1"], "begun work continues"


async def test_failed_work_is_removed(maintenance: Maintenance) -> None:
    def full(_: Store) -> Slices:
        yield
        raise StoreFullError("full")

    maintenance.add(batch_of("a1", "ann"), full)
    assert await maintenance.run_next_slice(()) is None
    with pytest.raises(StoreFullError):
        await maintenance.run_next_slice(())
    assert "a1" not in maintenance


def new_batch(store: Store, count: int) -> Batch:
    file = store.add_file("t", "in", "batch", content_of(lines(count)), NOW)
    batch = batch_of("batch_1", "t", file.id)
    store.add_batch(batch)
    return batch


@pytest.mark.usefixtures("slices_of_ten")
def test_interrupted_validation_restarts(store: Store) -> None:
    batch = new_batch(store, 25)
    interrupted = validate_input(store, batch, 100, lambda: NOW)
    for _ in range(2):
        next(interrupted)
    assert rows(store)["lines"] == 20
    slices = list(validate_input(store, batch, 100, lambda: NOW))
    assert len(slices) == 2 + 2, "two slices delete earlier lines, two read"
    [started] = store.batches("t", ListPage(1, None))
    assert (started.status, started.total) == (Status.IN_PROGRESS, 25)
    assert [job.number for job in store.next_jobs(started, 0, 99)] == list(range(1, 26))


@pytest.mark.usefixtures("slices_of_ten")
def test_input_with_too_many_lines_leaves_no_lines(store: Store) -> None:
    batch = new_batch(store, 25)
    for _ in validate_input(store, batch, 24, lambda: NOW):
        assert store.active_batches(), "active until the last slice"
    [refused] = store.batches("t", ListPage(1, None))
    assert refused.status is Status.FAILED
    assert [problem.code for problem in refused.problems] == ["too_many_lines"]
    assert rows(store)["lines"] == 0


def test_missing_input_file_fails_the_batch(store: Store) -> None:
    batch = batch_of("batch_1", "t", "file-none")
    store.add_batch(batch)
    assert list(validate_input(store, batch, 24, lambda: NOW)) == []
    [refused] = store.batches("t", ListPage(1, None))
    assert [problem.code for problem in refused.problems] == ["file_not_found"]


def test_line_longer_than_a_slice_is_read(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_module, "SLICE_BYTES", 16)
    batch = new_batch(store, 3)
    assert len(list(validate_input(store, batch, 100, lambda: NOW))) > 6
    [started] = store.batches("t", ListPage(1, None))
    assert (started.total, started.problems) == (3, [])


def test_interrupted_end_of_a_batch_continues(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "MAX_LINES", 4)
    batch = new_batch(store, 10)
    list(validate_input(store, batch, 100, lambda: NOW))
    for _ in range(3):
        next(end_batch(store, batch, Status.EXPIRED, lambda: NOW))
        assert len(store.active_batches()) == 1
    list(end_batch(store, batch, Status.EXPIRED, lambda: NOW))
    [ended] = store.batches("t", ListPage(1, None))
    assert (ended.status, ended.failed, ended.completed) == (Status.EXPIRED, 10, 0)
    assert (rows(store)["lines"], rows(store)["results"]) == (0, 10)


async def test_lines_run_while_another_tenants_input_is_validated(
    open_harness: OpenHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = await open_harness()
    set_tenants(harness, TenantSpec("ann"), TenantSpec("bob"))
    harness.site.fake.always(scripts.answer())
    monkeypatch.setattr(lines_module, "SLICE_LINES", 1)
    harness.client.api_key = KEYS["ann"]
    large = [await harness.begin(lines(3000)) for _ in range(2)]
    harness.client.api_key = KEYS["bob"]
    done = await harness.until(await harness.begin(lines(4)))
    assert present(done.request_counts).completed == 4
    harness.client.api_key = KEYS["ann"]
    for batch in large:
        assert (await harness.client.batches.retrieve(batch.id)).status == "validating"
        await harness.client.batches.cancel(batch.id)
    for batch in large:
        assert (await harness.until(batch)).status == "cancelled"
