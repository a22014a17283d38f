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
from proxy.core.learned.resident_prefixes import name_of
from proxy.core.model.specs import WorkerSpec
from proxy.core.model.types import RequestInfo
from proxy.errors import ConfigError
from proxy.journal.journals import Journals
from proxy.metrics.exposition import MetricsPage
from proxy.metrics.journal_counts import JournalCount
from proxy.metrics.scrape import slices
from tests.present import present
from tests.proxy.core.learned.test_prefix_index import held, text
from tests.proxy.core.making import ask as make_ask
from tests.proxy.core.making import spec
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


@pytest.fixture
async def engines() -> AsyncIterator[list[PublishingEngine]]:
    made = [PublishingEngine(seed) for seed in (1, 2)]
    yield made
    for engine in made:
        engine.close()


@pytest.fixture
def roster() -> Roster:
    return Roster()


@pytest.fixture
async def journals(roster: Roster) -> AsyncIterator[Journals]:
    made = Journals(roster, None)
    yield made
    made.close()
    assert list(made.counts()) == []


def with_journal(name: str, *endpoints: str) -> WorkerSpec:
    return replace(spec(name), journal=endpoints)


async def until_up(journals: Journals, *names: str) -> None:
    """Wait until the journals of exactly these workers are read."""

    def are_up() -> bool:
        journals.update(0.0)
        return {count.worker for count in journals.counts() if count.up} == set(names)

    await eventually(are_up)


async def test_each_rank_has_a_replica(
    journals: Journals, roster: Roster, engines: list[PublishingEngine]
) -> None:
    worker = roster.add(with_journal("a", *(engine.endpoint for engine in engines)))
    roster.add(spec("b"))
    await until_up(journals, "a")
    for engine in engines:
        engine.step(20)
    first, second = journals.replicas_of(worker)
    for replica, engine in zip((first, second), engines, strict=True):
        await eventually(
            lambda replica=replica, engine=engine: replica_of(replica) == engine.engine.requests()
        )
    known = sum(len(engine.engine.known) for engine in engines)
    assert list(journals.counts()) == [JournalCount("a", True, 0, 0, known)]
    assert journals.replicas_of(present(roster.get("b"))) == []


async def test_a_worker_is_up_only_with_all_ranks(
    journals: Journals, roster: Roster, engines: list[PublishingEngine]
) -> None:
    roster.add(with_journal("a", engines[0].endpoint, "ipc:///nowhere/journal"))
    journals.update(0.0)
    (worker,) = roster
    await eventually(lambda: journals.replicas_of(worker)[0].exact)
    assert [count.up for count in journals.counts()] == [False]


async def test_journals_follow_the_workers(
    journals: Journals, roster: Roster, engines: list[PublishingEngine]
) -> None:
    one, two = (engine.endpoint for engine in engines)
    roster.add(with_journal("a", one))
    await until_up(journals, "a")
    worker = present(roster.get("a"))
    replica = journals.replicas_of(worker)
    roster.add(with_journal("b", two))
    await until_up(journals, "a", "b")
    assert journals.replicas_of(worker) == replica
    roster.replace([with_journal("a", two)])
    await until_up(journals, "a")
    assert present(roster.get("a")) is worker
    assert journals.replicas_of(worker) != replica
    roster.replace([spec("a")])
    await until_up(journals)
    assert journals.replicas_of(worker) == []
    roster.replace([])
    await until_up(journals)


async def test_unusable_endpoint_is_logged_and_the_others_are_read(
    journals: Journals,
    roster: Roster,
    engines: list[PublishingEngine],
    caplog: pytest.LogCaptureFixture,
) -> None:
    roster.add(with_journal("a", "udp://127.0.0.1:1"))
    roster.add(with_journal("b", engines[0].endpoint))
    await until_up(journals, "b")
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
    tmp_path: Path, key_file: Path, engines: list[PublishingEngine]
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
    tmp_path: Path, engines: list[PublishingEngine]
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


async def test_stopped_router_reads_no_journal(
    tmp_path: Path, engines: list[PublishingEngine]
) -> None:
    file = fleet_file(tmp_path, f"[{engines[0].endpoint}, {engines[1].endpoint}]")
    app = App(load(file), file)
    await app.start()
    await eventually(lambda: all(engine.publisher.is_read for engine in engines))
    await app.stop()
    assert list(app.journals.counts()) == []
    await eventually(lambda: not any(engine.publisher.is_read for engine in engines))


def asked(roster: Roster, letters: str, name: str = "x") -> RequestInfo:
    """Return a request with a prompt of whole blocks."""
    body = text(*letters)
    hashes = roster.prefixes.hashes("m", body)
    return replace(make_ask(prefix=hashes), id=name, prefix_bytes=len(body))


