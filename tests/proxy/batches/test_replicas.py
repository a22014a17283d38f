"""Several routers with one PostgreSQL database: replicas that die, and a server that restarts."""

from __future__ import annotations

import asyncio
import importlib
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from openai.types import Batch

from proxy.batches import claims
from proxy.batches.maintenance import BatchMaintenance, run_slice
from proxy.batches.storage import postgres as backend_module
from proxy.batches.storage.postgres import PostgresBackend
from proxy.batches.storage.store import Store
from proxy.batches.types import DiskError, StoreFullError
from proxy.errors import ProxyError
from tests.present import present
from tests.proxy.batches.conftest import OpenHarness
from tests.proxy.batches.harness import BatchHarness, lines, texts
from tests.proxy.batches.postgres import PASSWORD, PostgresServer
from tests.proxy.batches.storage.test_store import KEEP_S, batch_of, result
from tests.proxy.wire import scripts
from tests.proxy.wire.raw_client import get
from tests.proxy.wire.site import eventually

COUNT = 300
pytestmark = pytest.mark.usefixtures("short_pauses")


@pytest.fixture
async def replicas(
    open_harness: OpenHarness, url: str, monkeypatch: pytest.MonkeyPatch
) -> list[BatchHarness]:
    """Start two routers; the first leads."""
    monkeypatch.setattr(backend_module, "RENEW_S", 0.1)
    first = await open_harness(database=url, concurrency=8)
    await eventually(lambda: first.batches.scheduler.is_leader)
    return [first, await open_harness(database=url, concurrency=8)]


async def check_results(harness: BatchHarness, batch: Batch, count: int) -> None:
    """Check that a batch completes, and that each line has one result."""
    done = await harness.until(batch)
    counts = {"total": count, "completed": count, "failed": 0}
    assert present(done.request_counts).model_dump() == counts
    found = [line["custom_id"] for line in await harness.lines_of(done.output_file_id)]
    assert found == [f"r{n}" for n in range(count)]


def hold(replicas: list[BatchHarness]) -> asyncio.Event:
    """Let workers answer once the returned event is set."""
    opening = asyncio.Event()
    for harness in replicas:
        harness.site.fake.always(scripts.gated(opening, scripts.obey("w0")))
    return opening


async def test_replicas_run_one_batch(replicas: list[BatchHarness]) -> None:
    first, second = replicas
    assert not second.batches.scheduler.is_leader
    opening = hold(replicas)
    batch = await second.begin(lines(COUNT))
    await asyncio.gather(*(harness.site.fake.got() for harness in replicas))
    opening.set()
    await check_results(first, batch, COUNT)
    served = [texts(harness.site.served()) for harness in replicas]
    assert min(map(len, served)) > 0
    assert Counter(served[0] + served[1]) == Counter(f"r{n}" for n in range(COUNT))


