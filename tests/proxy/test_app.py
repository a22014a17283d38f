"""The router as a process: start, reload, drain and stop."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from threading import Event

import aiohttp
import pytest

from proxy.app import App, allow_connections, serve
from proxy.config import FleetConfig, WorkerConfig, load, parse
from proxy.core.fleet.model_lists import MAX_MODEL_LIST_WAIT_S
from proxy.core.routing.handover_cost import HandoverVerdict
from proxy.errors import ConfigError, ProxyError
from proxy.setup import app as assembly
from proxy.setup.secrets import SecretKeys
from proxy.wire import bind
from tests.proxy.running import DEADLINE_S, ask, entry, running, serving, wait_until_up, write_fleet
from tests.proxy.wire import scripts
from tests.proxy.wire.fake_worker import FakeWorker
from tests.proxy.wire.kv import Kv
from tests.proxy.wire.raw_client import Client, chat, get
from tests.proxy.wire.site import eventually


@pytest.fixture
async def fakes() -> AsyncIterator[list[FakeWorker]]:
    workers = [FakeWorker("a"), FakeWorker("b")]
    async with serving(*workers):
        yield workers


@pytest.fixture
async def app(tmp_path: Path, fakes: list[FakeWorker]) -> AsyncIterator[App]:
    """Run a router; `write_fleet` with the same folder changes its fleet file."""
    async with running(write_fleet(tmp_path, *fakes)) as app:
        await wait_until_up(app, "a", "b")
        yield app


async def test_app_serves_requests_admin_and_metrics(app: App) -> None:
    assert await ask(app, chat()) == 200
    assert await ask(app, get("/ready")) == 200
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{app.admin_url}/admin/workers") as answer:
            assert [worker["name"] for worker in await answer.json()] == ["a", "b"]
        async with session.get(f"{app.admin_url}/admin/decisions") as answer:
            assert [entry["status"] for entry in await answer.json()] == [200]
        app.logs.writer._refused = 7
        async with session.get(f"{app.url}/metrics") as answer:
            page = await answer.text()
        assert "proxy_requests_total{" in page
        assert "\nproxy_log_lines_dropped_total 7\n" in page


async def test_reload_removes_a_worker_and_keeps_its_request(
    app: App, fakes: list[FakeWorker], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")  # of the root: a reload resets the levels of loggers
    gate = asyncio.Event()
    for fake in fakes:
        fake.always(scripts.gated(gate, scripts.answer()))
    requests = [asyncio.create_task(ask(app, chat())) for _ in range(2)]
    await asyncio.gather(*(fake.got() for fake in fakes))
    write_fleet(tmp_path, fakes[1])
    assert await app.reload() == []
    assert names(app) == ["b"]
    assert "1 workers; removed: a" in caplog.text
    gate.set()
    assert await asyncio.gather(*requests) == [200, 200]
    fakes[1].always(scripts.answer())
    assert [await ask(app, chat()) for _ in range(3)] == [200] * 3
    assert len(fakes[0].served) == 1


def names(app: App) -> list[str]:
    return [worker.name for worker in app.fleet.roster]


async def test_reload_before_start_applies(tmp_path: Path) -> None:
    """The router may still wait for ports of an earlier router."""
    a, b = ({"name": name, "url": f"http://{name}.test"} for name in "ab")
    source = write_fleet(tmp_path, a)
    app = App(load(source), source)
    write_fleet(tmp_path, a, b)
    assert await app.reload() == []
    assert names(app) == ["a", "b"]
    # An invalid file changes nothing.
    write_fleet(tmp_path, a, routing={"policy": "fastest"})
    with pytest.raises(ConfigError, match=r"routing\.policy"):
        await app.reload()
    assert (names(app), app.config.routing.policy) == (["a", "b"], "adaptive")
    # Restart settings are compared with the running configuration.
    write_fleet(tmp_path, a, b, router={"port": 9})
    assert [await app.reload(), await app.reload()] == [["router.port"]] * 2
    write_fleet(tmp_path, a, b)
    assert await app.reload() == []
    write_fleet(tmp_path, a | {"launch": {}}, b)
    assert await app.reload() == ["workers[0].launch"]
    app.source = None
    with pytest.raises(ProxyError, match="not started from a file"):
        await app.reload()


async def test_reload_names_a_removed_launched_worker(tmp_path: Path) -> None:
    a, b = ({"name": name, "url": f"http://{name}.test"} for name in "ab")
    source = write_fleet(tmp_path, a | {"launch": {}}, b)
    app = App(load(source), source)
    write_fleet(tmp_path, b)
    assert await app.reload() == ["workers: a keeps running if `up` started it"]


async def test_router_serves_while_a_reload_reads_the_file(
    fakes: list[FakeWorker], tmp_path: Path
) -> None:
    """The later of two reloads applies last. The caller's `read` may check launch arguments."""
    source, began, may_continue = write_fleet(tmp_path, *fakes), Event(), Event()
    readings: list[str] = []

    def read(path: Path) -> FleetConfig:
        readings.append(path.read_text())
        began.set()
        assert may_continue.wait(DEADLINE_S)
        return parse(readings[-1], str(path))

    app = App(load(source), source, read=read)
    await app.start()
    await wait_until_up(app, "a", "b")
    first = asyncio.create_task(app.reload())
    await asyncio.to_thread(began.wait, DEADLINE_S)
    write_fleet(tmp_path, fakes[1])
    second = asyncio.create_task(app.reload())
    assert await ask(app, chat()) == 200
    assert not first.done()
    assert len(readings) == 1
    may_continue.set()
    await asyncio.gather(first, second)
    assert names(app) == ["b"]
    await app.stop()


