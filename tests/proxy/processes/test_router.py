"""Routers of several real processes on one port, before fake workers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.proxy.processes.router_group import (
    DEADLINE_S,
    POLL_S,
    PROC,
    RouterGroup,
    free_port,
    hold,
    samples,
    total,
)
from tests.proxy.wire import scripts
from tests.proxy.wire.fake_worker import FakeWorker
from tests.proxy.wire.raw_client import BrokenError, Client, bearer, chat, get, request
from tests.proxy.wire.site import eventually
from vllm_sched.cli.main import main

NAMES = ("a", "b")


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterGroup]:
    """Two processes, shared by tests that leave them unchanged."""
    group = RouterGroup(tmp_path_factory.mktemp("group"), NAMES)
    yield group
    group.close()


@pytest.fixture
async def fakes(group: RouterGroup) -> AsyncIterator[dict[str, FakeWorker]]:
    """Workers that are up in all processes."""
    fakes = await start_workers(group)
    await group.wait_until_up()
    for fake in fakes.values():
        fake.calls.clear()
    yield fakes
    for fake in fakes.values():
        await fake.stop()


async def start_workers(group: RouterGroup) -> dict[str, FakeWorker]:
    """Start the workers."""
    fakes = {name: FakeWorker(name) for name in NAMES}
    for name, fake in fakes.items():
        fake.port = group.ports[name]
        await fake.listen()
    return fakes


async def send_requests(client: Client, count: int) -> list[int]:
    """Send requests one after the other; return their statuses."""
    return [(await client.ask(chat())).status for _ in range(count)]


async def wait_for_requests(fakes: dict[str, FakeWorker], count: int) -> None:
    """Wait until workers have this number of requests."""
    await eventually(
        lambda: sum(len(fake.served) for fake in fakes.values()) >= count, within=DEADLINE_S
    )


async def test_all_processes_serve_and_load_workers_evenly(
    group: RouterGroup, fakes: dict[str, FakeWorker]
) -> None:
    clients = await group.connect_to_each()
    answers = await asyncio.gather(*(send_requests(client, 20) for client in clients.values()))
    assert answers == [[200] * 20] * 2
    served = [len(fake.served) for fake in fakes.values()]
    assert sum(served) == 40
    assert min(served) >= 10
    for client in clients.values():
        client.close()


async def test_worker_limit_holds_in_a_burst(
    group: RouterGroup, fakes: dict[str, FakeWorker]
) -> None:
    """One request more is possible: the other process may decide at the same moment."""
    most, per_process = 4, 20
    watching = await Client.connect(group.port)
    clients = [
        client for _ in range(per_process) for client in (await group.connect_to_each()).values()
    ]
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
        async with asyncio.timeout(DEADLINE_S):
            while not await all_read():  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)
        at_once = [len(fake.served) for fake in fakes.values()]
        opening.set()
        answers = await asyncio.gather(*(client.answer() for client in clients))
        assert {answer.status for answer in answers} == {200}
        assert all(most <= served <= most + 1 for served in at_once), at_once
        await group.wait_until(lambda workers: all(w["requests"] == 0 for w in workers.values()))
    for client in (*clients, watching):
        client.close()


@pytest.mark.usefixtures("fakes")
async def test_every_process_returns_the_sum_of_metrics(group: RouterGroup) -> None:
    clients = list((await group.connect_to_each()).values())
    before = await samples(clients[0])
    for number, client in enumerate(clients):
        await send_requests(client, 3 + number)
    pages = [await samples(client) for client in clients]
    for page in pages:
        assert total(page, "proxy_requests_total") - total(before, "proxy_requests_total") == 7
        seen = "proxy_request_duration_seconds_count"
        assert total(page, seen) - total(before, seen) == 7
        assert page["proxy_processes"] == 2
        assert page['proxy_worker_up{worker="a",role="general",model="tiny"}'] == 1
        assert page["proxy_client_connections"] >= 2
    other = await clients[0].ask(get("/metrics", b"Accept: application/openmetrics-text"))
    assert other.body.endswith(b"# EOF\n")
    assert b"# TYPE proxy_requests counter" in other.body
    for client in clients:
        client.close()


async def test_admin_requests_hold_in_all_processes(
    group: RouterGroup, fakes: dict[str, FakeWorker]
) -> None:
    clients = list((await group.connect_to_each()).values())
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
    for client in clients:
        client.close()


async def test_drain_now_moves_requests_of_all_processes(
    group: RouterGroup, fakes: dict[str, FakeWorker]
) -> None:
    opening = hold(fakes)
    each, more = await group.connect_to_each(), await group.connect_to_each()
    clients = [client for name in each for client in (each[name], more[name])]
    for number, client in enumerate(clients):
        await client.send(chat())
        await wait_for_requests(fakes, number + 1)
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
    for client in clients:
        client.close()


async def wait_for_only(clients: list[Client], fake: FakeWorker) -> None:
    """Wait until all processes send all requests to one worker."""
    async with asyncio.timeout(DEADLINE_S):
        for client in clients:
            in_a_row = 0
            while in_a_row < 4:
                before = len(fake.served)
                assert await send_requests(client, 1) == [200]
                in_a_row = in_a_row + 1 if len(fake.served) > before else 0


async def test_all_processes_find_a_stored_response(
    group: RouterGroup, fakes: dict[str, FakeWorker]
) -> None:
    """A follow-up goes to the worker that stores the response."""
    first, second = (await group.connect_to_each()).values()
    for number in range(4):
        name = f"resp_{number}"
        for fake in fakes.values():
            body = {"id": name, "object": "response", "status": "completed"}
            fake.always(scripts.answer(200, json.dumps(body).encode()))
        fields = {"model": "tiny", "input": "hi", "max_output_tokens": 5}
        counts = {key: len(fake.served) for key, fake in fakes.items()}
        first_request = request(json.dumps(fields).encode(), path="/v1/responses")
        assert (await first.ask(first_request)).status == 200
        [holder] = [key for key, fake in fakes.items() if len(fake.served) > counts[key]]
        for fake in fakes.values():  # a too early follow-up must not look like a stored one
            body = {"id": f"next_{number}", "object": "response", "status": "completed"}
            fake.always(scripts.answer(200, json.dumps(body).encode()))
        fields["previous_response_id"] = name
        follow_up = request(json.dumps(fields).encode(), path="/v1/responses")
        # The response is published at the end of the turn, which no event shows.
        async with asyncio.timeout(DEADLINE_S):
            hits = 0
            while hits < 3:
                before = len(fakes[holder].served)
                assert (await second.ask(follow_up)).status == 200
                hits = hits + 1 if len(fakes[holder].served) > before else 0
    first.close()
    second.close()


@pytest.mark.parametrize("how", ["signal", "admin"])
async def test_reload_reaches_all_processes(
    group: RouterGroup, fakes: dict[str, FakeWorker], how: str
) -> None:
    async def reload() -> None:
        if how == "admin":
            await group.admin_request("/reload", "POST")
        else:
            group.send_signal(signal.SIGHUP)

    clients = list((await group.connect_to_each()).values())
    group.write("a", routing="{policy: round_robin}")
    try:
        await reload()
        await wait_for_only(clients, fakes["a"])
        header = b"x-route"
        for client in clients:
            answer = await client.ask(chat("hi", b"X-Explain: 1"))
            [route] = [value for key, value in answer.headers if key == header]
            assert b"reason=round_robin" in route
    finally:
        group.write(*NAMES)
        await reload()
    await group.wait_until_up()
    for client in clients:
        client.close()


async def test_bad_fleet_file_changes_nothing(
    group: RouterGroup, fakes: dict[str, FakeWorker]
) -> None:
    group.file.write_text(group.file.read_text() + "nonsense: 1\n")
    count = sum("was not reloaded" in line for line in group.lines)
    group.send_signal(signal.SIGHUP)
    group.wait_for_line("was not reloaded", count + 1)
    group.write(*NAMES)
    for client in (await group.connect_to_each()).values():
        assert await send_requests(client, 4) == [200] * 4
        client.close()
    assert all(fake.served for fake in fakes.values())


async def test_restarted_process_uses_the_last_read_fleet_file(tmp_path: Path) -> None:
    """Files that only the first fleet file names may be gone, and keys may have changed."""
    stays, goes, comes = "k" * 32, "g" * 32, "c" * 32
    (tmp_path / "stays").write_text(stays)
    (tmp_path / "goes").write_text(goes)
    tenant = "- {{name: {0}, keys_file: {1}/{0}}}\n"
    first, second = (tenant.format(name, tmp_path) for name in ("stays", "goes"))
    group = RouterGroup(tmp_path, ("a",), more=f"tenants:\n{first}{second}")
    fake = FakeWorker("a")
    fake.port = group.ports["a"]
    await fake.listen()
    try:
        await group.wait_until(lambda workers: workers["a"]["state"] == "up")
        group.more = f"tenants:\n{first}"
        group.write("a")
        group.send_signal(signal.SIGHUP)
        for client in (await group.connect_to_each()).values():
            async with asyncio.timeout(DEADLINE_S):
                while await with_key(client, goes) != 401:  # noqa: ASYNC110
                    await asyncio.sleep(POLL_S)
            client.close()
        (tmp_path / "goes").unlink()
        (tmp_path / "stays").write_text(comes)
        for victim, old in group.pids.items():
            os.kill(old, signal.SIGKILL)
            await eventually(
                lambda victim=victim, old=old: group.pids.get(victim, old) != old,
                within=DEADLINE_S,
            )
            for client in (await group.connect_to_each()).values():
                async with asyncio.timeout(DEADLINE_S):
                    while await with_key(client, stays) != 200:  # noqa: ASYNC110
                        await asyncio.sleep(POLL_S)
                assert await with_key(client, goes) == 401
                assert await with_key(client, comes) == 401
                client.close()
        group.send_signal(signal.SIGHUP)
        for client in (await group.connect_to_each()).values():
            async with asyncio.timeout(DEADLINE_S):
                while await with_key(client, comes) != 200:  # noqa: ASYNC110
                    await asyncio.sleep(POLL_S)
            assert await with_key(client, stays) == 401
            client.close()
    finally:
        group.close()
        await fake.stop()


async def with_key(client: Client, key: str) -> int:
    """Send a request with a key; return its status."""
    return (await client.ask(chat("hi", bearer(key)))).status


async def test_breaker_is_open_in_all_processes(
    group: RouterGroup, fakes: dict[str, FakeWorker]
) -> None:
    first, second = (await group.connect_to_each()).values()
    failing = "a"
    assert breaker_lines(group, failing) == []  # a second line within a minute is not logged
    fakes[failing].always(scripts.error(503, "busy", (b"retry-after", b"2")))
    while not fakes[failing].served:
        assert await send_requests(first, 1) == [200]
    assert len(fakes[failing].served) == 1
    # The breaker is published at the end of the turn, which no event shows.
    await group.wait_until(lambda workers: workers[failing]["state"] == "resting")
    await group.wait_until(lambda workers: workers[failing]["why"].startswith("it returned 503; "))
    assert await send_requests(second, 6) == [200] * 6
    assert len(fakes[failing].served) == 1
    fakes[failing].always(scripts.answer())
    async with asyncio.timeout(DEADLINE_S):
        while len(fakes[failing].served) < 2:
            await send_requests(second, 1)
            await asyncio.sleep(POLL_S)
    await group.wait_until_up()
    assert await send_requests(first, 4) == [200] * 4
    assert len(fakes[failing].served) >= 3
    group.wait_for_line(f"worker {failing} responds, and")
    began, ended = breaker_lines(group, failing)  # once, from any process
    assert "INFO" in began  # a busy worker is no warning
    assert began.endswith(" s: it returned 503\n")
    assert "INFO" in ended
    first.close()
    second.close()


def breaker_lines(group: RouterGroup, name: str) -> list[str]:
    """Return the log lines about a worker's breaker."""
    texts = f"worker {name} gets no requests", f"worker {name} responds, and"
    return [line for line in group.lines if any(text in line for text in texts)]


