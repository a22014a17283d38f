"""TLS settings: invalid files and renewal."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from proxy.app import App
from proxy.config import FleetConfig, TlsConfig, WorkerTlsConfig, load, parse
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
from tests.proxy.test_app import wait_until_up
from tests.proxy.wire.fake_worker import FakeWorker
from vllm_sched.cli.main import main

DEADLINE_S = 60.0


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """Return a certificate authority."""
    return Authority(tmp_path / "certificates")


def error_of(config: TlsConfig | WorkerTlsConfig) -> tuple[str, str]:
    """Return the field and message of the error for these settings."""
    make = server_context if isinstance(config, TlsConfig) else client_context
    with pytest.raises(TlsError) as caught:
        make(config)  # type: ignore[operator]
    assert "\n" not in str(caught.value)
    return caught.value.field, caught.value.why


def test_missing_files_are_reported(authority: Authority, tmp_path: Path) -> None:
    good = authority.port("a", clients=True)
    for field in ("cert_file", "key_file", "client_ca_file"):
        found = error_of(good.model_copy(update={field: tmp_path / "none"}))
        assert found[0] == field
        assert "can't be read: No such file" in found[1]
    assert error_of(WorkerTlsConfig(ca_file=tmp_path / "none"))[0] == "ca_file"


def test_malformed_files_are_reported(authority: Authority, tmp_path: Path) -> None:
    good = authority.port("a", clients=True)
    junk = tmp_path / "junk"
    for content in (
        b"",
        b"junk",
        b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
    ):
        junk.write_bytes(content)
        for field in ("cert_file", "key_file", "client_ca_file"):
            found = error_of(good.model_copy(update={field: junk}))
            assert found[0] == field
            assert "in PEM" in found[1]


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
    """Write a file with a changed modification time."""
    before = path.stat().st_mtime_ns
    path.write_bytes(content)
    os.utime(path, ns=(before + 1_000_000, before + 1_000_000))


def parse_fleet(text: str) -> FleetConfig:
    """Parse a fleet file."""
    return parse(text, "f")


def test_worker_tls_is_merged() -> None:
    config = parse_fleet(
        "model: m\nworker_tls: {ca_file: /a}\nworkers:\n"
        "- {name: a, url: 'http://h:1'}\n- {name: b, url: 'https://h'}\n"
        "- {name: c, url: 'https://h:2', tls: {ca_file: /c}}\n"
        "- {name: d, url: 'https://h:3', tls: {}}\n"
    )
    merged = [config.tls_of(worker) for worker in config.workers]
    assert [tls and str(tls.ca_file) for tls in merged] == [None, "/a", "/c", "/a"]
    assert config.workers[1].address == ("h", 443)


@pytest.mark.parametrize(
    ("worker", "more", "message"),
    [
        ("url: 'http://h:1', tls: {}", "", r"workers\[0\]\.tls: the url is 'http://h:1'"),
        ("url: 'https://h:1', launch: {}", "", r"workers\[0\]\.launch: .*http://"),
        ("url: 'https://h:1', tls: {cert_file: x}", "", r"workers\[0\]\.tls\.key_file: is missing"),
        ("url: 'https://h:1'", "worker_tls: {key_file: x}", r"worker_tls\.cert_file: is missing"),
        (
            "url: 'https://h:1'",
            "router: {tls: {cert_file: x}}",
            r"router\.tls\.key_file: is missing",
        ),
        (
            "url: 'https://h:1', tls: {verify: no}",
            "",
            r"tls\.verify: is not a known key; leave it out; valid: ca_file",
        ),
    ],
)
def test_contradicting_tls_settings_are_refused(worker: str, more: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_fleet(f"model: m\nworkers: [{{name: a, {worker}}}]\n{more}\n")


def test_check_reports_all_tls_problems(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(
        "model: m\nworkers: [{name: a, url: 'https://h:1', tls: {ca_file: /no/ca}}]\n"
        "worker_tls: {ca_file: /no/other}\nrouter:\n  tls: {cert_file: /no/c, key_file: /no/k}\n"
        "  admin: {tls: {cert_file: /no/c, key_file: /no/k}}\n"
        "discovery: {pools: [{name: p, dns: h, tls: {ca_file: /no/p}}]}\n"
    )
    with pytest.raises(ConfigError) as caught:
        check_tls(load(path), "f")
    assert [problem.path for problem in caught.value.problems] == [
        "router.tls.cert_file",
        "router.admin.tls.cert_file",
        "worker_tls.ca_file",
        "workers[0].tls.ca_file",
        "discovery.pools[0].tls.ca_file",
    ]
    with pytest.raises(ConfigError):
        App(load(path), path)
    assert main(["check", str(path)]) == 2
    assert capsys.readouterr().err.count("/no/") == 5


async def test_router_with_tls_on_all_connections(
    authority: Authority, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeWorker("a")
    fake.tls = server_context(authority.port("worker", clients=True))
    await fake.listen()
    port, settings = authority.port("router"), authority.worker_tls("to-worker")
    tls = json.dumps({"cert_file": str(port.cert_file), "key_file": str(port.key_file)})
    worker_tls = json.dumps(
        {k: str(v) for k, v in settings.model_dump(exclude={"verify_hostname"}).items()}
    )
    source = tmp_path / "fleet.yaml"
    source.write_text(
        f"model: tiny\nworkers: [{{name: a, url: '{fake.url}'}}]\nworker_tls: {worker_tls}\n"
        f"router: {{port: 0, tls: {tls}, admin: {{port: 0, tls: {tls}}}, "
        "probe: {interval_s: 0.05}}\n"
    )
    app = App(load(source), source)
    await app.start()
    await wait_until_up(app, "a")  # probed with the router's certificate
    assert app.url.startswith("https://127.0.0.1:")
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    connector = aiohttp.TCPConnector(ssl=authority.client())
    async with aiohttp.ClientSession(connector=connector) as session:
        async with session.post(f"{app.url}/v1/chat/completions", json=body) as answer:
            assert answer.status == 200
        async with session.get(f"{app.admin_url}/admin/workers") as answer:
            assert [(worker["name"], worker["state"]) for worker in await answer.json()] == [
                ("a", "up")
            ]
        async with session.get(f"{app.url}/metrics") as answer:
            assert answer.status == 200
    status_with_key_of = ["explain", str(source), "--prompt-tokens", "9", "--live", app.admin_url]
    assert await asyncio.to_thread(main, status_with_key_of) == 0
    assert capsys.readouterr().out.startswith("a: ")
    old = port.cert_file.read_bytes()
    authority.issue("router")
    assert await app.reload() == []
    connector = aiohttp.TCPConnector(ssl=authority.client())
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        session.get(f"{app.url}/health") as answer,
    ):
        assert answer.status == 200
    port.key_file.write_bytes(old)
    with pytest.raises(ConfigError, match=r"router\.tls\.key_file"):
        await app.reload()
    await app.stop()
    await fake.stop()


class MovedFiles:
    """A router whose certificates and admin key move to other files."""

    def __init__(self, authority: Authority, folder: Path, url: str) -> None:
        self.authority = authority
        self.folder = folder
        self.url = url
        self.source = folder / "fleet.yaml"
        self.write("first")
        self.app = App(load(self.source), self.source)

    def write(self, name: str, *, tls: bool = True, workers: str = "a") -> None:
        """Write certificates, an admin key and a fleet file with their paths."""
        port = self.authority.port(name)
        (self.folder / f"{name}.admin").write_text(self.key(name))
        served = {"cert_file": str(port.cert_file), "key_file": str(port.key_file)}
        block = {"tls": served} if tls else {}
        admin = {"port": 0, "key_file": str(self.folder / f"{name}.admin"), **block}
        router = {"port": 0, "probe": {"interval_s": 0.05}, "admin": admin, **block}
        self.source.write_text(
            f"model: tiny\nworkers: [{{name: {workers}, url: '{self.url}'}}]\n"
            f"router: {json.dumps(router)}\n"
        )

    def key(self, name: str) -> str:
        """Return the admin key of these files."""
        return f"{name}-{'k' * 32}"

    def delete(self, name: str) -> None:
        """Delete these files."""
        for path in (f"certificates/{name}.pem", f"certificates/{name}.key", f"{name}.admin"):
            (self.folder / path).unlink()

    async def serial_of_port(self, url: str) -> int:
        """Return the serial number of a port's certificate."""
        host, port = url.removeprefix("https://").split(":")
        _, writer = await asyncio.open_connection(host, int(port), ssl=self.authority.client())
        number = writer.get_extra_info("ssl_object").getpeercert()["serialNumber"]
        writer.close()
        return int(number, 16)

    def serial_of_file(self, name: str) -> int:
        """Return the serial number of a certificate file."""
        path = self.folder / f"certificates/{name}.pem"
        return x509.load_pem_x509_certificate(path.read_bytes()).serial_number

    async def status_with_key_of(self, name: str) -> int:
        """Send an admin request with the key of these files; return its status."""
        connector = aiohttp.TCPConnector(ssl=self.authority.client())
        headers = {"Authorization": f"Bearer {self.key(name)}"}
        async with (
            aiohttp.ClientSession(connector=connector) as session,
            session.get(f"{self.app.admin_url}/admin/workers", headers=headers) as answer,
        ):
            return answer.status


