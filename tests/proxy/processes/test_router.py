"""Routers of several real processes on one port, before fake workers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.proxy.processes.router_group import (
    DEADLINE_S,
    POLL_S,
    PROC,
    RouterGroup,
    free_port,
    hold,
    leave,
    samples,
    serving,
    stored_response,
    total,
    until,
    worker_of_response,
)
from tests.proxy.wire import scripts
from tests.proxy.wire.fake_worker import FakeWorker
from tests.proxy.wire.raw_client import Answer, BrokenError, Client, bearer, chat, get
from tests.proxy.wire.site import eventually
from vllm_sched.cli.main import main

NAMES = ("a", "b")
Fakes = dict[str, FakeWorker]


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterGroup]:
    """Two processes, shared by tests that leave them unchanged."""
    group = RouterGroup(tmp_path_factory.mktemp("group"), NAMES)
    yield group
    group.close()


@pytest.fixture
async def fakes(group: RouterGroup) -> AsyncIterator[Fakes]:
    """Workers that are up in all processes; clients are closed at the end."""
    fakes = await group.start_workers()
    await group.wait_until_up()
    for fake in fakes.values():
        fake.calls.clear()
    yield fakes
    await leave(fakes, group)


async def send_requests(client: Client, count: int) -> list[int]:
    return [(await client.ask(chat())).status for _ in range(count)]


async def wait_for_served(fakes: Fakes, count: int) -> None:
    await eventually(
        lambda: sum(len(fake.served) for fake in fakes.values()) >= count, within=DEADLINE_S
    )


async def wait_for_only(clients: list[Client], fake: FakeWorker) -> None:
    """Wait until all processes send all requests to one worker."""
    async with asyncio.timeout(DEADLINE_S):
        for client in clients:
            in_a_row = 0
            while in_a_row < 4:
                before = len(fake.served)
                assert await send_requests(client, 1) == [200]
                in_a_row = in_a_row + 1 if len(fake.served) > before else 0


async def test_worker_limit_holds_in_a_burst(group: RouterGroup, fakes: Fakes) -> None:
    """One request more is possible: the other process may decide at the same moment."""
    most, per_process = 4, 20
    watching = await group.connect()
    clients = [client for _ in range(per_process) for client in await group.one_of_each()]
    pids = group.pids.values()

    async def all_read() -> bool:
        waits = (await samples(watching))["proxy_queue_requests"]
        return waits + sum(len(fake.served) for fake in fakes.values()) == len(clients)

    for _ in range(5):  # sometimes one process ends before the other begins
        opening = hold(fakes)
        for fake in fakes.values():
            fake.calls.clear()
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        for client in clients:
            await client.send(chat())
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        await until(all_read)
        at_once = [len(fake.served) for fake in fakes.values()]
        opening.set()
        answers = await asyncio.gather(*(client.answer() for client in clients))
        assert {answer.status for answer in answers} == {200}
        assert all(most <= served <= most + 1 for served in at_once), at_once
        await group.wait_for_requests(0)


@pytest.mark.usefixtures("fakes")
async def test_every_process_returns_the_sum_of_metrics(group: RouterGroup) -> None:
    clients = await group.one_of_each()
    before = await samples(clients[0])
    for number, client in enumerate(clients):
        await send_requests(client, 3 + number)
    for page in [await samples(client) for client in clients]:
        for name in ("proxy_requests_total", "proxy_request_duration_seconds_count"):
            assert total(page, name) - total(before, name) == 7
        assert page["proxy_processes"] == 2
        assert page['proxy_worker_up{worker="a",role="general",model="tiny"}'] == 1
        assert page["proxy_client_connections"] >= 2
    other = await clients[0].ask(get("/metrics", b"Accept: application/openmetrics-text"))
    assert other.body.endswith(b"# EOF\n")
    assert b"# TYPE proxy_requests counter" in other.body


async def test_admin_requests_hold_in_all_processes(group: RouterGroup, fakes: Fakes) -> None:
    clients = await group.one_of_each()
    started = time.time()
    for client in clients:
        await send_requests(client, 2)
    entries = await group.admin_request("/decisions?limit=50")
    assert len([entry for entry in entries if entry["time"] >= started]) == 4
    times = [entry["time"] for entry in entries]
    assert times == sorted(times, reverse=True)
    await group.admin_request("/workers/a/drain", "POST")
    await wait_for_only(clients, fakes["b"])
    await group.admin_request("/workers/a/undrain", "POST")
    await group.wait_until_up()
    await group.admin_request("/workers/b", "DELETE")
    await wait_for_only(clients, fakes["a"])
    spec = {"name": "b", "url": fakes["b"].url, "max_requests": 4}
    await group.admin_request("/workers", "POST", json=spec)
    await group.wait_until_up()


async def test_drain_now_moves_requests_of_all_processes(group: RouterGroup, fakes: Fakes) -> None:
    opening = hold(fakes)
    each, more = await group.connect_to_each(), await group.connect_to_each()
    clients = [client for name in each for client in (each[name], more[name])]
    for number, client in enumerate(clients):
        await client.send(chat())
        await wait_for_served(fakes, number + 1)
    assert [len(fake.served) for fake in fakes.values()] == [2, 2]
    drained = await group.admin_request("/workers/a/drain?now=true", "POST")
    assert (drained["moved"], drained["remaining"]) == (2, {})
    await eventually(lambda: len(fakes["b"].served) == 4, within=DEADLINE_S)
    await group.wait_until(lambda workers: workers["a"]["state"] == "drained")
    command = ["drain", str(group.file), "a", "--now", "--url", group.admin]
    assert await asyncio.to_thread(main, command) == 0
    opening.set()
    assert {(await client.answer()).status for client in clients} == {200}
    await group.admin_request("/workers/a/undrain", "POST")
    await group.wait_until_up()


async def test_all_processes_find_a_stored_response(group: RouterGroup, fakes: Fakes) -> None:
    """A follow-up goes to the worker that stores the response."""
    first, second = await group.one_of_each()
    for number in range(4):
        name = f"resp_{number}"
        for fake in fakes.values():
            fake.always(stored_response(name))
        holder = await worker_of_response(first, fakes)
        for fake in fakes.values():  # a too early follow-up must not look like a stored one
            fake.always(stored_response(f"next_{number}"))
        # The response is published at the end of the turn, which no event shows.
        async with asyncio.timeout(DEADLINE_S):
            hits = 0
            while hits < 3:
                found = await worker_of_response(second, fakes, previous_response_id=name)
                hits = hits + 1 if found == holder else 0


async def test_reload_reaches_all_processes(group: RouterGroup, fakes: Fakes) -> None:
    """By a signal and by the admin API; a bad file changes nothing."""
    clients = await group.one_of_each()
    group.write("a", routing="{policy: round_robin}")
    good = group.file.read_text()
    try:
        group.file.write_text(f"{good}nonsense: 1\n")
        group.send_signal(signal.SIGHUP)
        group.wait_for_line("was not reloaded")
        for client in clients:
            assert await send_requests(client, 4) == [200] * 4
        assert all(fake.served for fake in fakes.values())
        group.file.write_text(good)
        group.send_signal(signal.SIGHUP)
        await wait_for_only(clients, fakes["a"])
        for client in clients:
            answer = await client.ask(chat("hi", b"X-Explain: 1"))
            assert b"reason=round_robin" in answer.one(b"x-route")
    finally:
        group.write(*NAMES)
        await group.admin_request("/reload", "POST")
    await group.wait_until_up()


async def test_restarted_process_uses_the_last_read_fleet_file(tmp_path: Path) -> None:
    """Files that only the first fleet file names may be gone, and keys may have changed."""
    stays, goes, comes = "k" * 32, "g" * 32, "c" * 32
    (tmp_path / "stays").write_text(stays)
    (tmp_path / "goes").write_text(goes)
    tenant = "- {{name: {0}, keys_file: {1}/{0}}}\n"
    first, second = (tenant.format(name, tmp_path) for name in ("stays", "goes"))

    async def status_with(client: Client, key: str) -> int:
        return (await client.ask(chat("hi", bearer(key)))).status

    async def wait_for(group: RouterGroup, key: str, status: int, *refused: str) -> None:
        """Wait until all processes answer a key with a status; they refuse other keys."""
        for client in await group.one_of_each():
            async with asyncio.timeout(DEADLINE_S):
                while await status_with(client, key) != status:  # noqa: ASYNC110
                    await asyncio.sleep(POLL_S)
            assert {await status_with(client, other) for other in refused} <= {401}

    async with serving(tmp_path, ["a"], more=f"tenants:\n{first}{second}") as (group, _):
        await group.wait_until(lambda workers: workers["a"]["state"] == "up")
        group.more = f"tenants:\n{first}"
        group.write("a")
        group.send_signal(signal.SIGHUP)
        await wait_for(group, goes, 401)
        (tmp_path / "goes").unlink()
        (tmp_path / "stays").write_text(comes)
        for victim, old in group.pids.items():
            os.kill(old, signal.SIGKILL)
            await eventually(
                lambda victim=victim, old=old: group.pids.get(victim, old) != old, within=DEADLINE_S
            )
            await wait_for(group, stays, 200, goes, comes)
        group.send_signal(signal.SIGHUP)
        await wait_for(group, comes, 200, stays)


async def test_breaker_is_open_in_all_processes(group: RouterGroup, fakes: Fakes) -> None:
    texts = "worker a gets no requests", "worker a responds, and"

    def logged() -> list[str]:
        return [line for line in group.lines if any(text in line for text in texts)]

    first, second = await group.one_of_each()
    assert logged() == []  # a second line within a minute is not logged
    failing = fakes["a"]
    failing.always(scripts.error(503, "busy", (b"retry-after", b"2")))
    while not failing.served:
        assert await send_requests(first, 1) == [200]
    assert len(failing.served) == 1
    # The breaker is published at the end of the turn, which no event shows.
    await group.wait_until(lambda workers: workers["a"]["state"] == "resting")
    await group.wait_until(lambda workers: workers["a"]["why"].startswith("it returned 503; "))
    assert await send_requests(second, 6) == [200] * 6
    assert len(failing.served) == 1
    failing.always(scripts.answer())

    async def is_tried() -> bool:
        await send_requests(second, 1)
        return len(failing.served) >= 2

    await until(is_tried)
    await group.wait_until_up()
    assert await send_requests(first, 4) == [200] * 4
    assert len(failing.served) >= 3
    group.wait_for_line(texts[1])
    began, ended = logged()  # once, from any process
    assert "INFO" in began  # a busy worker is no warning
    assert began.endswith(" s: it returned 503\n")
    assert "INFO" in ended


async def send_held_requests(
    group: RouterGroup, fakes: Fakes
) -> tuple[list[Client], asyncio.Event]:
    """Send a request to each process; workers answer once the returned event is set."""
    opening, clients = hold(fakes), await group.one_of_each()
    for client in clients:
        await client.send(chat())
    await wait_for_served(fakes, len(clients))
    await group.wait_for_requests(len(clients))
    return clients, opening


async def statuses_of(clients: list[Client]) -> list[int | None]:
    """Return the statuses of responses, None for a broken connection."""

    async def status_of(client: Client) -> int | None:
        try:
            return (await client.answer(within=DEADLINE_S)).status
        except (BrokenError, ConnectionError):
            return None

    return sorted(await asyncio.gather(*map(status_of, clients)), key=str)


@pytest.mark.parametrize("victim_role", ["leader", "other"])
async def test_killed_process_is_replaced(
    group: RouterGroup, fakes: Fakes, victim_role: str
) -> None:
    before = total(await samples(await group.connect()), "proxy_requests_total")
    clients, opening = await send_held_requests(group, fakes)
    leader = group.leader
    victim = leader if victim_role == "leader" else 1 - leader
    ended = sum("exited (signal 9)" in line for line in group.lines)
    led = sum(" leads" in line for line in group.lines)
    old = group.pids[victim]
    os.kill(old, signal.SIGKILL)
    group.wait_for_line("exited (signal 9)", ended + 1)
    if victim_role == "leader":
        group.wait_for_line(" leads", led + 1)
        assert group.leader == 1 - victim
    # The request of the dead process is released while the other runs.
    await group.wait_for_requests(1)
    opening.set()
    assert await statuses_of(clients) == [200, None]
    await eventually(lambda: group.pids.get(victim, old) != old, within=DEADLINE_S)
    await group.wait_until_up()
    for client in await group.one_of_each():
        assert await send_requests(client, 4) == [200] * 4
        page = await samples(client)
        assert page["proxy_processes"] == 2
        assert page["proxy_process_restarts_total"] >= 1
        # Earlier counts are kept.
        assert total(page, "proxy_requests_total") >= before + 1 + 4


async def test_process_with_sigterm_finishes_requests_and_is_replaced(
    group: RouterGroup, fakes: Fakes
) -> None:
    clients, opening = await send_held_requests(group, fakes)
    before = group.pids
    ended = sum("exited (exit status 0)" in line for line in group.lines)
    os.kill(before[1 - group.leader], signal.SIGTERM)
    opening.set()
    assert await statuses_of(clients) == [200, 200]
    group.wait_for_line("exited (exit status 0)", ended + 1)
    await eventually(lambda: len(group.pids) == 2 and group.pids != before, within=DEADLINE_S)
    await group.wait_until_up()


class LiveView:
    def __init__(self) -> None:
        self.fields: list[str] = []
        self.rows: dict[int, dict[str, object]] = {}
        self.ticked: set[int] = set()

    async def follow(self, group: RouterGroup, is_over: Callable[[], bool]) -> None:
        """Apply the events of the admin API until a condition holds."""
        async with (
            asyncio.timeout(DEADLINE_S),
            aiohttp.ClientSession() as session,
            session.get(f"{group.admin}/admin/live") as answer,
        ):
            async for line in answer.content:
                if line.startswith(b"data: "):
                    self.take(json.loads(line[6:]))
                    if is_over():
                        break

    def take(self, data: dict[str, list[list[int]]]) -> None:
        if "fields" in data:  # a full state
            self.fields, self.rows = [*map(str, data["fields"])], {}
        for row in data["rows"]:
            self.rows[row[0]] = dict(zip(self.fields, row, strict=True))
        self.ticked |= {tick[0] for tick in data["ticks"]}

    @property
    def running(self) -> int:
        return sum(row["ended"] is None and bool(row["worker"]) for row in self.rows.values())


async def test_live_view_and_log_show_requests_of_all_processes(
    group: RouterGroup, fakes: Fakes
) -> None:
    for fake in fakes.values():
        fake.always(scripts.stream(4, gap_s=0.02))
    clients = await group.one_of_each()
    names = [f"look-for-{number}" for number in range(len(clients))]
    await group.admin_request("/logs", "PUT", json={"requests": True})
    view, asking = LiveView(), list[asyncio.Task[Answer]]()
    found: dict[object, dict[str, object]] = {}

    def ask_and_look() -> bool:
        if not asking:  # all processes record from now on
            for client, name in zip(clients, names, strict=True):
                data = chat("hi", f"X-Request-Id: {name}".encode(), stream=True)
                asking.append(asyncio.create_task(client.ask(data)))
        found.update((row["id"], row) for row in view.rows.values() if row["ended"])
        return found.keys() >= set(names)

    await view.follow(group, ask_and_look)
    await asyncio.gather(*asking)
    numbers = {found[name]["n"] for name in names}
    assert len(numbers) == len(names) == 2
    assert numbers <= view.ticked
    assert {found[name]["worker"] for name in names} <= set(NAMES)
    for name in names:
        await asyncio.to_thread(group.wait_for_line, f"REQUEST id={name}")
    await group.admin_request("/logs", "PUT", json={"requests": False})


async def test_requests_of_a_killed_process_leave_the_live_view(
    group: RouterGroup, fakes: Fakes
) -> None:
    clients, opening = await send_held_requests(group, fakes)
    view, killed = LiveView(), asyncio.Event()

    def kill_and_look() -> bool:
        if not killed.is_set() and view.running == 2:
            killed.set()
            os.kill(group.pids[1 - group.leader], signal.SIGKILL)
        return killed.is_set() and view.running == 1

    await view.follow(group, kill_and_look)
    opening.set()
    assert await statuses_of(clients) == [200, None]


async def drain(group: RouterGroup, fakes: Fakes) -> None:
    """Drain the router; check that it closes its clients and finishes its requests."""
    first_request, idle, busy = [await group.one_of_each() for _ in range(3)]
    group.send_signal(signal.SIGTERM)
    for client in first_request:
        give_up = time.monotonic() + DEADLINE_S
        while not (answer := await client.ask(chat())).all(b"connection"):
            assert time.monotonic() < give_up
        assert (answer.status, answer.one(b"connection")) == (200, b"close")
        assert await client.closed() == b""
    assert (await (await group.connect()).ask(chat())).status == 200
    opening = hold(fakes)
    for client in busy:
        await client.send(chat())
    for client in idle:
        assert await client.closed(within=DEADLINE_S) == b""
    with pytest.raises(ConnectionRefusedError):
        await group.connect()
    assert group.process.poll() is None
    pids = group.pids
    assert len(pids) == 2
    opening.set()
    assert [(await client.answer()).status for client in busy] == [200, 200]
    assert await asyncio.to_thread(group.process.wait, DEADLINE_S) == 0
    assert not any((PROC / str(pid)).exists() for pid in pids.values())


async def test_second_signal_ends_processes_that_drain(tmp_path: Path) -> None:
    group = RouterGroup(tmp_path, NAMES, drain_s=DEADLINE_S)
    fakes = await group.start_workers()
    try:
        await group.wait_until_up()
        for fake in fakes.values():
            fake.calls.clear()
        clients, opening = await send_held_requests(group, fakes)
        group.send_signal(signal.SIGTERM)
        await asyncio.to_thread(group.wait_for_line, "draining for at most")
        group.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(group.process.wait, DEADLINE_S) == 0
        assert not any("does not exit" in line for line in group.lines)
        assert await statuses_of(clients) == [503, 503]
        opening.set()
    finally:
        group.close()
        await leave(fakes, group)


async def test_new_router_serves_while_processes_of_a_killed_one_drain_and_drains_too(
    tmp_path: Path,
) -> None:
    listens = free_port(), free_port()
    group = RouterGroup(tmp_path, NAMES, listens=listens, drain_s=DEADLINE_S)
    pids, after = group.pids, group
    fakes = await group.start_workers()
    try:
        await group.wait_until_up()
        opening = hold(fakes)
        for fake in fakes.values():
            fake.calls.clear()
        client = await group.connect()
        await client.send(chat())
        await wait_for_served(fakes, 1)
        group.process.kill()
        (tmp_path / "next").mkdir()
        after = RouterGroup(
            tmp_path / "next",
            NAMES,
            listens=listens,
            drain_s=DEADLINE_S,
            notice_s=6.0,
            ports=group.ports,
        )
        await after.connect_to_each()
        assert set(await after.workers()) == set(NAMES)
        opening.set()
        assert (await client.answer()).status == 200
        await leave({}, group, after)
        await eventually(lambda: not any(map(alive, pids.values())), within=DEADLINE_S)
        await after.wait_until_up()
        await drain(after, fakes)
    finally:
        after.close()
        for pid in filter(alive, pids.values()):
            os.kill(pid, signal.SIGKILL)
        group.close()
        await leave(fakes, group, after)


def alive(pid: int) -> bool:
    """Return whether a process runs and is no zombie."""
    try:
        state = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
