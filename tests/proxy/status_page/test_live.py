"""What the status page is told: only while somebody looks, and never more than is taken."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from proxy.core.fleet.leases import Decision, HandoverDecision
from proxy.core.model.types import Reason
from proxy.core.tenants.tenants import Rank
from proxy.http.request import Request, RequestHead
from proxy.metrics.registry import Metrics
from proxy.status_page import live, recorder
from proxy.status_page.live import LiveView, Viewer
from proxy.status_page.recorder import LiveUpdate, UpdateRequest
from proxy.status_page.snapshot import LiveState
from proxy.wire.exchange.request_record import RequestRecord
from tests.proxy.core.making import LONG, SHORT, ask, router_of, spec, worker_of
from tests.proxy.wire.site import eventually


class Still(LiveView):
    """One that tells when the test says so."""

    async def _run(self) -> None:
        pass


class Site:
    """A router's counts, requests that are made up, and a clock."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.metrics = Metrics(router_of(spec("s0", SHORT), spec("l0", LONG)))
        self.metrics.recent._clock = self.clock
        self.records: list[RequestRecord] = []
        self.metrics.under_way = lambda: self.records
        self.live: LiveView = Still(self.metrics, LiveState(self.metrics), self.clock, self.clock)

    def clock(self) -> float:
        """Tell the time."""
        return self.now

    def request(self, worker: str | None = "s0", **fields: Any) -> RequestRecord:
        """Begin a request."""
        record = RequestRecord()
        record.started = self.now
        record.ask = ask(**fields)
        self.records.append(record)
        if worker is not None:
            found = worker_of(self.metrics.router, worker)
            record.place(self.now, Decision(found, Reason.SHORT_POOL))
        return record

    def end(self, record: RequestRecord, status: int = 200) -> None:
        """End one."""
        self.records.remove(record)
        record.close(self.now, self.metrics, "completions", status, None)

    async def beat(self, seconds: float = 0.25) -> None:
        """Let time pass and have everybody told."""
        self.now += seconds
        await self.live.beat()


@pytest.fixture
async def site() -> Site:
    """Begin with nobody looking."""
    return Site()


@pytest.fixture
async def viewer(site: Site) -> AsyncIterator[Viewer]:
    """Look."""
    viewer = look(site.live)
    yield viewer
    site.live.close()


def look(live: LiveView) -> Viewer:
    """Open a page."""
    viewer = live.join()
    assert viewer is not None
    return viewer


async def told(viewer: Viewer) -> tuple[str, dict[str, Any]]:
    """Take what lies before a viewer."""
    assert viewer.busy
    message = await viewer.take()
    assert message is not None
    name, data, *rest = message.decode().split("\n")
    assert rest == ["", ""]
    return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


def named(row: list[Any]) -> dict[str, Any]:
    """Name a row's values."""
    return dict(zip(recorder.FIELDS, row, strict=True))


async def test_nothing_is_noted_while_nobody_looks(site: Site) -> None:
    record = site.request()
    record.saw_tokens(site.now, site.metrics)
    record.saw_tokens(site.now + 1, site.metrics)
    assert record.ticks is None
    site.end(record)
    assert not site.live.notes._rows


async def test_a_viewer_is_told_all_then_what_is_new(site: Site, viewer: Viewer) -> None:
    first = site.request()
    await site.beat()
    name, data = await told(viewer)
    assert name == "all"
    assert [worker["name"] for worker in data["state"]["workers"]] == ["s0", "l0"]
    [row] = data["rows"]
    assert named(row)["status"] is None
    site.now += 0.1
    for _ in range(3):
        site.now += 0.1
        first.saw_tokens(site.now, site.metrics)
    await site.beat(0.0)
    name, data = await told(viewer)
    assert name == "news"
    assert named(data["rows"][0])["first"] == 450
    assert data["ticks"] == [[1, 450, 550, 650]]
    site.end(first)
    await site.beat()
    _, data = await told(viewer)
    assert named(data["rows"][0]) | {"ended": 650, "status": 200, "tokens": 3} == named(
        data["rows"][0]
    )
    await site.beat()
    assert (await told(viewer))[1]["rows"] == []


async def test_one_that_waits_is_shown_then_where_it_went(site: Site, viewer: Viewer) -> None:
    record = site.request(None)
    await site.beat()
    row = named((await told(viewer))[1]["rows"][0])
    assert (row["pool"], row["worker"], row["placed"]) == ("none", None, None)
    workers = worker_of(site.metrics.router, "l0"), worker_of(site.metrics.router, "s0")
    record.queue_s = 0.25
    record.place(
        site.now,
        Decision(workers[0], Reason.HANDOVER, handover=HandoverDecision(workers[1], 0, 9, 1, 1)),
    )
    await site.beat()
    row = named((await told(viewer))[1]["rows"][0])
    assert (row["pool"], row["worker"], row["prefill"], row["placed"]) == (
        "handover", "l0", "s0", 250
    )  # fmt: skip
    record.prefilled_at = site.now
    await site.beat()
    assert named((await told(viewer))[1]["rows"][0])["prefilled"] == 500