async def test_keys_from_files_and_environment_are_hidden_in_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "pool.key"
    pool = {"name": "p", "dns": "h", "port": 1, "api_key_file": str(file)}
    router = {"admin": {"port": 0, "key_env": "THE_KEY"}}
    source = write_fleet(tmp_path, router=router, discovery={"pools": [pool]})

    def log_line(app: App) -> bytes:
        record = logging.makeLogRecord({"msg": f"{file.read_text()} {os.environ['THE_KEY']}"})
        return app.logs.line_of(record, "").rstrip()

    file.write_text("of-the-pool")
    monkeypatch.setenv("THE_KEY", "of-the-operator-1")
    app = App(load(source), source)
    assert log_line(app).endswith(b" *** ***")
    file.write_text("another-of-the-pool")
    monkeypatch.setenv("THE_KEY", "of-the-operator-2")
    await app.reload()
    assert log_line(app).endswith(b" *** ***")


async def test_model_list_wait_uses_the_monotonic_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(assembly, "monotonic", lambda: now)
    app = App(parse("model: tiny\nworkers: [{name: a, url: 'http://a'}]\n", "fleet.yaml"))
    assert not app.fleet.roster.all_listed()
    now += MAX_MODEL_LIST_WAIT_S
    assert app.fleet.roster.all_listed()


def test_repr_of_secret_keys_hides_them() -> None:
    assert "secret" not in repr(SecretKeys({}, "secret-admin", {"pool": "secret-pool"}))


async def test_key_of_an_added_worker_is_hidden_in_logs() -> None:
    app = App(parse("model: tiny\nworkers: [{name: a, url: 'http://a'}]\n", "fleet.yaml"))

    def log_line() -> bytes:
        record = logging.makeLogRecord({"msg": "of-this-worker of-this"})
        return app.logs.line_of(record, "").rstrip()

    assert log_line().endswith(b" of-this-worker of-this")
    for name, key in (("c", "of-this"), ("d", "of-this-worker")):
        app.add_worker(WorkerConfig(name=name, url=f"http://{name}", api_key=key))
    assert log_line().endswith(b" *** ***")


async def test_non_leader_process_logs_requests_without_handover(
    tmp_path: Path, fakes: list[FakeWorker], caplog: pytest.LogCaptureFixture
) -> None:
    source = write_pair(tmp_path, fakes)
    app = App(load(source), source)
    app.router.placer.handovers["tiny", HandoverVerdict.NO_PREFILL] = 3
    await app.listen()
    try:
        await eventually(lambda: "3 requests were served without a hand-over" in caplog.text)
    finally:
        await app.stop()


