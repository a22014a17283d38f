"""Certificates of a router of several processes, each of which reads the files for itself."""

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
from tests.proxy.processes.crew import DEADLINE_S, Crew, mark_of
from tests.proxy.wire.raw_client import Client

WORKERS = "workers: [{name: a, url: 'http://127.0.0.1:1'}]\n"


class Encrypted(Crew):
    """A crew whose port speaks TLS."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder / "certificates")
        self.shown = self.authority.port("router")
        super().__init__(folder, ["a"])

    def write(self, *workers: str, routing: str = "{policy: least_loaded}") -> None:
        """Write the fleet file."""
        super().write(*workers, routing=routing)
        files = {"cert_file": str(self.shown.cert_file), "key_file": str(self.shown.key_file)}
        text = self.file.read_text().replace("router: {", f"router: {{tls: {json.dumps(files)}, ")
        self.file.write_text(text)

    def number(self) -> int:
        """Return the number of the certificate in the file."""
        return x509.load_pem_x509_certificate(self.shown.cert_file.read_bytes()).serial_number

    async def shows(self) -> dict[bytes, int]:
        """Return the number of the certificate that each process shows."""
        found: dict[bytes, int] = {}
        give_up = time.monotonic() + DEADLINE_S
        while len(found) < self.count:
            assert time.monotonic() < give_up, found
            client = await Client.connect(self.port, tls=self.authority.client())
            shown = client.writer.get_extra_info("ssl_object").getpeercert()["serialNumber"]
            found[await mark_of(client)] = int(shown, 16)
            client.close()
        return found

    async def all_show(self, number: int) -> None:
        """Wait until every process does."""
        give_up = time.monotonic() + DEADLINE_S
        while set((found := await self.shows()).values()) != {number}:
            assert time.monotonic() < give_up, found
            await asyncio.sleep(0.02)


@pytest.fixture
def crew(tmp_path: Path) -> Iterator[Encrypted]:
    made = Encrypted(tmp_path)
    yield made
    made.close()


async def test_a_renewal_is_shown_by_all_processes_and_a_bad_one_by_none(crew: Encrypted) -> None:
    first = crew.number()
    await crew.all_show(first)
    kept = await Client.connect(crew.port, tls=crew.authority.client())
    other = crew.authority.issue("other")
    shutil.copy(other[0], crew.shown.cert_file)  # its key is yet to come
    crew.tell(signal.SIGHUP)
    crew.says("the fleet file was not reloaded")
    crew.says("router.tls.key_file: ")
    await crew.all_show(first)
    shutil.copy(other[1], crew.shown.key_file)
    crew.tell(signal.SIGHUP)
    await crew.all_show(crew.number())
    assert crew.number() != first
    assert await mark_of(kept)
    kept.close()


def of(authority: Authority, place: str, key: str) -> FleetConfig:
    """Read a fleet file that names certificates, and the key of a tenant."""
    shown = authority.port(place)
    files = json.dumps({"cert_file": str(shown.cert_file), "key_file": str(shown.key_file)})
    tenants = f"tenants: [{{name: t, key_hashes: ['sha256:{key * 64}']}}]\n"
    return parse(f"model: m\n{WORKERS}{tenants}router: {{tls: {files}}}\n", "fleet.yaml")


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
async def follower(authority: Authority) -> AsyncIterator[ServerProcess]:
    config, table = of(authority, "first", "1"), SharedTable.make(2)
    begin = Begin(2, config, config, SecretKeys.read(config, "fleet.yaml"), None, load, ())

    class Line:
        """Hears what is said, and does nothing."""

        def send(self, message: object) -> None: ...

    member = ServerProcess(begin, 1, table.fd, cast("Channel", Line()))
    yield member
    member.app.logs.close()


async def test_who_finds_no_certificate_takes_the_rest_and_says_so(
    follower: ServerProcess, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    config = of(authority, "second", "2")
    tls = config.router.tls
    assert tls is not None
    tls.key_file.write_text("half a k")
    with caplog.at_level(logging.WARNING):
        follower.handle(ConfigReloaded(config, SecretKeys.read(config, "fleet.yaml")))
    assert follower.app.config is config
    assert follower.app._keys.tenants == SecretKeys.read(config, "fleet.yaml").tenants
    assert f"router.tls.key_file: {str(tls.key_file)!r}: has no private key" in caplog.text
    assert "the previous certificate stays" in caplog.text
