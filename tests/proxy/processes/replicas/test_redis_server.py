"""Connections to the server: passwords, TLS, clusters, and what cannot work."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import redis as redis_library
import trustme
import uvloop

from proxy.config.shared import SharedConfig
from proxy.core.tenants.limits import LimitExceeded
from proxy.errors import ProxyError
from proxy.processes.replicas import limits
from proxy.processes.replicas.redis_server import check, describe, open_channel, server_errors
from tests.proxy.processes.replicas.limiting import limiting, per_minute
from tests.proxy.wire.site import eventually
from tests.redis_server import RedisServer
from vllm_sched.workers.launch import free_port

Start = Callable[..., RedisServer]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    servers: list[RedisServer] = []

    def started(*options: str) -> RedisServer:
        servers.append(RedisServer(tmp_path, *options))
        return servers[-1]

    yield started
    for server in servers:
        server.close()


async def exchange(settings: SharedConfig, password: str | None = None) -> None:
    """Send a message through the channel, and have the server decide a request."""
    settings = settings.model_copy(update={"timeout_s": 60.0})  # for a busy machine
    async with AsyncExitStack() as stack:
        received: list[bytes] = []
        channels = [
            await stack.enter_async_context(open_channel(settings, password, received.append))
            for _ in range(2)
        ]
        channels[0].publish(b"hello")
        await eventually(lambda: received == [b"hello"] * 2)
    decided: list[LimitExceeded | None] = []
    async with limiting(settings, per_minute(1), password) as (_, remote):
        for _ in range(2):
            assert remote.request_decision(10, decided.append) is not None
        await eventually(lambda: len(decided) == 2)
    assert decided[0] is None
    assert decided[1] is not None


def test_charges_are_reported_on_the_event_loop_of_the_router(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Handles of its timers below half a millisecond lack what those of asyncio have."""
    monkeypatch.setattr(limits, "SOON_S", 0.0004)
    server = start()

    async def run() -> None:
        clock = asyncio.get_running_loop().time
        async with limiting(SharedConfig(url=server.url), per_minute(10_000)) as (_, remote):
            for number in range(2000):
                remote.charge(1, 0, soon=bool(number % 3))
                if number % 5 == 0:
                    await asyncio.sleep(0.0003)
            client = redis_library.Redis(port=server.port)
            key = "{vllm-sched}:tenant:t"
            full_at = client.hget(key, "r")
            give_up = clock() + 5.0
            while float(full_at or 0) - time.time() < 10.0 and clock() < give_up:
                await asyncio.sleep(0.02)
                full_at = client.hget(key, "r")
            client.close()
            assert float(full_at or 0) - time.time() > 10.0  # 12 s less the time of the test

    uvloop.run(run())


async def test_password(start: Start) -> None:
    settings = SharedConfig(url=start("--requirepass", "secret").url)
    await exchange(settings, "secret")
    for wrong in (None, "other"):
        with pytest.raises(server_errors()):
            await exchange(settings, wrong)


RIGHTS = (
    "~{vllm-sched}:* &vllm-sched:* +publish +subscribe +script|load +evalsha +time +hgetall +hset "
    "+hdel +expire +ping"
)


async def test_rights_that_the_documentation_names_are_enough(start: Start) -> None:
    assert RIGHTS in (Path(__file__).parents[4] / "docs" / "scaling.md").read_text()
    server = start()
    admin = redis_library.Redis(port=server.port)
    for user, rights in (("all", RIGHTS), ("deaf", f"{RIGHTS} -subscribe")):
        admin.execute_command("ACL", "SETUSER", user, "on", "nopass", *rights.split())
    admin.close()
    url = server.url.replace("://", "://{}@")
    await exchange(SharedConfig(url=url.format("all")), "any")
    with pytest.raises(server_errors(), match="subscribe"):
        async with open_channel(SharedConfig(url=url.format("deaf")), "any", lambda _: None):
            pass


