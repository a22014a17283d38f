"""The journals of a fleet's workers, and of a running router."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from proxy.app import App
from proxy.config import load
from proxy.core.fleet.roster import Roster
from proxy.core.fleet.worker import Worker
from proxy.core.learned.resident_prefixes import name_of
from proxy.core.model.specs import WorkerSpec
from proxy.core.model.types import RequestInfo
from proxy.errors import ConfigError
from proxy.journal.journals import Journals
from proxy.metrics.exposition import MetricsPage
from proxy.metrics.journal_counts import JournalCount
from proxy.metrics.page import slices
from tests.present import present
from tests.proxy.core.learned.test_prefix_index import held, text
from tests.proxy.core.making import make_info, spec
from tests.proxy.journal.simulated_engine import (
    FakePublisher,
    KnownRequest,
    SimulatedEngine,
    replica_of,
)
from tests.proxy.wire.site import eventually

KEY = "0123456789abcdef"


class PublishingEngine:
    """An engine that answers its readers in the background."""

    def __init__(self, seed: int, key: bytes | None = None) -> None:
        self.engine = SimulatedEngine(Random(seed))
        self.publisher = FakePublisher("tcp://127.0.0.1:*", key)
        self.endpoint = self.publisher.endpoint
        self.silent = False
        self._task = asyncio.get_running_loop().create_task(self._serve())

    async def _serve(self) -> None:
        while True:
            if not self.silent:
                self.publisher.serve(self.engine)
            await asyncio.sleep(0.005)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.publisher.step(self.engine)

    def arrive(self, request_id: str, tokens: int, name: bytes = b"") -> int:
        """Publish a request that is in the cache as a whole; return its number."""
        number = 1000 + self.engine.number
        self.engine.known[number] = KnownRequest(request_id, tokens, name, tokens)
        named = [[number, name]] if name else []
        self._publish([[number, request_id, tokens]], named, resident=[number, tokens])
        return number

    def write(self, number: int, token: int) -> None:
        self.engine.known[number].tokens.append(token)
        self._publish(numbers=[number], tokens=[token])

    def evict(self, number: int, first: int, last: int) -> None:
        self.engine.known[number].resident = first
        self._publish(evicted=[number, first, last])

    def _publish(
        self,
        arrived: Sequence[Any] = (),
        named: Sequence[Any] = (),
        evicted: Sequence[int] = (),
        resident: Sequence[int] = (),
        numbers: Sequence[int] = (),
        tokens: Sequence[int] = (),
    ) -> None:
        self.engine.number += 1
        if not self.silent:
            payload = [
                arrived, named, False, evicted, resident, numbers, [], tokens, [], [], [],
            ]  # fmt: skip
            self.publisher.send(b"step", self.engine.position, payload)

    def close(self) -> None:
        self._task.cancel()
        self.publisher.close()


Engines = list[PublishingEngine]


@pytest.fixture
async def engines() -> AsyncIterator[Engines]:
    made = [PublishingEngine(seed) for seed in (1, 2)]
    yield made
    for engine in made:
        engine.close()


class Reader:
    """A fleet, and the journals that its router reads."""

    def __init__(self) -> None:
        self.roster = Roster()
        self.prefixes = self.roster.prefixes
        self.journals = Journals(self.roster, None)

    def add(self, name: str, *endpoints: str) -> Worker:
        """Add a worker."""
        return self.roster.add(with_journal(name, *endpoints))

    async def up(self, *names: str) -> None:
        """Wait until the journals of exactly these workers are read."""

        def are_up() -> bool:
            self.journals.update(0.0)
            return {count.worker for count in self.journals.counts() if count.up} == set(names)

        await eventually(are_up)

    async def until_held(self, letters: str, blocks: dict[int, int]) -> None:
        """Wait until workers hold these numbers of blocks of a prompt."""
        await eventually(lambda: self.held(letters) == blocks)

    def held(self, letters: str) -> dict[int, int]:
        return held(self.prefixes, text(*letters))

    def asked(self, letters: str, name: str = "x") -> RequestInfo:
        """Return a request with a prompt of whole blocks."""
        body = text(*letters)
        hashes = self.prefixes.hashes("m", body)
        return replace(make_info(prefix=hashes), id=name, prefix_bytes=len(body))


@pytest.fixture
async def reader() -> AsyncIterator[Reader]:
    reader = Reader()
    yield reader
    reader.journals.close()
    assert list(reader.journals.counts()) == []


def with_journal(name: str, *endpoints: str) -> WorkerSpec:
    return replace(spec(name), journal=endpoints)


async def test_each_rank_has_a_replica(reader: Reader, engines: Engines) -> None:
    worker = reader.add("a", *(engine.endpoint for engine in engines))
    reader.roster.add(spec("b"))
    await reader.up("a")
    for engine in engines:
        engine.step(20)
    first, second = reader.journals.replicas_of(worker)
    for replica, engine in zip((first, second), engines, strict=True):
        await eventually(
            lambda replica=replica, engine=engine: replica_of(replica) == engine.engine.requests()
        )
    known = sum(len(engine.engine.known) for engine in engines)
    assert list(reader.journals.counts()) == [JournalCount("a", True, 0, 0, known)]
    assert reader.journals.replicas_of(present(reader.roster.get("b"))) == []


async def test_a_worker_is_up_only_with_all_ranks(reader: Reader, engines: Engines) -> None:
    reader.add("a", engines[0].endpoint, "ipc:///nowhere/journal")
    reader.journals.update(0.0)
    (worker,) = reader.roster
    await eventually(lambda: reader.journals.replicas_of(worker)[0].exact)
    assert [count.up for count in reader.journals.counts()] == [False]


async def test_journals_follow_the_workers(reader: Reader, engines: Engines) -> None:
    one, two = (engine.endpoint for engine in engines)
    reader.add("a", one)
    await reader.up("a")
    worker = present(reader.roster.get("a"))
    replica = reader.journals.replicas_of(worker)
    reader.add("b", two)
    await reader.up("a", "b")
    assert reader.journals.replicas_of(worker) == replica
    reader.roster.replace([with_journal("a", two)])
    await reader.up("a")
    assert present(reader.roster.get("a")) is worker
    assert reader.journals.replicas_of(worker) != replica
    reader.roster.replace([spec("a")])
    await reader.up()
    assert reader.journals.replicas_of(worker) == []
    reader.roster.replace([])
    await reader.up()


async def test_unusable_endpoint_is_logged_and_the_others_are_read(
    reader: Reader, engines: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    reader.add("a", "udp://127.0.0.1:1")
    reader.add("b", engines[0].endpoint)
    await reader.up("b")
    (error,) = (record.message for record in caplog.records if record.levelname == "ERROR")
    assert error.startswith("worker a: the journal at udp://127.0.0.1:1: ")


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    file = tmp_path / "journal.key"
    file.write_text(f"{KEY}\n")
    return file


def fleet_file(folder: Path, journal: str, *, more: str = "") -> Path:
    """Write a fleet file; its worker does not run."""
    file = folder / "fleet.yaml"
    file.write_text(
        f"model: tiny\nworkers: [{{name: a, url: 'http://127.0.0.1:9', journal: {journal}}}]\n"
        f"router: {{port: 0, admin: {{port: 0}}, {more}}}\n"
    )
    return file


def write(file: Path, content: bytes) -> None:
    file.write_bytes(content)


def page_of(app: App) -> str:
    page = MetricsPage(openmetrics=False)
    return b"".join(slices(app.metrics, page)).decode()


async def test_router_reads_and_reloads_journals(
    tmp_path: Path, key_file: Path, engines: Engines
) -> None:
    one, two = engines
    two.publisher.key = KEY.encode()
    file = fleet_file(tmp_path, one.endpoint)
    app = App(load(file), file)
    await app.start()

    async def shows(line: str) -> None:
        await eventually(lambda: f"proxy_journal_{line}\n" in page_of(app))

    try:
        await shows('up{worker="a"} 1')
        one.step(30)
        await shows(f'requests{{worker="a"}} {len(one.engine.known)}')
        key = f"journal: {{key_file: '{key_file}'}}"
        fleet_file(tmp_path, f"[{two.endpoint}]", more=key)
        assert await app.reload() == []
        (worker,) = app.fleet.roster
        await eventually(
            lambda: [j.run for j in app.journals.replicas_of(worker)] == [two.engine.run]
        )
        await shows('up{worker="a"} 1')
        two.publisher.key = b"another key of the engine"
        two.step(3)
        await shows('bad_signatures_total{worker="a"} 3')
        write(key_file, two.publisher.key)
        await app.reload()
        two.step()
        await shows('gaps_total{worker="a"} 1')
        write(key_file, b"short")
        with pytest.raises(ConfigError, match="has 5 bytes"):
            await app.reload()
        fleet_file(tmp_path, "[]")
        await app.reload()
        await eventually(lambda: list(app.journals.counts()) == [])
        assert "proxy_journal_up{" not in page_of(app)
    finally:
        await app.stop()


async def test_reload_keeps_the_addresses_that_were_chosen_for_a_worker(
    tmp_path: Path, engines: Engines
) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(
        "model: tiny\nworkers: [{name: a, journal: auto, launch: {}}]\n"
        "router: {port: 0, admin: {port: 0}}\n"
    )
    config = load(file)
    chosen = {"url": "http://127.0.0.1:9", "journal": (engines[0].endpoint,)}
    placed = config.workers[0].model_copy(update=chosen)
    app = App(config.model_copy(update={"workers": (placed,)}), file)
    await app.start()
    try:
        await app.reload()
        (worker,) = app.fleet.roster
        assert (worker.url, worker.spec.journal) == (chosen["url"], chosen["journal"])
        file.write_text(file.read_text().replace("name: a", "name: b"))
        with pytest.raises(ConfigError) as refused:
            await app.reload()
        assert str(refused.value).count("missing, and a reload starts no worker") == 2
    finally:
        await app.stop()


async def test_stopped_router_reads_no_journal(tmp_path: Path, engines: Engines) -> None:
    file = fleet_file(tmp_path, f"[{engines[0].endpoint}, {engines[1].endpoint}]")
    app = App(load(file), file)
    await app.start()
    await eventually(lambda: all(engine.publisher.is_read for engine in engines))
    await app.stop()
    assert list(app.journals.counts()) == []
    await eventually(lambda: not any(engine.publisher.is_read for engine in engines))


async def test_an_engine_that_reports_prefixes_is_followed_by_two_routers(
    reader: Reader, engines: Engines
) -> None:
    engine = engines[0]
    worker = reader.add("a", engine.endpoint)
    late = Reader()
    late_worker = late.add("a", engine.endpoint)
    await reader.up("a")
    assert worker.reports_prefixes
    info = reader.asked("ab")
    reader.roster.expect_prefix(info, worker)
    await eventually(lambda: engine.publisher.names)
    assert engine.publisher.names == [("x", name_of(info.prefix, info.prefix_bytes))]
    (name,) = [name for _, name in engine.publisher.names]
    number = engine.arrive("chatcmpl-x-00000001", 256, name)
    reader.prefixes.stop_expecting(info.prefix, worker.index)
    await reader.until_held("ab", {0: 2})
    await late.up("a")
    assert late.held("ab") == {0: 2}
    engine.evict(number, 128, 256)
    for each in (reader, late):
        await each.until_held("ab", {0: 1})
    late.journals.close()
    assert late.held("ab") == {}
    assert not late_worker.reports_prefixes


async def test_own_prefixes_are_known_before_the_engine_reports_their_names(
    reader: Reader, engines: Engines
) -> None:
    engine = engines[0]
    worker = reader.add("a", engine.endpoint)
    await reader.up("a")
    own, other = reader.asked("ab"), reader.asked("cd", "y")
    reader.roster.expect_prefix(own, worker)
    engine.arrive("chatcmpl-y-00000001", 256)
    engine.arrive("chatcmpl-x-00000001", 256)
    for info in (own, other):
        reader.prefixes.stop_expecting(info.prefix, worker.index)
    await reader.until_held("ab", {0: 2})
    assert reader.held("cd") == {}
    assert {
        request.name for request in reader.journals.replicas_of(worker)[0].requests.values()
    } == {b""}


async def test_a_lost_journal_leaves_expectations_and_the_next_snapshot_the_truth(
    reader: Reader, engines: Engines
) -> None:
    engine = engines[0]
    worker = reader.add("a", engine.endpoint)
    await reader.up("a")
    info = reader.asked("ab")
    name = name_of(info.prefix, info.prefix_bytes)
    number = engine.arrive("chatcmpl-x-00000001", 256, name)
    await reader.until_held("ab", {0: 2})
    engine.silent = True
    engine.evict(number, 128, 256)
    reader.journals.update(time.monotonic() + 10.0)
    assert not worker.reports_prefixes
    assert reader.held("ab") == {0: 2}
    reader.prefixes.stop_expecting(info.prefix, worker.index)
    assert reader.held("ab") == {}
    engine.silent = False

    def is_read_again() -> bool:
        reader.journals.update(time.monotonic())
        return worker.reports_prefixes

    await eventually(is_read_again)
    assert reader.held("ab") == {0: 1}


async def test_a_request_of_several_prompts_has_no_name(reader: Reader, engines: Engines) -> None:
    worker = reader.add("a", engines[0].endpoint)
    await reader.up("a")
    for name, prompts in (("two", 2), ("one", 1)):
        info = reader.asked("ab", name)
        info.prompts = prompts
        reader.roster.expect_prefix(info, worker)
    await eventually(lambda: engines[0].publisher.names)
    assert [name for name, _ in engines[0].publisher.names] == ["one"]


async def test_tokens_of_a_removed_workers_streams_are_known_until_they_end(
    reader: Reader, engines: Engines
) -> None:
    engine = engines[0]
    worker = reader.add("a", engine.endpoint)
    await reader.up("a")
    worker.requests = 1
    reader.roster.remove("a")
    reader.journals.update(time.monotonic())
    other = reader.add("b", engines[1].endpoint)
    assert other.index != worker.index
    number = engine.arrive("chatcmpl-x-00000001", 256, b"")
    engine.write(number, 5)
    await eventually(lambda: list(reader.journals.stream_tokens(worker, "x", 0.0) or ()) == [5])
    assert reader.held("ab") == {}
    worker.requests = 0
    reader.roster.pass_to_successor(worker)
    reader.journals.update(time.monotonic())
    assert reader.journals.stream_tokens(worker, "x", 0.0) is None