async def test_ticks_are_bounded(site: Site, viewer: Viewer) -> None:
    record = site.request()
    for _ in range(10_000):
        site.now += 0.001
        record.saw_tokens(site.now, site.metrics)
    await site.beat()
    await told(viewer)
    record.saw_tokens(site.now, site.metrics)
    assert record.ticks is not None
    assert len(record.ticks) == 1
    for _ in range(10_000):
        site.now += 0.001
        record.saw_tokens(site.now, site.metrics)
    assert len(record.ticks) == recorder.MAX_TICKS


async def test_who_is_slow_misses_some_and_is_told_all_again(site: Site, viewer: Viewer) -> None:
    await site.beat()
    for _ in range(5):
        site.end(site.request())
        await site.beat()
    assert (await told(viewer))[0] == "all"
    assert not viewer.busy  # what came since was kept for nobody
    await site.beat()
    name, data = await told(viewer)
    assert name == "all"
    assert len(data["rows"]) == 5


async def test_who_takes_nothing_is_let_go(site: Site, viewer: Viewer) -> None:
    await site.beat()
    await site.beat(live.READ_TIMEOUT_S + 1)
    assert viewer.ended
    assert not site.live.watched


async def test_there_is_a_bound_to_viewers(site: Site, viewer: Viewer) -> None:
    more = [site.live.join() for _ in range(live.MAX_VIEWERS)]
    assert more.count(None) == 1
    site.live.leave(viewer)
    assert site.live.join() is not None


async def test_the_end_is_told_to_all(site: Site, viewer: Viewer) -> None:
    site.live.close()
    assert await viewer.take() is None
    assert site.live.join() is None


async def test_too_many_at_once_are_counted_instead(
    site: Site, viewer: Viewer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await site.beat()
    await told(viewer)
    monkeypatch.setattr(recorder, "MAX_ROWS", 3)
    for _ in range(5):
        site.end(site.request())
    site.request()
    await site.beat()
    _, data = await told(viewer)
    assert len(data["rows"]) == 3
    assert data["dropped"] == 2
    await site.beat()
    _, data = await told(viewer)
    assert (len(data["rows"]), data["dropped"]) == (1, 0)  # it is still under way


async def test_what_a_worker_took_that_failed_is_no_wait(site: Site, viewer: Viewer) -> None:
    record = site.request()
    site.now += 5.0
    record.place(site.now, Decision(worker_of(site.metrics.router, "l0"), Reason.RETRY))
    await site.beat()
    row = named((await told(viewer))[1]["rows"][0])
    assert (row["worker"], row["placed"] - row["arrived"]) == ("l0", 0)


async def test_what_was_before_is_remembered(site: Site) -> None:
    old, lately = site.request(), site.request("l0")
    lately.saw_tokens(site.now + 60.0, site.metrics)
    site.end(old)
    site.now += 61.0
    site.end(lately, 502)
    viewer = look(site.live)
    await site.beat()
    [row] = (await told(viewer))[1]["rows"]
    assert named(row) == {
        "n": -1, "id": named(row)["id"], "model": "m", "size": "short", "pool": "long",
        "worker": "l0", "prefill": None, "reason": "short_pool", "status": 502,
        "prompt_tokens": 100, "tokens": None, "arrived": 0, "placed": 0, "prefilled": None,
        "first": 60_000, "ended": 61_000,
    }  # fmt: skip
    site.live.close()


async def test_classes_are_those_of_the_metrics(site: Site) -> None:
    lately, now = site.request(), site.request()
    for each in (lately, now):
        assert each.ask is not None
        each.ask.rank = Rank.BATCH
    site.end(lately)
    site.now += 1.0
    viewer = look(site.live)
    await site.beat()
    rows = (await told(viewer))[1]["rows"]
    assert [named(row)["size"] for row in rows] == ["batch", "batch"]
    site.live.close()


async def test_what_clients_choose_is_cut_and_made_text(site: Site, viewer: Viewer) -> None:
    record = site.request()
    assert record.ask is not None
    record.request = Request(RequestHead(), b"")
    record.request.id, record.ask.model = b"i" * 5000, "\ud800<b>"
    await site.beat()
    row = named((await told(viewer))[1]["rows"][0])
    assert row["id"] == "i" * recorder.MAX_TEXT
    assert row["model"] == "?<b>"


async def test_nothing_is_kept_once_nobody_looks(site: Site) -> None:
    site.live = LiveView(site.metrics, LiveState(site.metrics), site.clock, site.clock)
    viewer = look(site.live)
    assert site.metrics.live is site.live.notes
    assert site.live._task is not None
    site.end(site.request())
    assert site.live.notes._rows
    site.live.leave(viewer)
    await site.live._task
    assert site.metrics.live is None
    assert not site.live.notes._rows


class Sibling(Site):
    """Another process's."""

    def __init__(self, mark: int) -> None:
        super().__init__()
        self.live.notes.mark, self.live.notes.marks = mark, 2


async def test_of_several_processes_one_tells_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "STOP_AFTER_S", 0.01)
    sites = [Sibling(0), Sibling(1)]
    leader = sites[0].live

    async def collect_all(wanted: UpdateRequest) -> list[LiveUpdate]:
        return [each.live.notes.part(each.now, wanted) for each in sites]

    leader.collect_all = collect_all
    for site in sites:
        site.end(site.request())  # before anybody looks
    viewer = look(leader)
    for site in sites:
        site.request()
    await sites[0].beat()
    name, data = await told(viewer)
    assert name == "all"
    numbers = [named(row)["n"] for row in data["rows"]]
    assert len(set(numbers)) == len(numbers) == 4
    assert data["state"]["clients"] == 0
    assert sites[1].metrics.live is sites[1].live.notes
    sites[1].records[0].saw_tokens(sites[1].now, sites[1].metrics)
    await sites[0].beat()
    name, data = await told(viewer)
    assert name == "news"
    assert [tick[0] for tick in data["ticks"]] == [named(row)["n"] for row in data["rows"]]
    leader.close()
    sites[1].now += 1.0
    await eventually(lambda: sites[1].metrics.live is None)