@pytest.mark.parametrize("victim_role", ["leader", "other"])
async def test_killed_process_is_replaced(
    group: RouterGroup, fakes: dict[str, FakeWorker], victim_role: str
) -> None:
    clients = await group.connect_to_each()
    # Each process has one running request when one of them dies.
    before = total(await samples(next(iter(clients.values()))), "proxy_requests_total")
    opening = hold(fakes)
    for client in clients.values():
        await client.send(chat())
    await wait_for_requests(fakes, 2)
    await group.wait_until(lambda workers: sum(w["requests"] for w in workers.values()) == 2)
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
    await group.wait_until(lambda workers: sum(w["requests"] for w in workers.values()) == 1)
    opening.set()
    ends = await asyncio.gather(*(status_of(client) for client in clients.values()))
    assert sorted(ends, key=str) == [200, None]
    await eventually(lambda: group.pids.get(victim, old) != old, within=DEADLINE_S)
    await group.wait_until_up()
    for client in (again := await group.connect_to_each()).values():
        assert await send_requests(client, 4) == [200] * 4
        page = await samples(client)
        assert page["proxy_processes"] == 2
        assert page["proxy_process_restarts_total"] >= 1
        # Earlier counts are kept.
        assert total(page, "proxy_requests_total") >= before + 1 + 4
    for client in (*clients.values(), *again.values()):
        client.close()


