"""Several processes on one port, as users start them: real ones, before fake workers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.proxy.processes.crew import DEADLINE_S, PROC, Crew, free_port, samples, total
from tests.proxy.wire import scripts
from tests.proxy.wire.fake_worker import FakeWorker
from tests.proxy.wire.raw_client import BrokenError, Client, bearer, chat, get, request
from tests.proxy.wire.site import eventually

NAMES = ("a", "b")


@pytest.fixture(scope="module")
def crew(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    """Two processes, for all tests that leave them as they were."""
    made = Crew(tmp_path_factory.mktemp("crew"), NAMES)
    yield made
    made.close()


@pytest.fixture
async def fakes(crew: Crew) -> AsyncIterator[dict[str, FakeWorker]]:
    """Workers that are up, known to all processes, and not resting."""
    made = await listening(crew)
    await crew.up()
    for fake in made.values():
        fake.calls.clear()
    yield made
    for fake in made.values():
        await fake.stop()


async def listening(crew: Crew) -> dict[str, FakeWorker]:
    """Start the workers."""
    made = {name: FakeWorker(name) for name in NAMES}
    for name, fake in made.items():
        fake.port = crew.ports[name]
        await fake.listen()
    return made


def hold(fakes: dict[str, FakeWorker]) -> asyncio.Event:
    """Have workers answer once the event that is returned is set."""
    opening = asyncio.Event()
    for fake in fakes.values():
        fake.always(scripts.gated(opening, scripts.answer()))
    return opening


async def asked(client: Client, count: int) -> list[int]:
    """Ask one after the other."""
    return [(await client.ask(chat())).status for _ in range(count)]


async def arrived(fakes: dict[str, FakeWorker], count: int) -> None:
    """Wait until so many requests are at the workers."""
    await eventually(
        lambda: sum(len(fake.served) for fake in fakes.values()) >= count, within=DEADLINE_S
    )


async def test_all_serve_and_load_workers_evenly(crew: Crew, fakes: dict[str, FakeWorker]) -> None:
    clients = await crew.each()
    answers = await asyncio.gather(*(asked(client, 20) for client in clients.values()))
    assert answers == [[200] * 20] * 2
    served = [len(fake.served) for fake in fakes.values()]
    assert sum(served) == 40
    assert min(served) >= 10
    for client in clients.values():
        client.close()


async def test_a_workers_limit_holds_in_a_burst(crew: Crew, fakes: dict[str, FakeWorker]) -> None:
    """But for one request that the other decides on at the very moment."""
    most, each = 4, 20
    watching = await Client.connect(crew.port)
    clients = [client for _ in range(each) for client in (await crew.each()).values()]
    pids = crew.pids.values()

    async def all_read() -> bool:
        waits = (await samples(watching))["proxy_queue_requests"]
        return waits + sum(len(fake.served) for fake in fakes.values()) == len(clients)

    for _ in range(5):  # at times one is through before the other begins
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
            while not await all_read():
                pass
        at_once = [len(fake.served) for fake in fakes.values()]
        opening.set()
        answers = await asyncio.gather(*(client.answer() for client in clients))
        assert {answer.status for answer in answers} == {200}
        assert all(most <= served <= most + 1 for served in at_once), at_once
        await crew.until(lambda workers: all(w["requests"] == 0 for w in workers.values()))
    for client in (*clients, watching):
        client.close()


@pytest.mark.usefixtures("fakes")
async def test_metrics_are_everybodys_sum_whoever_is_asked(crew: Crew) -> None:
    clients = list((await crew.each()).values())
    before = await samples(clients[0])
    for number, client in enumerate(clients):
        await asked(client, 3 + number)
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


async def test_operators_rule_all_processes(crew: Crew, fakes: dict[str, FakeWorker]) -> None:
    clients = list((await crew.each()).values())
    started = time.time()
    for client in clients:
        await asked(client, 2)
    entries = await crew.ask_admin("/decisions?limit=50")
    assert len([entry for entry in entries if entry["time"] >= started]) == 4
    times = [entry["time"] for entry in entries]
    assert times == sorted(times, reverse=True)
    await crew.ask_admin("/workers/a/drain", "POST")
    await only(clients, fakes["b"])
    await crew.ask_admin("/workers/a/undrain", "POST")
    await crew.up()
    await crew.ask_admin("/workers/b", "DELETE")
    await only(clients, fakes["a"])
    spec = {"name": "b", "url": fakes["b"].url, "max_requests": 4}
    await crew.ask_admin("/workers", "POST", json=spec)
    await crew.up()
    for client in clients:
        client.close()


async def only(clients: list[Client], fake: FakeWorker) -> None:
    """Wait until all processes give everything to one worker."""
    async with asyncio.timeout(DEADLINE_S):
        for client in clients:
            in_a_row = 0
            while in_a_row < 4:
                before = len(fake.served)
                assert await asked(client, 1) == [200]
                in_a_row = in_a_row + 1 if len(fake.served) > before else 0


async def test_all_find_a_stored_response(crew: Crew, fakes: dict[str, FakeWorker]) -> None:
    """The follow-up goes to the worker that holds it, whichever process it comes to."""
    first, second = (await crew.each()).values()
    for number in range(4):
        name = f"resp_{number}"
        for fake in fakes.values():
            body = {"id": name, "object": "response", "status": "completed"}
            fake.always(scripts.answer(200, json.dumps(body).encode()))
        fields = {"model": "tiny", "input": "hi", "max_output_tokens": 5}
        counts = {key: len(fake.served) for key, fake in fakes.items()}
        asking = request(json.dumps(fields).encode(), path="/v1/responses")
        assert (await first.ask(asking)).status == 200
        [holder] = [key for key, fake in fakes.items() if len(fake.served) > counts[key]]
        for fake in fakes.values():  # else a follow-up that is too early would be taken for it
            body = {"id": f"next_{number}", "object": "response", "status": "completed"}
            fake.always(scripts.answer(200, json.dumps(body).encode()))
        fields["previous_response_id"] = name
        following = request(json.dumps(fields).encode(), path="/v1/responses")
        # It is told by the end of the turn; nothing says when that was.
        async with asyncio.timeout(DEADLINE_S):
            hits = 0
            while hits < 3:
                before = len(fakes[holder].served)
                assert (await second.ask(following)).status == 200
                hits = hits + 1 if len(fakes[holder].served) > before else 0
    first.close()
    second.close()


@pytest.mark.parametrize("how", ["signal", "admin"])
async def test_a_reload_reaches_all(crew: Crew, fakes: dict[str, FakeWorker], how: str) -> None:
    async def reload() -> None:
        if how == "admin":
            await crew.ask_admin("/reload", "POST")
        else:
            crew.tell(signal.SIGHUP)

    clients = list((await crew.each()).values())
    crew.write("a", routing="{policy: round_robin}")
    try:
        await reload()
        await only(clients, fakes["a"])
        header = b"x-route"
        for client in clients:
            answer = await client.ask(chat("hi", b"X-Explain: 1"))
            [route] = [value for key, value in answer.headers if key == header]
            assert b"reason=round_robin" in route
    finally:
        crew.write(*NAMES)
        await reload()
    await crew.up()
    for client in clients:
        client.close()


async def test_a_bad_file_changes_nothing(crew: Crew, fakes: dict[str, FakeWorker]) -> None:
    crew.file.write_text(crew.file.read_text() + "nonsense: 1\n")
    said = sum("was not reloaded" in line for line in crew.said)
    crew.tell(signal.SIGHUP)
    crew.says("was not reloaded", said + 1)
    crew.write(*NAMES)
    for client in (await crew.each()).values():
        assert await asked(client, 4) == [200] * 4
        client.close()
    assert all(fake.served for fake in fakes.values())


async def test_one_that_dies_is_begun_again_by_the_file_that_was_read_last(tmp_path: Path) -> None:
    """What only the first one named may be there no longer, and keys be others by now."""
    stays, goes, comes = "k" * 32, "g" * 32, "c" * 32
    (tmp_path / "stays").write_text(stays)
    (tmp_path / "goes").write_text(goes)
    tenant = "- {{name: {0}, keys_file: {1}/{0}}}\n"
    first, second = (tenant.format(name, tmp_path) for name in ("stays", "goes"))
    crew = Crew(tmp_path, ("a",), more=f"tenants:\n{first}{second}")
    fake = FakeWorker("a")
    fake.port = crew.ports["a"]
    await fake.listen()
    try:
        await crew.until(lambda workers: workers["a"]["state"] == "up")
        crew.more = f"tenants:\n{first}"
        crew.write("a")
        crew.tell(signal.SIGHUP)
        for client in (await crew.each()).values():
            async with asyncio.timeout(DEADLINE_S):
                while await with_key(client, goes) != 401:
                    pass
            client.close()
        (tmp_path / "goes").unlink()
        (tmp_path / "stays").write_text(comes)
        for victim, old in crew.pids.items():
            os.kill(old, signal.SIGKILL)
            await eventually(
                lambda victim=victim, old=old: crew.pids.get(victim, old) != old,
                within=DEADLINE_S,
            )
            for client in (await crew.each()).values():
                async with asyncio.timeout(DEADLINE_S):
                    while await with_key(client, stays) != 200:
                        pass
                assert await with_key(client, goes) == 401
                assert await with_key(client, comes) == 401
                client.close()
        crew.tell(signal.SIGHUP)
        for client in (await crew.each()).values():
            async with asyncio.timeout(DEADLINE_S):
                while await with_key(client, comes) != 200:
                    pass
            assert await with_key(client, stays) == 401
            client.close()
    finally:
        crew.close()
        await fake.stop()


async def with_key(client: Client, key: str) -> int:
    """Ask with a key; return the status."""
    return (await client.ask(chat("hi", bearer(key)))).status


async def test_a_breaker_is_open_for_all(crew: Crew, fakes: dict[str, FakeWorker]) -> None:
    first, second = (await crew.each()).values()
    ill = "a"
    assert rests(crew, ill) == []  # or this one would be no line, for a minute
    # It asks to be left alone for a while.
    fakes[ill].always(scripts.error(503, "busy", (b"retry-after", b"2")))
    while not fakes[ill].served:
        assert await asked(first, 1) == [200]
    assert len(fakes[ill].served) == 1
    # It takes no more than the end of a turn to tell; but nothing says when that was.
    await crew.until(lambda workers: workers[ill]["state"] == "resting")
    await crew.until(lambda workers: workers[ill]["why"].startswith("it returned 503; "))
    assert await asked(second, 6) == [200] * 6
    assert len(fakes[ill].served) == 1
    fakes[ill].always(scripts.answer())
    async with asyncio.timeout(DEADLINE_S):
        while len(fakes[ill].served) < 2:
            await asked(second, 1)
    await crew.up()
    assert await asked(first, 4) == [200] * 4
    assert len(fakes[ill].served) >= 3
    crew.says(f"worker {ill} responds, and")
    began, ended = rests(crew, ill)  # each once, whoever saw it
    assert "INFO" in began  # for it is merely busy
    assert began.endswith(" s: it returned 503\n")
    assert "INFO" in ended
    first.close()
    second.close()


def rests(crew: Crew, name: str) -> list[str]:
    """Return what the router has said of a worker's rests, and of their ends."""
    words = f"worker {name} gets no requests", f"worker {name} responds, and"
    return [line for line in crew.said if any(each in line for each in words)]