async def test_an_engine_that_reports_prefixes_is_followed_by_two_routers(
    journals: Journals, roster: Roster, engines: list[PublishingEngine]
) -> None:
    engine = engines[0]
    worker = roster.add(with_journal("a", engine.endpoint))
    late_roster = Roster()
    late_worker = late_roster.add(with_journal("a", engine.endpoint))
    late = Journals(late_roster, None)
    await until_up(journals, "a")
    assert worker.reports_prefixes
    ask = asked(roster, "ab")
    roster.expect_prefix(ask, worker)
    await eventually(lambda: engine.publisher.names)
    assert engine.publisher.names == [("x", name_of(ask.prefix, ask.prefix_bytes))]
    (name,) = [name for _, name in engine.publisher.names]
    number = engine.arrive("chatcmpl-x-00000001", 256, name)
    roster.prefixes.stop_expecting(ask.prefix, worker.index)
    await eventually(lambda: held(roster.prefixes, text("a", "b")) == {0: 2})
    await until_up(late, "a")
    assert held(late_roster.prefixes, text("a", "b")) == {0: 2}
    engine.evict(number, 128, 256)
    for each in (roster, late_roster):
        await eventually(lambda each=each: held(each.prefixes, text("a", "b")) == {0: 1})
    late.close()
    assert held(late_roster.prefixes, text("a", "b")) == {}
    assert not late_worker.reports_prefixes


async def test_own_prefixes_are_known_before_the_engine_reports_their_names(
    journals: Journals, roster: Roster, engines: list[PublishingEngine]
) -> None:
    engine = engines[0]
    worker = roster.add(with_journal("a", engine.endpoint))
    await until_up(journals, "a")
    own, other = asked(roster, "ab"), asked(roster, "cd", "y")
    roster.expect_prefix(own, worker)
    engine.arrive("chatcmpl-y-00000001", 256)
    engine.arrive("chatcmpl-x-00000001", 256)
    for ask in (own, other):
        roster.prefixes.stop_expecting(ask.prefix, worker.index)
    await eventually(lambda: held(roster.prefixes, text("a", "b")) == {0: 2})
    assert held(roster.prefixes, text("c", "d")) == {}
    assert {request.name for request in journals.replicas_of(worker)[0].requests.values()} == {b""}


async def test_a_lost_journal_leaves_expectations_and_the_next_snapshot_the_truth(
    journals: Journals, roster: Roster, engines: list[PublishingEngine]
) -> None:
    engine = engines[0]
    worker = roster.add(with_journal("a", engine.endpoint))
    await until_up(journals, "a")
    ask = asked(roster, "ab")
    name = name_of(ask.prefix, ask.prefix_bytes)
    number = engine.arrive("chatcmpl-x-00000001", 256, name)
    await eventually(lambda: held(roster.prefixes, text("a", "b")) == {0: 2})
    engine.silent = True
    engine.evict(number, 128, 256)
    journals.update(time.monotonic() + 10.0)
    assert not worker.reports_prefixes
    assert held(roster.prefixes, text("a", "b")) == {0: 2}
    roster.prefixes.stop_expecting(ask.prefix, worker.index)
    assert held(roster.prefixes, text("a", "b")) == {}
    engine.silent = False

    def is_read_again() -> bool:
        journals.update(time.monotonic())
        return worker.reports_prefixes

    await eventually(is_read_again)
    assert held(roster.prefixes, text("a", "b")) == {0: 1}


async def test_a_request_of_several_prompts_has_no_name(
    journals: Journals, roster: Roster, engines: list[PublishingEngine]
) -> None:
    worker = roster.add(with_journal("a", engines[0].endpoint))
    await until_up(journals, "a")
    for name, prompts in (("two", 2), ("one", 1)):
        ask = asked(roster, "ab", name)
        ask.prompts = prompts
        roster.expect_prefix(ask, worker)
    await eventually(lambda: engines[0].publisher.names)
    assert [name for name, _ in engines[0].publisher.names] == ["one"]


async def test_tokens_of_a_removed_workers_streams_are_known_until_they_end(
    journals: Journals, roster: Roster, engines: list[PublishingEngine]
) -> None:
    engine = engines[0]
    worker = roster.add(with_journal("a", engine.endpoint))
    await until_up(journals, "a")
    worker.requests = 1
    roster.remove("a")
    journals.update(time.monotonic())
    other = roster.add(with_journal("b", engines[1].endpoint))
    assert other.index != worker.index
    number = engine.arrive("chatcmpl-x-00000001", 256, b"")
    engine.write(number, 5)
    await eventually(lambda: list(journals.stream_tokens(worker, "x") or ()) == [5])
    assert held(roster.prefixes, text("a", "b")) == {}
    worker.requests = 0
    roster.pass_to_successor(worker)
    journals.update(time.monotonic())
    assert journals.stream_tokens(worker, "x") is None