async def test_process_with_sigterm_finishes_requests_and_is_replaced(
    group: RouterGroup, fakes: dict[str, FakeWorker]
) -> None:
    clients = await group.connect_to_each()
    opening = hold(fakes)
    for client in clients.values():
        await client.send(chat())
    await wait_for_requests(fakes, 2)
    before = group.pids
    ended = sum("exited (exit status 0)" in line for line in group.lines)
    os.kill(before[1 - group.leader], signal.SIGTERM)
    opening.set()
    ends = await asyncio.gather(*(status_of(client) for client in clients.values()))
    assert ends == [200, 200]
    group.wait_for_line("exited (exit status 0)", ended + 1)
    await eventually(lambda: len(group.pids) == 2 and group.pids != before, within=DEADLINE_S)
    await group.wait_until_up()
    for client in clients.values():
        client.close()


async def status_of(client: Client) -> int | None:
    """Return the status of a response, or None for a broken connection."""
    try:
        return (await client.answer(within=DEADLINE_S)).status
    except (BrokenError, ConnectionError):
        return None


async def drain(group: RouterGroup, fakes: dict[str, FakeWorker]) -> None:
    """Drain the router; check that it closes its clients and finishes its requests."""
    first_request, idle, busy = [list((await group.connect_to_each()).values()) for _ in range(3)]
    group.send_signal(signal.SIGTERM)
    for client in first_request:
        give_up = time.monotonic() + DEADLINE_S
        while not (answer := await client.ask(chat())).all(b"connection"):
            assert time.monotonic() < give_up
        assert (answer.status, answer.one(b"connection")) == (200, b"close")
        assert await client.closed() == b""
    new = await Client.connect(group.port)
    assert (await new.ask(chat())).status == 200
    opening = hold(fakes)
    for client in busy:
        await client.send(chat())
    for client in idle:
        assert await client.closed(within=DEADLINE_S) == b""
    with pytest.raises(ConnectionRefusedError):
        await Client.connect(group.port)
    assert group.process.poll() is None
    pids = group.pids
    assert len(pids) == 2
    opening.set()
    assert [(await client.answer()).status for client in busy] == [200, 200]
    assert await asyncio.to_thread(group.process.wait, DEADLINE_S) == 0
    assert not any((PROC / str(pid)).exists() for pid in pids.values())
    for client in (*first_request, *idle, *busy, new):
        client.close()


