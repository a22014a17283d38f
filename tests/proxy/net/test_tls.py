"""TLS settings: invalid files and renewal."""

from __future__ import annotations

import asyncio
import os
import shutil
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from proxy.app import App
from proxy.config import TlsConfig, WorkerTlsConfig, load
from proxy.errors import ConfigError
from proxy.net.tls import (
    ServedContext,
    TlsError,
    check_tls,
    client_context,
    server_context,
    to_worker,
)
from tests.proxy.certificates import Authority
from tests.proxy.running import entry, running, serving, wait_until_up, write_fleet
from tests.proxy.wire.fake_worker import FakeWorker
from tests.proxy.wire.raw_client import Client, bearer, chat, get
from vllm_sched.cli.main import main


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "certificates")


def error_of(config: TlsConfig | WorkerTlsConfig) -> tuple[str, str]:
    """Return the field and message of the error for these settings."""
    make = server_context if isinstance(config, TlsConfig) else client_context
    with pytest.raises(TlsError) as caught:
        make(config)  # type: ignore[operator]
    assert "\n" not in str(caught.value)
    return caught.value.field, caught.value.why


FIELDS = ("cert_file", "key_file", "client_ca_file")
NO_CERTIFICATE = b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "can't be read: No such file"),
        (b"", "in PEM"),
        (b"junk", "in PEM"),
        (NO_CERTIFICATE, "in PEM"),
    ],
)
def test_missing_and_malformed_files_are_reported(
    authority: Authority, tmp_path: Path, field: str, content: bytes | None, why: str
) -> None:
    file = tmp_path / "file"
    if content is not None:
        file.write_bytes(content)
    good = authority.port("a", clients=True)
    found = error_of(good.model_copy(update={field: file}))
    assert found[0] == field
    assert why in found[1]
    assert error_of(WorkerTlsConfig(ca_file=file))[0] == "ca_file"


def test_key_of_another_certificate_is_reported(authority: Authority) -> None:
    one, two = authority.port("one"), authority.port("two")
    mixed = one.model_copy(update={"key_file": two.key_file})
    assert "does not match the certificate" in error_of(mixed)[1]


def test_encrypted_key_is_reported(authority: Authority) -> None:
    config = authority.port("a")
    key = serialization.load_pem_private_key(config.key_file.read_bytes(), None)
    config.key_file.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    assert error_of(config) == (
        "key_file",
        f"{str(config.key_file)!r}: is encrypted; give the key without a password",
    )


def test_contexts_require_tls_1_2_and_verify_peers(authority: Authority) -> None:
    for context in (server_context(authority.port("a")), client_context(authority.worker_tls())):
        assert context.minimum_version is ssl.TLSVersion.TLSv1_2
    assert server_context(authority.port("a", clients=True)).verify_mode is ssl.CERT_REQUIRED
    for config in (WorkerTlsConfig(), authority.worker_tls(verify_hostname=False)):
        assert client_context(config).verify_mode is ssl.CERT_REQUIRED
        assert client_context(config).check_hostname is config.verify_hostname