def test_allow_connections_raises_the_open_file_limit() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
        allow_connections()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (limits[1], limits[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("port_owner", ["clients'", "operators'"])
async def test_start_waits_for_a_port_of_a_draining_router(
    port_owner: str,
    tmp_path: Path,
    fakes: list[FakeWorker],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(bind, "MAX_WAIT_S", DEADLINE_S)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        router = {"port": port} if port_owner == "clients'" else {"admin": {"port": port}}
        source = write_fleet(tmp_path, *fakes, router=router)
        app = App(load(source), source)
        starting = asyncio.create_task(app.start())
        await eventually(lambda: "may still drain" in caplog.text)
        assert str(port) in caplog.text
    try:
        await starting
        assert str(port) in app.url + app.admin_url
        await wait_until_up(app, "a", "b")
        assert caplog.text.count("may still drain") == 1
    finally:
        await app.stop()


async def test_port_in_use_is_a_proxy_error(
    tmp_path: Path, fakes: list[FakeWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bind, "MAX_WAIT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        source = write_fleet(tmp_path, *fakes, router={"port": port})
        with pytest.raises(ProxyError, match=f"cannot listen.*{port}"):
            await serve(load(source), source=source)


@pytest.fixture
async def process(
    tmp_path: Path, fakes: list[FakeWorker]
) -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    """Start the router as a process; return the process and its port."""
    source = write_fleet(tmp_path, *fakes, router={"drain_s": DEADLINE_S})
    async with router_process(source) as started:
        port, _ = await listening(started)
        yield started, port


@asynccontextmanager
async def router_process(source: Path, *before: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start the router as a process, optionally through another command."""
    command = [*before, sys.executable, "-m", "vllm_sched.cli.main", "router", str(source)]
    started = await asyncio.create_subprocess_exec(
        *command, stderr=subprocess.PIPE, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    )
    try:
        yield started
    finally:
        if started.returncode is None:
            started.kill()
        await started.communicate()


async def listening(process: asyncio.subprocess.Process) -> tuple[int, int]:
    """Return both ports from the process's output once both workers are up."""
    assert process.stderr is not None
    lines: list[str] = []
    async with asyncio.timeout(DEADLINE_S):
        while sum("is up" in line for line in lines) < 2 or not any(
            "/v1" in line for line in lines
        ):
            line = (await process.stderr.readline()).decode()
            assert line, f"the process ended: {''.join(lines)}"
            lines.append(line)
    [address] = [line for line in lines if "/v1" in line]
    clients, operators = (int(port) for port in re.findall(r"://127\.0\.0\.1:(\d+)", address))
    return clients, operators


async def test_more_clients_than_files_are_served_one_after_another(
    tmp_path: Path, fakes: list[FakeWorker]
) -> None:
    source = write_fleet(tmp_path, *fakes)
    low_limit = ("sh", "-c", 'ulimit -n 160 && exec "$@"', "sh")
    for fake in fakes:
        fake.always(scripts.stream(3, gap_s=0.05))
    async with router_process(source, *low_limit) as started:
        port, _ = await listening(started)
        clients = [await Client.connect(port) for _ in range(200)]
        for client in clients:
            await client.send(chat("hi", b"Connection: close", stream=True))
        for client in clients:
            head = await client.head(within=DEADLINE_S)
            assert head.status == 200
            assert (await client.body(head, within=DEADLINE_S)).endswith(scripts.DONE)
            client.close()


async def test_admin_connections_leave_files_for_requests(
    tmp_path: Path, fakes: list[FakeWorker]
) -> None:
    """450 connections exceed the process's limit of open files."""
    source = write_fleet(tmp_path, *fakes)
    low_limit = ("sh", "-c", 'ulimit -n 160 && exec "$@"', "sh")
    async with router_process(source, *low_limit) as started:
        port, admin = await listening(started)
        for data in (b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Half: ", b""):
            connections = []
            for _ in range(450):
                connections.append(await Client.connect(admin))
                await connections[-1].send(data)
            for _ in range(3):
                clients = [await Client.connect(port) for _ in range(20)]
                for client in clients:
                    assert (await client.ask(chat())).status == 200
                    client.close()
            operator = await Client.connect(admin)
            assert (await operator.ask(get("/admin/workers"))).status == 200
            for each in (operator, *connections):
                each.close()


async def any_received(fakes: list[FakeWorker]) -> None:
    arrivals = [asyncio.create_task(fake.got(within=DEADLINE_S)) for fake in fakes]
    _, pending = await asyncio.wait(arrivals, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()


async def port_closed(port: int) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                (await Client.connect(port)).close()
            except ConnectionRefusedError:
                return
            except ConnectionResetError:  # in the moment of closing
                pass
            await asyncio.sleep(0.01)


async def test_second_signal_stops_at_once(
    process: tuple[asyncio.subprocess.Process, int], fakes: list[FakeWorker]
) -> None:
    started, port = process
    for fake in fakes:
        fake.always(scripts.stall)
    client = await Client.connect(port)
    await client.send(chat())
    await any_received(fakes)
    started.send_signal(signal.SIGINT)
    await port_closed(port)  # the first signal was handled: two at once may merge
    assert started.returncode is None
    started.send_signal(signal.SIGINT)
    assert (
        await asyncio.wait_for(started.wait(), DEADLINE_S / 2) == 130
    )  # a drain takes twice as long
    assert (await client.answer()).status == 503
    client.close()


async def test_sighup_reloads_the_fleet_file_and_sigterm_drains(
    process: tuple[asyncio.subprocess.Process, int], fakes: list[FakeWorker], tmp_path: Path
) -> None:
    started, port = process
    write_fleet(tmp_path, fakes[0], nonsense=1)
    started.send_signal(signal.SIGHUP)
    assert started.stderr is not None
    async with asyncio.timeout(DEADLINE_S):
        while b"was not reloaded" not in await started.stderr.readline():
            pass
    write_fleet(tmp_path, fakes[0])
    started.send_signal(signal.SIGHUP)
    async with asyncio.timeout(DEADLINE_S):
        while b"yaml: 1 workers" not in await started.stderr.readline():
            pass
    client = await Client.connect(port)
    assert [(await client.ask(chat())).status for _ in range(3)] == [200] * 3
    gate = asyncio.Event()
    fakes[0].always(scripts.gated(gate, scripts.answer()))
    await client.send(chat())
    await fakes[0].got(4, within=DEADLINE_S)
    started.send_signal(signal.SIGTERM)
    await port_closed(port)
    assert started.returncode is None
    gate.set()
    assert (await client.answer()).status == 200
    client.close()
    assert await asyncio.wait_for(started.wait(), DEADLINE_S) == 0
    assert not fakes[1].served


def write_pair(folder: Path, fakes: list[FakeWorker], transfer: str = "nixl") -> Path:
    workers = (entry(f, role=r) for r, f in zip(("prefill", "decode"), fakes, strict=True))
    routing = {"disaggregate_above": 1}
    return write_fleet(folder, *workers, transfer=transfer, routing=routing)


async def test_prefill_and_decode_fleet_warms_up_then_hands_over(
    tmp_path: Path, fakes: list[FakeWorker]
) -> None:
    kv = Kv()
    for role, fake in zip(("prefill", "decode"), fakes, strict=True):
        fake.always(kv.worker(fake, role))
    async with running(write_pair(tmp_path, fakes)) as app:
        await wait_until_up(app, "a", "b")
        await eventually(lambda: app.metrics.handovers.warmups == {"done": 1}, within=DEADLINE_S)
        assert await ask(app, chat("hello " * 50)) == 200
        assert kv.ends() == ["read", "read"]
        [shown] = app.metrics.recent.newest(9)  # no entry of the warm-up
        assert (shown.prefill_worker, shown.worker) == ("a", "b")
        await eventually(lambda: [side.model for side in app.balance.shown()] == ["tiny"])
        write_pair(tmp_path, fakes, "lmcache")
        assert await app.reload() == ["transfer"]
        assert app.wire.connector is not None
        assert app.wire.connector.name == "nixl"
    assert kv.faults == []
    assert kv.held == []