@pytest.fixture
async def moved(authority: Authority, tmp_path: Path) -> AsyncIterator[MovedFiles]:
    """Start the router."""
    fake = FakeWorker("a")
    await fake.listen()
    moved = MovedFiles(authority, tmp_path, fake.url)
    await moved.app.start()
    yield moved
    await moved.app.stop()
    await fake.stop()


async def test_certificates_and_admin_key_may_move(moved: MovedFiles) -> None:
    app = moved.app
    assert [await moved.status_with_key_of(name) for name in ("first", "second")] == [200, 401]
    moved.write("second")
    moved.delete("first")
    assert await app.reload() == []
    for url in (app.url, app.admin_url):
        assert await moved.serial_of_port(url) == moved.serial_of_file("second")
    assert [await moved.status_with_key_of(name) for name in ("first", "second")] == [401, 200]
    (moved.folder / "second.admin").write_text("short")
    with pytest.raises(ConfigError, match="16 to 512"):
        await app.reload()
    assert await moved.status_with_key_of("second") == 200
    (moved.folder / "second.admin").unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        await App(load(moved.source), moved.source).start()


async def test_removing_tls_needs_a_restart(
    moved: MovedFiles, caplog: pytest.LogCaptureFixture
) -> None:
    """Until then, the last certificate is used."""
    before = moved.serial_of_file("first")
    moved.write("second", tls=False, workers="b")
    moved.delete("first")
    assert await moved.app.reload() == ["router.tls", "router.admin"]
    assert "the previous certificate stays" in caplog.text
    assert [worker.name for worker in moved.app.fleet.roster] == ["b"]
    assert await moved.serial_of_port(moved.app.url) == before
    assert await moved.status_with_key_of("second") == 200


async def test_new_process_uses_the_reloaded_config(moved: MovedFiles) -> None:
    """The first fleet file may name files that are gone."""
    first = moved.app.config
    moved.write("second", workers="b")
    moved.delete("first")
    await moved.app.reload()
    another = App(moved.app.config, moved.source, started_with=first)
    assert [worker.name for worker in another.fleet.roster] == ["b"]
    assert another.wire.tls is not None
    assert await another.reload() == []
