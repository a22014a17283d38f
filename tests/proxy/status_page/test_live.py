"""Updates of the status page: only while there are viewers, and bounded."""

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
from tests.present import present
from tests.proxy.core.making import LONG, SHORT, make_info, router_of, spec, worker_of
from tests.proxy.wire.site import eventually


class ManualLiveView(LiveView):
    async def _run(self) -> None:
        pass


class Site:
    """A router's metrics, made-up requests and a clock."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.metrics = Metrics(router_of(spec("s0", SHORT), spec("l0", LONG)))
        self.metrics.recent._clock = self.clock
        self.records: list[RequestRecord] = []
        self.metrics.under_way = lambda: self.records
        self.live: LiveView = ManualLiveView(
            self.metrics, LiveState(self.metrics), self.clock, self.clock
        )

    def clock(self) -> float:
        return self.now

    def request(self, worker: str | None = "s0", **fields: Any) -> RequestRecord:
        record = RequestRecord()
        record.started = self.now
        record.info = make_info(**fields)
        self.records.append(record)
        if worker is not None:
            found = worker_of(self.metrics.router, worker)
            record.place(self.now, Decision(found, Reason.SHORT_POOL))
        return record

    def end(self, record: RequestRecord, status: int = 200) -> None:
        self.records.remove(record)
        record.close(self.now, self.metrics, "completions", status, None)

    async def beat(self, seconds: float = 0.25) -> None:
        """Let time pass and send updates."""
        self.now += seconds
        await self.live.send_updates()


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    site = Site()
    yield site
    site.live.close()


@pytest.fixture
async def viewer(site: Site) -> Viewer:
    return join(site.live)


def join(live: LiveView) -> Viewer:
    return present(live.join())


async def read_update(viewer: Viewer) -> tuple[str, dict[str, Any]]:
    assert viewer.busy
    message = await viewer.get()
    assert message is not None
    name, data, *rest = message.decode().split("\n")
    assert rest == ["", ""]
    return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


def by_field(data: dict[str, Any]) -> list[dict[str, Any]]:
    return [dict(zip(recorder.FIELDS, row, strict=True)) for row in data["rows"]]


async def read_rows(viewer: Viewer) -> list[dict[str, Any]]:
    return by_field((await read_update(viewer))[1])


async def test_nothing_is_recorded_without_viewers(site: Site) -> None:
    record = site.request()
    record.record_tokens(site.now, site.metrics)
    record.record_tokens(site.now + 1, site.metrics)
    assert record.ticks is None
    site.end(record)
    assert not site.live.recorder._rows


async def test_viewer_gets_the_full_state_then_changes(site: Site, viewer: Viewer) -> None:
    first = site.request()
    await site.beat()
    name, data = await read_update(viewer)
    assert name == "all"
    assert [worker["name"] for worker in data["state"]["workers"]] == ["s0", "l0"]
    [row] = by_field(data)
    assert row["status"] is None
    site.now += 0.1
    for _ in range(3):
        site.now += 0.1
        first.record_tokens(site.now, site.metrics)
    await site.beat(0.0)
    name, data = await read_update(viewer)
    assert name == "news"
    assert by_field(data)[0]["first"] == 450
    assert data["ticks"] == [[1, 450, 550, 650]]
    site.end(first)
    await site.beat()
    [row] = await read_rows(viewer)
    assert (row["ended"], row["status"], row["tokens"]) == (650, 200, 3)
    await site.beat()
    assert await read_rows(viewer) == []


async def test_queued_request_is_shown_then_its_worker(site: Site, viewer: Viewer) -> None:
    record = site.request(None)
    await site.beat()
    [row] = await read_rows(viewer)
    assert (row["pool"], row["worker"], row["placed"]) == ("none", None, None)
    decode, prefill = (worker_of(site.metrics.router, name) for name in ("l0", "s0"))
    record.queue_s = 0.25
    handover = HandoverDecision(prefill, 0, 9, 1, 1)
    record.place(site.now, Decision(decode, Reason.HANDOVER, handover=handover))
    await site.beat()
    [row] = await read_rows(viewer)
    assert (row["pool"], row["worker"], row["prefill"], row["placed"]) == (
        "handover", "l0", "s0", 250
    )  # fmt: skip
    record.prefilled_at = site.now
    await site.beat()
    [row] = await read_rows(viewer)
    assert row["prefilled"] == 500


async def test_ticks_are_limited(site: Site, viewer: Viewer) -> None:
    record = site.request()
    for _ in range(10_000):
        site.now += 0.001
        record.record_tokens(site.now, site.metrics)
    await site.beat()
    await read_update(viewer)
    record.record_tokens(site.now, site.metrics)
    assert record.ticks is not None
    assert len(record.ticks) == 1
    for _ in range(10_000):
        site.now += 0.001
        record.record_tokens(site.now, site.metrics)
    assert len(record.ticks) == recorder.MAX_TICKS


async def test_slow_viewer_gets_the_full_state_again(site: Site, viewer: Viewer) -> None:
    await site.beat()
    for _ in range(5):
        site.end(site.request())
        await site.beat()
    assert (await read_update(viewer))[0] == "all"
    assert not viewer.busy  # later changes are not kept
    await site.beat()
    name, data = await read_update(viewer)
    assert name == "all"
    assert len(data["rows"]) == 5


async def test_viewer_that_does_not_read_is_dropped(site: Site, viewer: Viewer) -> None:
    await site.beat()
    await site.beat(live.READ_TIMEOUT_S + 1)
    assert viewer.ended
    assert not site.live._viewers


async def test_number_of_viewers_is_limited(site: Site, viewer: Viewer) -> None:
    more = [site.live.join() for _ in range(live.MAX_VIEWERS)]
    assert more.count(None) == 1
    site.live.leave(viewer)
    assert site.live.join() is not None


async def test_close_ends_all_viewers(site: Site, viewer: Viewer) -> None:
    site.live.close()
    assert await viewer.get() is None
    assert site.live.join() is None


async def test_rows_above_the_limit_are_counted_as_dropped(
    site: Site, viewer: Viewer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await site.beat()
    await read_update(viewer)
    monkeypatch.setattr(recorder, "MAX_ROWS", 3)
    for _ in range(5):
        site.end(site.request())
    site.request()
    await site.beat()
    _, data = await read_update(viewer)
    assert len(data["rows"]) == 3
    assert data["dropped"] == 2
    await site.beat()
    _, data = await read_update(viewer)
    assert (len(data["rows"]), data["dropped"]) == (1, 0)  # the running request


async def test_time_on_a_failed_worker_is_not_waiting_time(site: Site, viewer: Viewer) -> None:
    record = site.request()
    site.now += 5.0
    record.place(site.now, Decision(worker_of(site.metrics.router, "l0"), Reason.RETRY))
    await site.beat()
    [row] = await read_rows(viewer)
    assert (row["worker"], row["placed"] - row["arrived"]) == ("l0", 0)


async def test_new_viewer_gets_the_last_minute(site: Site) -> None:
    old, recent = site.request(), site.request("l0")
    recent.record_tokens(site.now + 60.0, site.metrics)
    site.end(old)
    site.now += 61.0
    site.end(recent, 502)
    viewer = join(site.live)
    await site.beat()
    [row] = await read_rows(viewer)
    assert row == {
        "n": -1, "id": row["id"], "model": "m", "size": "short", "pool": "long",
        "worker": "l0", "prefill": None, "reason": "short_pool", "status": 502,
        "prompt_tokens": 100, "tokens": None, "arrived": 0, "placed": 0, "prefilled": None,
        "first": 60_000, "ended": 61_000,
    }  # fmt: skip


async def test_classes_equal_those_of_metrics(site: Site) -> None:
    recent, running = site.request(), site.request()
    for record in (recent, running):
        present(record.info).rank = Rank.BATCH
    site.end(recent)
    site.now += 1.0
    viewer = join(site.live)
    await site.beat()
    assert [row["size"] for row in await read_rows(viewer)] == ["batch", "batch"]


async def test_texts_of_clients_are_cut_and_cleaned(site: Site, viewer: Viewer) -> None:
    record = site.request()
    record.request = Request(RequestHead(), b"")
    record.request.id, present(record.info).model = b"i" * 5000, "\ud800<b>"
    await site.beat()
    [row] = await read_rows(viewer)
    assert row["id"] == "i" * recorder.MAX_TEXT
    assert row["model"] == "?<b>"


async def test_records_are_dropped_after_the_last_viewer(site: Site) -> None:
    site.live = LiveView(site.metrics, LiveState(site.metrics), site.clock, site.clock)
    viewer = join(site.live)
    assert site.metrics.live is site.live.recorder
    assert site.live._task is not None
    site.end(site.request())
    assert site.live.recorder._rows
    site.live.leave(viewer)
    await site.live._task
    assert site.metrics.live is None
    assert not site.live.recorder._rows


class Sibling(Site):
    """A site of another process."""

    def __init__(self, mark: int) -> None:
        super().__init__()
        self.live.recorder.process_index, self.live.recorder.num_processes = mark, 2


@pytest.fixture
async def processes(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[Sibling]]:
    """Return two processes, of which the first leads. A test may change the list."""
    monkeypatch.setattr(live, "MIN_RESEND_INTERVAL_S", 0.0)
    sites = [Sibling(0), Sibling(1)]
    leader = sites[0].live

    async def collect_all(wanted: UpdateRequest) -> list[LiveUpdate]:
        return [site.live.recorder.update(sites[0].now, wanted) for site in sites]

    leader.collect_all = collect_all
    yield sites
    leader.close()
    for site in sites:
        site.live.recorder.end()


async def test_leader_merges_updates_of_all_processes(
    processes: list[Sibling], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "STOP_AFTER_S", 0.01)
    first, second = processes
    for site in processes:
        site.end(site.request())  # before the first viewer
    viewer = join(first.live)
    for site in processes:
        site.request()
    await first.beat()
    name, data = await read_update(viewer)
    assert name == "all"
    numbers = [row["n"] for row in by_field(data)]
    assert len(set(numbers)) == len(numbers) == 4
    assert data["state"]["clients"] == 0
    assert second.metrics.live is second.live.recorder
    second.records[0].record_tokens(first.now, second.metrics)
    await first.beat()
    name, data = await read_update(viewer)
    assert name == "news"
    assert [tick[0] for tick in data["ticks"]] == [row["n"] for row in by_field(data)]
    first.live.close()
    second.now += 1.0
    await eventually(lambda: second.metrics.live is None)


async def workers_of_full_state(viewer: Viewer, leader: Site) -> dict[str, dict[str, Any]]:
    """Return the rows of a new full state by worker."""
    assert not viewer.busy
    await leader.beat()
    name, data = await read_update(viewer)
    assert name == "all"
    return {row["worker"]: row for row in by_field(data)}


async def test_requests_of_a_dead_process_are_removed(processes: list[Sibling]) -> None:
    leader, viewer = processes[0], join(processes[0].live)
    leader.request("s0")
    processes[1].request("l0")
    await leader.beat()
    assert len(await read_rows(viewer)) == 2
    processes[1:] = []  # without an end of its requests
    await leader.beat()
    assert set(await workers_of_full_state(viewer, leader)) == {"s0"}
    # Its successor counts from the beginning, so its rows are new.
    processes.append(Sibling(1))
    processes[1].request("l0")
    await leader.beat()
    assert set(await workers_of_full_state(viewer, leader)) == {"s0", "l0"}
    await leader.beat()
    assert (await read_update(viewer))[0] == "news"


async def test_lost_part_causes_a_new_full_state(processes: list[Sibling]) -> None:
    leader, other = processes
    viewer = join(leader.live)
    record = other.request("l0")
    await leader.beat()
    await read_update(viewer)
    other.end(record)
    lost = UpdateRequest(leader.live._zero, last_minute=False, figures=False)
    assert len(other.live.recorder.update(leader.now, lost).rows) == 1
    await leader.beat()
    assert (await workers_of_full_state(viewer, leader))["l0"]["status"] == 200


async def test_full_state_is_sent_at_most_once_a_second(site: Site, viewer: Viewer) -> None:
    names = []
    lost = UpdateRequest(site.live._zero, last_minute=False, figures=False)
    for _ in range(20):
        site.live.recorder.update(site.now, lost)
        await site.beat(0.125)
        if viewer.busy:
            names.append((await read_update(viewer))[0])
    assert 2 <= names.count("all") <= 4


async def test_ends_of_shown_requests_are_never_dropped(
    site: Site, viewer: Viewer, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [site.request() for _ in range(5)]
    await site.beat()
    assert len(await read_rows(viewer)) == 5
    monkeypatch.setattr(recorder, "MAX_ROWS", 2)
    for record in records:
        site.end(record)
    site.end(site.request())
    await site.beat()
    _, data = await read_update(viewer)
    assert [row["status"] for row in by_field(data)] == [200] * 5
    assert data["dropped"] == 1
    assert not site.live.recorder._reported


async def test_new_viewer_gets_a_whole_busy_minute(site: Site) -> None:
    for _ in range(5000):
        site.end(site.request())
        site.now += 0.01
    viewer = join(site.live)
    await site.beat()
    assert len(await read_rows(viewer)) == 5000


async def test_process_without_an_answer_is_left_out(site: Site) -> None:
    async def collect_all(wanted: UpdateRequest) -> list[LiveUpdate]:
        del wanted
        raise TimeoutError

    site.live.collect_all = collect_all
    viewer = join(site.live)
    site.request()
    await site.beat()
    assert len(await read_rows(viewer)) == 1