def test_failed_renewal_keeps_the_certificate(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    config = authority.port("a")
    served = ServedContext(config)
    other = authority.issue("b")
    shutil.copy(other[0], config.cert_file)  # before its key
    served.renew(config)
    assert "the previous certificate stays" in caplog.text
    caplog.clear()
    shutil.copy(other[1], config.key_file)
    served.renew(config)
    assert not caplog.text


def test_changed_files_of_worker_tls_are_read_again(authority: Authority) -> None:
    config = authority.worker_tls("to-worker")
    first = to_worker(config)
    assert first is not None
    assert to_worker(config) is first
    assert config.key_file is not None
    before = config.key_file.read_bytes()
    touch(config.key_file, b"half a k")
    assert to_worker(config) is first  # the last valid context stays
    touch(config.key_file, before)
    assert to_worker(config) not in (None, first)
    assert to_worker(None) is None


def touch(path: Path, content: bytes) -> None:
    before = path.stat().st_mtime_ns
    path.write_bytes(content)
    os.utime(path, ns=(before + 1_000_000, before + 1_000_000))


def test_check_reports_all_tls_problems(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(
        "model: m\nworkers: [{name: a, url: 'https://h:1', tls: {ca_file: /no/ca}}]\n"
        "worker_tls: {ca_file: /no/other}\nrouter:\n  tls: {cert_file: /no/c, key_file: /no/k}\n"
        "  admin: {tls: {cert_file: /no/c, key_file: /no/k}}\n"
        "  shared: {url: 'rediss://r', ca_file: /no/r}\n"
        "discovery: {pools: [{name: p, dns: h, tls: {ca_file: /no/p}}]}\n"
    )
    with pytest.raises(ConfigError) as caught:
        check_tls(load(path), "f")
    assert [problem.path for problem in caught.value.problems] == [
        "router.tls.cert_file",
        "router.admin.tls.cert_file",
        "router.shared.ca_file",
        "worker_tls.ca_file",
        "workers[0].tls.ca_file",
        "discovery.pools[0].tls.ca_file",
    ]
    with pytest.raises(ConfigError):
        App(load(path), path)
    assert main(["check", str(path)]) == 2
    assert capsys.readouterr().err.count("/no/") == 6


def block_of(tls: TlsConfig | WorkerTlsConfig) -> dict[str, Any]:
    """Return settings as in a fleet file."""
    return tls.model_dump(mode="json", exclude_none=True)


async def test_router_with_tls_on_all_connections(
    authority: Authority, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeWorker("a")
    fake.tls = server_context(authority.port("worker", clients=True))
    port = authority.port("router")
    router = {"tls": block_of(port), "admin": {"port": 0, "tls": block_of(port)}}
    async with serving(fake):
        worker_tls = block_of(authority.worker_tls("to-worker"))
        source = write_fleet(tmp_path, fake, router=router, worker_tls=worker_tls)
        async with running(source) as app:
            await wait_until_up(app, "a")  # probed with the router's certificate
            assert app.url.startswith("https://127.0.0.1:")
            client = await Client.connect(app.wire.port, tls=authority.client())
            for data in (chat(), get("/metrics")):
                assert (await client.ask(data)).status == 200
            client.close()
            live = ["explain", str(source), "--prompt-tokens", "9", "--live", app.admin_url]
            assert await asyncio.to_thread(main, live) == 0
            assert capsys.readouterr().out.startswith("a: ")
            port.key_file.write_bytes(port.cert_file.read_bytes())
            with pytest.raises(ConfigError, match=r"router\.tls\.key_file"):
                await app.reload()


class MovedFiles:
    """A router whose certificates and admin key move to other files."""

    def __init__(self, authority: Authority, folder: Path, fake: FakeWorker) -> None:
        self.authority, self.folder, self.fake = authority, folder, fake
        self.source = self.write("first")
        self.app: App

    def write(self, name: str, *, tls: bool = True, worker: str = "a") -> Path:
        """Write certificates, an admin key and a fleet file with their paths."""
        block = {"tls": block_of(self.authority.port(name))} if tls else {}
        key_file = self.folder / f"{name}.admin"
        key_file.write_text(self.key(name))
        router = {"admin": {"port": 0, "key_file": str(key_file), **block}, **block}
        return write_fleet(self.folder, entry(self.fake) | {"name": worker}, router=router)

    def key(self, name: str) -> str:
        return f"{name}-{'k' * 32}"

    def delete(self, name: str) -> None:
        for path in (f"certificates/{name}.pem", f"certificates/{name}.key", f"{name}.admin"):
            (self.folder / path).unlink()

    async def connect(self, url: str) -> Client:
        return await Client.connect(urlsplit(url).port or 0, tls=self.authority.client())

    async def serial_of_port(self, url: str) -> int:
        client = await self.connect(url)
        certificate = client.writer.get_extra_info("ssl_object").getpeercert()
        client.close()
        return int(certificate["serialNumber"], 16)

    def serial_of_file(self, name: str) -> int:
        path = self.folder / f"certificates/{name}.pem"
        return x509.load_pem_x509_certificate(path.read_bytes()).serial_number

    async def status_with_key_of(self, name: str) -> int:
        """Send an admin request with the key of these files; return its status."""
        client = await self.connect(self.app.admin_url)
        answer = await client.ask(get("/admin/workers", bearer(self.key(name))))
        client.close()
        return answer.status


@pytest.fixture
async def moved(authority: Authority, tmp_path: Path) -> AsyncIterator[MovedFiles]:
    fake = FakeWorker("a")
    async with serving(fake):
        moved = MovedFiles(authority, tmp_path, fake)
        async with running(moved.source) as moved.app:
            yield moved


async def test_certificates_and_admin_key_may_move(moved: MovedFiles) -> None:
    app, first = moved.app, moved.app.config
    assert [await moved.status_with_key_of(name) for name in ("first", "second")] == [200, 401]
    moved.write("second", worker="b")
    moved.delete("first")
    assert await app.reload() == []
    for url in (app.url, app.admin_url):
        assert await moved.serial_of_port(url) == moved.serial_of_file("second")
    assert [await moved.status_with_key_of(name) for name in ("first", "second")] == [401, 200]
    # A new process uses the reloaded file: the first one names files that are gone.
    another = App(app.config, moved.source, started_with=first)
    assert [worker.name for worker in another.fleet.roster] == ["b"]
    assert another.wire.tls is not None
    assert await another.reload() == []
    (moved.folder / "second.admin").write_text("short")
    with pytest.raises(ConfigError, match="16 to 512"):
        await app.reload()
    assert await moved.status_with_key_of("second") == 200
    (moved.folder / "second.admin").unlink()
    with pytest.raises(ConfigError, match="can't be read"):
        await App(load(moved.source), moved.source).start()


async def test_removing_tls_needs_a_restart(
    moved: MovedFiles, caplog: pytest.LogCaptureFixture
) -> None:
    """Until then, the last certificate is used."""
    before = moved.serial_of_file("first")
    moved.write("second", tls=False, worker="b")
    moved.delete("first")
    assert await moved.app.reload() == ["router.tls", "router.admin"]
    assert "the previous certificate stays" in caplog.text
    assert [worker.name for worker in moved.app.fleet.roster] == ["b"]
    assert await moved.serial_of_port(moved.app.url) == before
    assert await moved.status_with_key_of("second") == 200
