"""Certificates of a router of several processes; each process reads the files."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import cast

import pytest
from cryptography import x509

from proxy.config import FleetConfig, load, parse
from proxy.processes.channel import Channel
from proxy.processes.ipc_messages import Begin, ConfigReloaded
from proxy.processes.server_process import ServerProcess
from proxy.processes.shared.shared_memory import SharedTable
from proxy.setup.secrets import SecretKeys
from tests.proxy.certificates import Authority
from tests.proxy.processes.router_group import DEADLINE_S, RouterGroup, id_prefix_of
from tests.proxy.wire.raw_client import Client

WORKERS = "workers: [{name: a, url: 'http://127.0.0.1:1'}]\n"


class TlsGroup(RouterGroup):
    """A group whose port uses TLS."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder / "certificates")
        self.files = self.authority.port("router")
        super().__init__(folder, ["a"])

    def write(self, *workers: str, routing: str = "{policy: least_loaded}") -> None:
        """Write the fleet file."""
        super().write(*workers, routing=routing)
        paths = {"cert_file": str(self.files.cert_file), "key_file": str(self.files.key_file)}
        text = self.file.read_text().replace("router: {", f"router: {{tls: {json.dumps(paths)}, ")
        self.file.write_text(text)

    def serial(self) -> int:
        """Return the serial number of the certificate file."""
        return x509.load_pem_x509_certificate(self.files.cert_file.read_bytes()).serial_number

    async def serials(self) -> dict[bytes, int]:
        """Return the serial number of each process's certificate."""
        found: dict[bytes, int] = {}
        give_up = time.monotonic() + DEADLINE_S
        while len(found) < self.count:
            assert time.monotonic() < give_up, found
            client = await Client.connect(self.port, tls=self.authority.client())
            files = client.writer.get_extra_info("ssl_object").getpeercert()["serialNumber"]
            found[await id_prefix_of(client)] = int(files, 16)
            client.close()
        return found

    async def wait_for_serial(self, serial: int) -> None:
        """Wait until every process has this certificate."""
        give_up = time.monotonic() + DEADLINE_S
        while set((found := await self.serials()).values()) != {serial}:
            assert time.monotonic() < give_up, found
            await asyncio.sleep(0.02)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[TlsGroup]:
    group = TlsGroup(tmp_path)
    yield group
    group.close()


async def test_all_processes_use_a_renewed_certificate_and_none_a_bad_one(group: TlsGroup) -> None:
    first = group.serial()
    await group.wait_for_serial(first)
    kept = await Client.connect(group.port, tls=group.authority.client())
    other = group.authority.issue("other")
    shutil.copy(other[0], group.files.cert_file)  # before its key
    group.send_signal(signal.SIGHUP)
    group.wait_for_line("the fleet file was not reloaded")
    group.wait_for_line("router.tls.key_file: ")
    await group.wait_for_serial(first)
    shutil.copy(other[1], group.files.key_file)
    group.send_signal(signal.SIGHUP)
    await group.wait_for_serial(group.serial())
    assert group.serial() != first
    assert await id_prefix_of(kept)
    kept.close()


def config_of(authority: Authority, name: str, key: str) -> FleetConfig:
    """Return a config with certificates and a tenant's key."""
    files = authority.port(name)
    files = json.dumps({"cert_file": str(files.cert_file), "key_file": str(files.key_file)})
    tenants = f"tenants: [{{name: t, key_hashes: ['sha256:{key * 64}']}}]\n"
    return parse(f"model: m\n{WORKERS}{tenants}router: {{tls: {files}}}\n", "fleet.yaml")


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
async def follower(authority: Authority) -> AsyncIterator[ServerProcess]:
    config, table = config_of(authority, "first", "1"), SharedTable.make(2)
    begin = Begin(2, config, config, SecretKeys.read(config, "fleet.yaml"), None, load, ())

    class IgnoringChannel:
        """Ignores messages."""

        def send(self, message: object) -> None: ...

    server = ServerProcess(begin, 1, table.fd, cast("Channel", IgnoringChannel()))
    yield server
    server.app.logs.close()


async def test_reload_with_a_bad_certificate_applies_the_rest(
    follower: ServerProcess, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(authority, "second", "2")
    tls = config.router.tls
    assert tls is not None
    tls.key_file.write_text("half a k")
    with caplog.at_level(logging.WARNING):
        follower.handle(ConfigReloaded(config, SecretKeys.read(config, "fleet.yaml")))
    assert follower.app.config is config
    assert follower.app._keys.tenants == SecretKeys.read(config, "fleet.yaml").tenants
    assert f"router.tls.key_file: {str(tls.key_file)!r}: has no private key" in caplog.text
    assert "the previous certificate stays" in caplog.text