@pytest.fixture
async def crew(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[list[Sibling], Viewer]]:
    """Look at two processes, of which the first leads; those of the list are asked."""
    monkeypatch.setattr(live, "MIN_RESEND_INTERVAL_S", 0.0)
    sites = [Sibling(0), Sibling(1)]
    leader = sites[0].live

    async def collect_all(wanted: UpdateRequest) -> list[LiveUpdate]:
        return [each.live.notes.part(sites[0].now, wanted) for each in sites]

    leader.collect_all = collect_all
    viewer = look(leader)
    yield sites, viewer
    leader.close()
    for site in sites:
        site.live.notes.end()


async def shown(viewer: Viewer, site: Site) -> dict[str, dict[str, Any]]:
    """Have all told anew, which takes a beat to be asked for; return the requests by their ids."""
    assert not viewer.busy
    await site.beat()
    name, data = await told(viewer)
    assert name == "all"
    return {named(row)["worker"]: named(row) for row in data["rows"]}


async def test_requests_of_a_dead_process_are_gone(crew: tuple[list[Sibling], Viewer]) -> None:
    sites, viewer = crew
    sites[0].request("s0")
    sites[1].request("l0")
    await sites[0].beat()
    assert len((await told(viewer))[1]["rows"]) == 2
    sites[1:] = []  # it told no end
    await sites[0].beat()
    assert set(await shown(viewer, sites[0])) == {"s0"}
    # One that is begun in its place counts from the beginning: its rows are not the old ones.
    sites.append(Sibling(1))
    sites[1].request("l0")
    await sites[0].beat()
    assert set(await shown(viewer, sites[0])) == {"s0", "l0"}
    await sites[0].beat()
    assert (await told(viewer))[0] == "news"


async def test_a_part_that_came_too_late_is_made_good(
    crew: tuple[list[Sibling], Viewer],
) -> None:
    sites, viewer = crew
    record = sites[1].request("l0")
    await sites[0].beat()
    await told(viewer)
    sites[1].end(record)
    lost = UpdateRequest(sites[0].live._zero, whole=False, figures=False)
    assert len(sites[1].live.notes.part(sites[0].now, lost).rows) == 1
    await sites[0].beat()
    assert (await shown(viewer, sites[0]))["l0"]["status"] == 200


async def test_all_is_told_anew_once_a_second_at_most(site: Site, viewer: Viewer) -> None:
    names = []
    lost = UpdateRequest(site.live._zero, whole=False, figures=False)
    for _ in range(20):
        site.live.notes.part(site.now, lost)
        await site.beat(0.125)
        if viewer.busy:
            names.append((await told(viewer))[0])
    assert 2 <= names.count("all") <= 4


async def test_the_end_of_what_was_told_of_is_told_however_many_there_are(
    site: Site, viewer: Viewer, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [site.request() for _ in range(5)]
    await site.beat()
    assert len((await told(viewer))[1]["rows"]) == 5
    monkeypatch.setattr(recorder, "MAX_ROWS", 2)
    for record in records:
        site.end(record)
    site.end(site.request())
    await site.beat()
    _, data = await told(viewer)
    assert [named(row)["status"] for row in data["rows"]] == [200] * 5
    assert data["dropped"] == 1
    assert not site.live.notes._reported


async def test_a_whole_busy_minute_from_before_is_remembered(site: Site) -> None:
    for _ in range(5000):
        site.end(site.request())
        site.now += 0.01
    viewer = look(site.live)
    await site.beat()
    assert len((await told(viewer))[1]["rows"]) == 5000
    site.live.close()


async def test_a_process_that_does_not_answer_is_left_out(site: Site) -> None:
    async def collect_all(wanted: UpdateRequest) -> list[LiveUpdate]:
        del wanted
        raise TimeoutError

    site.live.collect_all = collect_all
    viewer = look(site.live)
    site.request()
    await site.beat()
    assert len((await told(viewer))[1]["rows"]) == 1
    site.live.close()
