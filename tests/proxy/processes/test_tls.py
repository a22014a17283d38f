"""Certificates of a router of several processes; each process reads the files."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
from cryptography import x509

from proxy.config import FleetConfig, TlsConfig, parse
from proxy.processes.ipc_messages import ConfigReloaded
from proxy.processes.server_process import ServerProcess
from proxy.setup.secrets import SecretKeys
from tests.present import present
from tests.proxy.certificates import Authority
from tests.proxy.processes.router_group import RouterGroup, id_prefix_of, until
from tests.proxy.processes.test_server_process import make_server
from tests.proxy.wire.raw_client import Client

KEY = "an-admin-key-of-many-letters"
WORKERS = "workers: [{name: a, url: 'http://127.0.0.1:1'}]\n"


class TlsGroup(RouterGroup):
    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder / "certificates")
        self.files = self.authority.port("router")
        key_file = folder / "admin.key"
        key_file.write_text(KEY)
        tls = f", tls: {paths_of(self.files)}"
        super().__init__(folder, ["a"], router=tls, admin=f"{tls}, key_file: '{key_file}'")

    async def admin_statuses(self) -> list[int]:
        async with httpx.AsyncClient(verify=self.authority.client()) as client:
            url = f"{self.admin}/admin/workers"
            keys: list[dict[str, str]] = [{"Authorization": f"Bearer {KEY}"}, {}]
            return [(await client.get(url, headers=headers)).status_code for headers in keys]

    def serial(self) -> int:
        return x509.load_pem_x509_certificate(self.files.cert_file.read_bytes()).serial_number

    async def wait_for_serial(self, serial: int) -> None:
        """Wait until every process has the certificate of this serial number."""
        found: dict[bytes, int] = {}

        async def all_have() -> bool:
            try:
                client = await Client.connect(self.port, tls=self.authority.client())
            except ConnectionError:
                return False
            peer = client.writer.get_extra_info("ssl_object").getpeercert()
            found[await id_prefix_of(client)] = int(peer["serialNumber"], 16)
            client.close()
            return len(found) == self.count and set(found.values()) == {serial}

        await until(all_have)


def paths_of(files: TlsConfig) -> str:
    """Return a port's certificate and key as in a fleet file."""
    return json.dumps({"cert_file": str(files.cert_file), "key_file": str(files.key_file)})


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
    for pid in group.pids.values():  # new processes replace them
        os.kill(pid, signal.SIGKILL)
    group.wait_for_line("exited (signal 9)", 2)
    await group.wait_for_serial(group.serial())
    assert await group.admin_statuses() == [200, 401]


def config_of(authority: Authority, name: str, key: str) -> FleetConfig:
    """Return a config with certificates and a tenant's key."""
    tls = paths_of(authority.port(name))
    tenants = f"tenants: [{{name: t, key_hashes: ['sha256:{key * 64}']}}]\n"
    return parse(f"model: m\n{WORKERS}{tenants}router: {{tls: {tls}}}\n", "fleet.yaml")


@pytest.fixture
async def follower(tmp_path: Path) -> AsyncIterator[ServerProcess]:
    """Return a process; its log takes the handlers over before a test starts."""
    server = make_server(config_of(Authority(tmp_path), "first", "1"))
    yield server
    server.app.logs.close()


async def test_reload_with_a_bad_certificate_applies_the_rest(
    follower: ServerProcess, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(Authority(tmp_path / "next"), "second", "2")
    keys = SecretKeys.read(config, "fleet.yaml")
    key_file = present(config.router.tls).key_file
    key_file.write_text("half a k")
    with caplog.at_level(logging.WARNING):
        follower.handle(ConfigReloaded(config, keys))
    assert follower.app.config is config
    assert follower.app._keys.tenants == keys.tenants
    assert f"router.tls.key_file: {str(key_file)!r}: has no private key" in caplog.text
    assert "the previous certificate stays" in caplog.text
