"""`vllm-sched batches migrate`: from a folder to a PostgreSQL database."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from proxy.batches.storage.migrate import migrate
from proxy.batches.storage.postgres import PostgresBackend
from proxy.batches.storage.rows import ListPage
from proxy.batches.storage.schema import POSTGRES_OCTETS, count_all
from proxy.batches.storage.sqlite import SqliteBackend
from proxy.batches.storage.store import Store
from proxy.errors import ProxyError
from tests.proxy.batches.storage.test_store import (
    KEEP_S,
    NOW,
    batch_of,
    content,
    ended,
    result,
    rows,
)
from vllm_sched.cli.main import main


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with an ended batch, a running batch and an unused file."""
    store = Store(SqliteBackend(tmp_path), KEEP_S)
    done, running = batch_of(store, 3), batch_of(store, 5, "other")
    store.save_results([result(done, 1), result(done, 2, 500), result(done, 3), result(running, 2)])
    ended(store, done)
    store.add_file("t", "\0 name", "batch", bytes(range(256)), NOW)
    store.close()
    return tmp_path


def check_same(folder: Path, url: str) -> None:
    """Check that a database has what the folder has."""
    source = Store(SqliteBackend(folder), KEEP_S)
    target = Store(PostgresBackend(url), KEEP_S)
    for tenant in ("t", "other"):
        assert target.files(tenant, ListPage()) == source.files(tenant, ListPage())
        assert target.batches(tenant, ListPage()) == source.batches(tenant, ListPage())
    [running] = target.active_batches()
    assert target.next_jobs(running, 0, 9) == source.next_jobs(running, 0, 9)
    [done] = target.batches("t", ListPage())
    assert content(target, done.output) == content(source, done.output)
    [file] = [file for file in target.files("t", ListPage()) if file.name == "\0 name"]
    assert target.read_piece(file, 0)[0] == bytes(range(256))
    target.save_results([result(running, number) for number in (1, 3, 4, 5)])
    assert target.is_complete(running)
    assert ended(target, running).completed == 5
    used = target._used_bytes()
    target.backend.execute("DELETE FROM used")
    target.backend.execute(count_all(POSTGRES_OCTETS))
    assert target._used_bytes() == used
    target.close()
    source.close()


def test_folder_is_copied(folder: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["batches", "migrate", "--from", str(folder), "--to", url]) == 0
    counts = dict(line.split()[:2] for line in capsys.readouterr().out.splitlines())
    assert counts == {"files": "5", "results": "4", "lines": "4", "batches": "2"}
    check_same(folder, url)


def test_interrupted_copy_goes_on(
    folder: Path, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    insert = PostgresBackend.insert_new

    def interrupt(self: PostgresBackend, table: str, columns: str, rows: Any) -> Any:
        if table == "lines":
            raise KeyboardInterrupt
        return insert(self, table, columns, rows)

    with monkeypatch.context() as patched:
        patched.setattr(PostgresBackend, "insert_new", interrupt)
        assert main(["batches", "migrate", "--from", str(folder), "--to", url]) == 130
    store = Store(PostgresBackend(url), KEEP_S)
    assert rows(store) == {"files": 5, "results": 4, "lines": 0, "batches": 0}
    store.close()
    assert main(["batches", "migrate", "--from", str(folder), "--to", url]) == 0
    assert capsys.readouterr().out.count("were copied before") == 2
    check_same(folder, url)


def test_refusals_are_one_line(
    folder: Path, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(folder: Path = folder, url: str = url) -> str:
        assert main(["batches", "migrate", "--from", str(folder), "--to", url]) == 2
        return capsys.readouterr().err

    assert "there is no batches.sqlite" in refused(tmp_path / "none")
    other = "mysql://me:secret@host/name"
    assert "mysql://***@host/name: write it as postgresql://user@host/name" in refused(url=other)
    assert "password authentication failed" in refused(url=url.replace("test:", "test:x"))
    used = SqliteBackend(folder)
    used.renew_duties()
    assert "a router uses it" in refused()
    used.close()
    router = Store(PostgresBackend(url), KEEP_S)
    router.backend.renew_duties()
    assert "a router uses the database" in refused()
    router.add_file("t", "own", "batch", b"{}", NOW)
    router.close()
    assert "has files that the folder has not" in refused()
    router = Store(PostgresBackend(url), KEEP_S)
    batch_of(router, 1)
    router.close()
    error = refused()
    assert "has batches already" in error
    assert error.count("\n") == 1


def test_server_that_is_down_is_an_error(folder: Path) -> None:
    with pytest.raises(ProxyError, match="No such file"):
        migrate(folder, "postgresql:///x?host=/nowhere")