async def test_lines_of_a_dead_replica_run_elsewhere(
    replicas: list[BatchHarness], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first replica leads, and dies with lines in flight and lines read ahead."""
    # An idle replica renews its lease once a second.
    monkeypatch.setattr(backend_module, "LEASE_S", 3.0)
    monkeypatch.setattr(backend_module, "RENEW_S", 0.5)
    first, second = replicas
    first.site.fake.always(scripts.stall)
    batch = await second.begin(lines(100))
    await first.site.fake.got(8)

    def die(store: Store) -> None:
        assert isinstance(store.backend, PostgresBackend)
        store.backend._renew_lease()
        store.backend._joined = False
        store.backend.connection.close()

    task = present(first.batches._task)
    task.cancel()
    await asyncio.wait([task])
    await first.batches.store(die)
    await check_results(second, batch, 100)
    assert second.batches.scheduler.is_leader
    assert set(texts(first.site.served())) <= set(texts(second.site.served()))


async def test_lines_that_are_not_sent_are_released(
    replicas: list[BatchHarness], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = replicas
    monkeypatch.setattr(claims, "IDLE_CLAIM_S", 0.2)
    first.site.down("w0")
    second.site.fake.always(scripts.stall)
    batch = await first.begin(lines(10))
    await eventually(lambda: any(x.ready for x in first.batches.scheduler._running.values()))
    second.site.fake.always(scripts.obey("w0"))
    await check_results(first, batch, 10)
    assert first.site.served() == []


async def test_server_restarts_in_the_middle_of_a_batch(
    replicas: list[BatchHarness], postgres: PostgresServer
) -> None:
    opening = hold(replicas)
    batch = await replicas[0].begin(lines(100))
    await asyncio.gather(*(harness.site.fake.got(8) for harness in replicas))
    await asyncio.to_thread(postgres.stop)
    for harness in replicas:
        answer = await harness.site.ask(get(f"/v1/batches/{batch.id}"))
        assert (answer.status, answer.error()["code"]) == (503, "storage_unavailable")
        assert len(answer.all(b"retry-after")) == 1
    opening.set()  # results arrive, and wait for the server
    await eventually(lambda: all(harness.batches.scheduler.paused for harness in replicas))
    await asyncio.to_thread(postgres.start)
    await eventually(lambda: not any(harness.batches.scheduler.paused for harness in replicas))
    await check_results(replicas[0], batch, 100)
    served = [text for harness in replicas for text in texts(harness.site.served())]
    assert Counter(served) == Counter(f"r{n}" for n in range(100)), "no line ran twice"


async def test_router_starts_without_the_server(
    open_harness: OpenHarness, postgres: PostgresServer, url: str
) -> None:
    await asyncio.to_thread(postgres.stop)
    harness = await open_harness(database=url)
    await eventually(lambda: "router.batches.database" in harness.batches.scheduler.paused)
    assert PASSWORD not in harness.batches.scheduler.paused
    await asyncio.to_thread(postgres.start)
    await eventually(lambda: harness.batches.scheduler.is_leader)
    await check_results(harness, await harness.begin(lines(1)), 1)


def test_leader_that_hangs_is_replaced(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_module, "LEASE_S", 0.3)
    backends = [PostgresBackend(url) for _ in range(2)]
    first, second = (Store(backend, KEEP_S) for backend in backends)
    session = backends[0].renew_duties().session
    assert [backend.renew_duties().leads for backend in backends] == [True, False]
    batch = batch_of(second, 1)
    while not backends[1]._leads:
        backends[1]._renew_lease()
        time.sleep(0.02)
    monkeypatch.undo()
    backends[1]._renew_lease()
    backends[0].check()
    assert [backend.renew_duties().leads for backend in backends] == [False, True]
    with pytest.raises(DiskError, match="lost"):
        run_slice(first, BatchMaintenance(batch, lambda _: iter(()), ends=True), session)  # type: ignore[arg-type,return-value]
    second.save_results([result(batch, 1)])
    second.close()
    first.close()


def test_replica_that_is_killed_while_it_leaves_is_dead(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lines have no owner later, or an owner that can be found dead."""
    leaving, other = [PostgresBackend(url) for _ in range(2)]
    leaving.renew_duties()
    execute = leaving.execute

    def fails(sql: str, values: Any = ()) -> Any:
        if sql is backend_module.RELEASE:
            leaving.connection.close()
        return execute(sql, values)

    monkeypatch.setattr(leaving, "execute", fails)
    leaving.close()
    owners = [owner for (owner,) in other.execute("SELECT id FROM replicas").fetchall()]
    assert leaving._id in owners
    other.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda url: url.replace(PASSWORD, "wrong-one"), "password authentication failed"),
        (lambda url: url.replace("test:", "nobody:"), "password authentication failed"),
        (lambda url: url.replace("@/test", "@/no"), 'database "no.* does not exist'),
        (lambda url: url + "&nonsense=1", "nonsense"),
        (lambda url: url.replace("?", ":x?").replace("@/", "@[/"), "IPv6"),
    ],
)
def test_wrong_settings_fail_the_start(
    url: str, change: Callable[[str], str], message: str
) -> None:
    with pytest.raises(ProxyError, match=rf"router\.batches\.database: .*{message}") as caught:
        PostgresBackend(change(url))
    assert PASSWORD not in str(caught.value)
    assert "wrong-one" not in str(caught.value)


def test_unsuitable_servers_fail_the_start(
    url: str, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(backend_module, "MIN_VERSION", 990000)
        with pytest.raises(ProxyError, match=r"PostgreSQL 1\d\.\d+; 13 or newer is needed"):
            PostgresBackend(url)
    postgres.execute("CREATE DATABASE latin ENCODING 'LATIN1' TEMPLATE template0")
    with pytest.raises(ProxyError, match="encoding is LATIN1"):
        PostgresBackend(postgres.url("latin"))
    PostgresBackend(url).close()
    postgres.execute("UPDATE vllm_sched.versions SET version = 99", url)
    with pytest.raises(ProxyError, match="schema 99"):
        PostgresBackend(url)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (psycopg.errors.DiskFull, StoreFullError),
        (psycopg.errors.ReadOnlySqlTransaction, DiskError),
        (psycopg.errors.LockNotAvailable, DiskError),
        (psycopg.OperationalError, DiskError),
        (psycopg.errors.UniqueViolation, psycopg.errors.UniqueViolation),
    ],
)
def test_errors_of_the_server_pause_batches(
    url: str, error: type[Exception], kind: type[Exception]
) -> None:
    backend = PostgresBackend(url)
    with pytest.raises(kind), backend.errors():
        raise error
    backend.close()


def test_removed_tables_are_created_again(url: str, postgres: PostgresServer) -> None:
    store = Store(PostgresBackend(url), KEEP_S)
    batch_of(store, 1)
    postgres.execute("DROP SCHEMA vllm_sched CASCADE", url)
    with pytest.raises(DiskError), store.backend.errors():
        store.active_batches()
    store.backend.check()
    assert store.active_batches() == []
    store.close()


def test_missing_psycopg_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    monkeypatch.delitem(sys.modules, backend_module.__name__)
    with pytest.raises(ProxyError, match=r"pip install 'vllm-sched\[postgres\]'"):
        importlib.import_module(backend_module.__name__)


def test_password_file_is_read_at_each_connection(url: str, tmp_path: Path) -> None:
    url, file = url.replace(PASSWORD, "old"), tmp_path / "password"
    file.write_text(f"{PASSWORD}\n")
    PostgresBackend(url, file).close()
    file.unlink()
    with pytest.raises(ProxyError, match=r"database_password_file: .*No such file"):
        PostgresBackend(url, file)