async def test_tls(start: Start, tmp_path: Path) -> None:
    authority = trustme.CA()
    paths = {name: tmp_path / f"{name}.pem" for name in ("ca", "cert", "key")}
    certificate = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(paths["ca"])
    certificate.cert_chain_pems[0].write_to_path(paths["cert"])
    certificate.private_key_pem.write_to_path(paths["key"])
    options = [f"--tls-{name}-file {paths[key]}" for name, key in
               (("cert", "cert"), ("key", "key"), ("ca-cert", "ca"))]  # fmt: skip
    words = " ".join(options).split()
    server = start("--tls-port", "0", "--tls-auth-clients", "no", *words)
    client = redis_library.Redis(port=server.port)
    client.config_set("port", "0")
    client.config_set("tls-port", str(server.port))
    client.close()
    url = f"rediss://127.0.0.1:{server.port}/0"
    await exchange(SharedConfig(url=url, ca_file=paths["ca"]))
    with pytest.raises(server_errors()):
        await exchange(SharedConfig(url=url))


async def test_cluster(start: Start) -> None:
    server = start("--cluster-enabled", "yes", "--cluster-port", str(free_port()))
    client = redis_library.Redis(host="127.0.0.1", port=server.port)
    client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
    await eventually(lambda: b"cluster_state:ok" in client.execute_command("CLUSTER", "INFO"))
    client.close()
    await exchange(SharedConfig(url=server.url, cluster=True))


async def test_unix_socket(start: Start, tmp_path: Path) -> None:
    start("--unixsocket", str(tmp_path / "redis.sock"))
    await exchange(SharedConfig(url=f"unix://{tmp_path}/redis.sock"))


async def test_server_that_becomes_a_replica_is_left_for_the_primary(start: Start) -> None:
    """Its address then leads to the primary; connections to the old one stay open by themselves."""
    server = start()
    settings = SharedConfig(url=server.url)
    admin = redis_library.Redis(port=server.port)
    async with (
        limiting(settings, per_minute(9)) as (limiter, remote),
        open_channel(settings, None, lambda _: None) as channel,
    ):
        connections = {client["id"] for client in admin.client_list()}
        admin.replicaof("127.0.0.1", free_port())

        def publish() -> bool:
            channel.publish(b"hello")
            return channel.error is not None

        await eventually(publish)
        assert "READONLY" in str(channel.error)
        remote.charge(1, 0, soon=True)
        await eventually(lambda: not limiter.is_up)
        with pytest.raises(server_errors(), match="READONLY"):
            async with open_channel(settings, None, lambda _: None):
                pass
        admin.replicaof("NO", "ONE")
        await eventually(lambda: limiter.is_up)
        here = {client["id"] for client in admin.client_list()}
        assert len(here & connections) == 1  # the administrator's
    admin.close()


def test_unusable_certificates_are_an_error_at_the_start(tmp_path: Path) -> None:
    settings = SharedConfig(url="rediss://127.0.0.1", ca_file=tmp_path / "none.pem")
    with pytest.raises(ProxyError, match=r"router\.shared\.ca_file .*cannot be used"):
        check(settings)


def test_unusable_option_is_an_error_at_the_start() -> None:
    settings = SharedConfig(url="rediss://127.0.0.1?ssl_cert_reqs=maybe")
    with pytest.raises(ProxyError, match=r"^router\.shared\.url: Invalid"):
        check(settings)


async def test_server_that_is_no_cluster_is_away(start: Start) -> None:
    settings = SharedConfig(url=start().url, cluster=True)
    with pytest.raises(server_errors(), match="Cluster mode is not enabled"):
        await exchange(settings)


async def test_error_names_the_missing_password(start: Start) -> None:
    with pytest.raises(server_errors()) as found:
        await exchange(SharedConfig(url=start("--requirepass", "secret").url))
    assert describe(found.value) == "the server needs a password; give router.shared.password_file"
    assert describe(TimeoutError()) == "no answer within router.shared.timeout_s"


def test_missing_package_is_named(tmp_path: Path) -> None:
    (tmp_path / "redis.py").write_text("raise ImportError('not installed')\n")
    code = (
        "from proxy.config.shared import SharedConfig\n"
        "from proxy.processes.replicas.redis_server import check\n"
        "check(SharedConfig(url='redis://127.0.0.1'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[4]}"},
    )
    assert "pip install 'vllm-sched[redis]'" in done.stderr