@pytest.mark.parametrize("who", ["leader", "other"])
async def test_a_killed_one_is_replaced(crew: Crew, fakes: dict[str, FakeWorker], who: str) -> None:
    clients = await crew.each()
    # Who is who, nobody says: each has one request under way when one of them dies.
    before = total(await samples(next(iter(clients.values()))), "proxy_requests_total")
    opening = hold(fakes)
    for client in clients.values():
        await client.send(chat())
    await arrived(fakes, 2)
    await crew.until(lambda workers: sum(w["requests"] for w in workers.values()) == 2)
    leader = crew.leader
    victim = leader if who == "leader" else 1 - leader
    ended = sum("exited (signal 9)" in line for line in crew.said)
    led = sum(" leads" in line for line in crew.said)
    old = crew.pids[victim]
    os.kill(old, signal.SIGKILL)
    crew.says("exited (signal 9)", ended + 1)
    if who == "leader":
        crew.says(" leads", led + 1)
        assert crew.leader == 1 - victim
    # The other goes on: what the dead one had is released while the other's is under way.
    await crew.until(lambda workers: sum(w["requests"] for w in workers.values()) == 1)
    opening.set()
    ends = await asyncio.gather(*(end(client) for client in clients.values()))
    assert sorted(ends, key=str) == [200, None]
    await eventually(lambda: crew.pids.get(victim, old) != old, within=DEADLINE_S)
    await crew.up()
    for client in (again := await crew.each()).values():
        assert await asked(client, 4) == [200] * 4
        page = await samples(client)
        assert page["proxy_processes"] == 2
        assert page["proxy_process_restarts_total"] >= 1
        # What was counted at the last look is counted still.
        assert total(page, "proxy_requests_total") >= before + 1 + 4
    for client in (*clients.values(), *again.values()):
        client.close()