async def test_new_router_serves_while_processes_of_a_killed_one_drain_and_drains_too(
    tmp_path: Path,
) -> None:
    listens = free_port(), free_port()
    group = RouterGroup(tmp_path, NAMES, listens=listens, drain_s=DEADLINE_S)
    pids = group.pids
    fakes = await start_workers(group)
    try:
        await group.wait_until_up()
        opening = hold(fakes)
        for fake in fakes.values():
            fake.calls.clear()
        client = await Client.connect(group.port)
        await client.send(chat())
        await wait_for_requests(fakes, 1)
        group.process.kill()
        folder = tmp_path / "next"
        folder.mkdir()
        after = RouterGroup(
            folder, NAMES, listens=listens, drain_s=DEADLINE_S, notice_s=6.0, ports=group.ports
        )
        try:
            for connection in (await after.connect_to_each()).values():
                connection.close()
            assert set(await after.workers()) == set(NAMES)
            opening.set()
            assert (await client.answer()).status == 200
            client.close()
            await eventually(lambda: not any(map(alive, pids.values())), within=DEADLINE_S)
            await after.wait_until_up()
            await drain(after, fakes)
        finally:
            after.close()
    finally:
        for pid in filter(alive, pids.values()):
            os.kill(pid, signal.SIGKILL)
        group.close()
        for fake in fakes.values():
            await fake.stop()


def alive(pid: int) -> bool:
    """Return whether a process runs and is no zombie."""
    try:
        state = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