async def test_sigterm_to_one_process(crew: Crew, fakes: dict[str, FakeWorker]) -> None:
    clients = await crew.each()
    opening = hold(fakes)
    for client in clients.values():
        await client.send(chat())
    await arrived(fakes, 2)
    before = crew.pids
    ended = sum("exited (exit status 0)" in line for line in crew.said)
    os.kill(before[1 - crew.leader], signal.SIGTERM)
    opening.set()
    ends = await asyncio.gather(*(end(client) for client in clients.values()))
    assert ends == [200, 200]
    crew.says("exited (exit status 0)", ended + 1)
    await eventually(lambda: len(crew.pids) == 2 and crew.pids != before, within=DEADLINE_S)
    await crew.up()
    for client in clients.values():
        client.close()


async def end(client: Client) -> int | None:
    """Return the status of an answer; None if the connection was broken off."""
    try:
        return (await client.answer(within=DEADLINE_S)).status
    except (BrokenError, ConnectionError):
        return None


async def test_a_drain_moves_clients_on_and_finishes_requests(tmp_path: Path) -> None:
    crew = Crew(tmp_path, NAMES, drain_s=DEADLINE_S, notice_s=6.0)
    fakes = await listening(crew)
    try:
        await crew.up()
        asking, idle, busy = [list((await crew.each()).values()) for _ in range(3)]
        crew.tell(signal.SIGTERM)
        for client in asking:
            give_up = time.monotonic() + DEADLINE_S
            while not (answer := await client.ask(chat())).all(b"connection"):
                assert time.monotonic() < give_up
            assert (answer.status, answer.one(b"connection")) == (200, b"close")
            assert await client.closed() == b""
        new = await Client.connect(crew.port)
        assert (await new.ask(chat())).status == 200
        opening = hold(fakes)
        for client in busy:
            await client.send(chat())
        for client in idle:
            assert await client.closed(within=DEADLINE_S) == b""
        with pytest.raises(ConnectionRefusedError):
            await Client.connect(crew.port)
        assert crew.process.poll() is None
        pids = crew.pids
        assert len(pids) == 2
        opening.set()
        assert [(await client.answer()).status for client in busy] == [200, 200]
        assert await asyncio.to_thread(crew.process.wait, DEADLINE_S) == 0
        assert not any((PROC / str(pid)).exists() for pid in pids.values())
        for client in (*asking, *idle, *busy, new):
            client.close()
    finally:
        crew.close()
        for fake in fakes.values():
            await fake.stop()


async def test_the_next_router_serves_while_a_killed_ones_processes_drain(tmp_path: Path) -> None:
    listens = free_port(), free_port()
    crew = Crew(tmp_path, NAMES, listens=listens, drain_s=DEADLINE_S)
    pids = crew.pids
    fakes = await listening(crew)
    try:
        await crew.up()
        opening = asyncio.Event()
        for fake in fakes.values():
            fake.calls.clear()
            fake.always(scripts.gated(opening, scripts.answer()))
        client = await Client.connect(crew.port)
        await client.send(chat())
        await arrived(fakes, 1)
        crew.process.kill()
        folder = tmp_path / "next"
        folder.mkdir()
        after = Crew(folder, NAMES, listens=listens)
        try:
            for each in (await after.each()).values():
                each.close()
            assert set(await after.workers()) == set(NAMES)
            opening.set()
            assert (await client.answer()).status == 200
        finally:
            after.close()
        client.close()
        await eventually(lambda: not any(map(alive, pids.values())), within=DEADLINE_S)
    finally:
        for pid in filter(alive, pids.values()):
            os.kill(pid, signal.SIGKILL)
        crew.close()
        for fake in fakes.values():
            await fake.stop()


def alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for does not."""
    try:
        state = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
