"""TLS contexts from the files that a fleet file names: TLS 1.2 or newer, always verified.

A port's context is changed in place at a reload, so open connections stay. A worker's context is
read again as soon as its files change.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Iterator
from pathlib import Path

from proxy.config import FleetConfig, TlsConfig, WorkerTlsConfig
from proxy.errors import ConfigError, Problem, ProxyError

logger = logging.getLogger(__name__)

FileTimes = tuple[int, ...]  # modification times in ns


class TlsError(ProxyError):
    """A TLS file that can't be used: the field that names it, and the reason."""

    def __init__(self, field: str, why: str) -> None:
        super().__init__(f"{field}: {why}")
        self.field = field
        self.why = why


class ServedContext:
    def __init__(self, config: TlsConfig) -> None:
        self.context = server_context(config)

    def renew(self, config: TlsConfig) -> None:
        """Load the files again; if they can't be used, keep the previous ones.

        New client CAs are added; a removed CA stays valid until the router is restarted.
        """
        try:
            server_context(config)  # check the files on another context
            _load(self.context, config)
        except TlsError as error:
            logger.warning("TLS of a port: %s; the previous certificate stays", error)


def server_context(config: TlsConfig) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if config.client_ca_file is not None:
        context.verify_mode = ssl.CERT_REQUIRED
    _load(context, config)
    return context


def _load(context: ssl.SSLContext, config: TlsConfig) -> None:
    _load_own(context, config.cert_file, config.key_file)
    if config.client_ca_file is not None:
        _load_authorities(context, config.client_ca_file, "client_ca_file")


def client_context(config: WorkerTlsConfig) -> ssl.SSLContext:
    """Return a context for connections to workers; raise `TlsError`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = config.verify_hostname
    if config.ca_file is None:
        context.load_default_certs()
    else:
        _load_authorities(context, config.ca_file, "ca_file")
    if config.cert_file is not None and config.key_file is not None:
        _load_own(context, config.cert_file, config.key_file)
    return context


def _load_own(context: ssl.SSLContext, cert: Path, key: Path) -> None:
    for field, path in (("cert_file", cert), ("key_file", key)):
        _check_readable(field, path)
    try:
        # Without a callback, OpenSSL asks for the password on the terminal.
        context.load_cert_chain(cert, key, password=_no_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            why = f"{str(key)!r}: does not match the certificate in {str(cert)!r}; give its key"
            raise TlsError("key_file", why) from None
        field, path, what = _invalid_file(cert, key)
        raise TlsError(field, f"{str(path)!r}: has no {what} in PEM; correct it") from None
    except _EncryptedError:
        why = f"{str(key)!r}: is encrypted; give the key without a password"
        raise TlsError("key_file", why) from None


def _invalid_file(cert: Path, key: Path) -> tuple[str, Path, str]:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cert)
    except ssl.SSLError:
        return "cert_file", cert, "certificate"
    return "key_file", key, "private key"


class _EncryptedError(Exception):
    """A key with a password."""


def _no_password() -> str:
    raise _EncryptedError


def _load_authorities(context: ssl.SSLContext, path: Path, field: str) -> None:
    _check_readable(field, path)
    try:
        context.load_verify_locations(path)
    except ssl.SSLError:
        raise TlsError(field, f"{str(path)!r}: has no certificate in PEM; correct it") from None


def _check_readable(field: str, path: Path) -> None:
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        why = f"{str(path)!r}: can't be read: {error.strerror}; check path and permissions"
        raise TlsError(field, why) from None


_known: dict[WorkerTlsConfig, tuple[FileTimes, ssl.SSLContext]] = {}
MAX_CONTEXTS = 1000


def to_worker(config: WorkerTlsConfig | None) -> ssl.SSLContext | None:
    """Return the context for a worker or an API server, None for plain HTTP; raise `TlsError`.

    If changed files can't be used, the previous context stays.
    """
    if config is None:
        return None
    cached = _known.get(config)
    changed = _file_times(config)
    if cached is not None and cached[0] == changed:
        return cached[1]
    try:
        context = client_context(config)
    except TlsError as error:
        if cached is None:
            raise
        logger.warning("TLS: %s; the previous files stay in use", error)
        context = cached[1]
    if len(_known) >= MAX_CONTEXTS:
        _known.clear()
    _known[config] = changed, context
    return context


def _file_times(config: WorkerTlsConfig) -> FileTimes:
    files = (config.ca_file, config.cert_file, config.key_file)
    return tuple(_modified_ns(path) for path in files if path is not None)


def _modified_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def tls_problems(config: FleetConfig) -> Iterator[Problem]:
    router = config.router
    yield from _problems("router.tls", router.tls)
    yield from _problems("router.admin.tls", router.admin.tls)
    if router.shared is not None and (file := router.shared.ca_file) is not None:
        try:
            _load_authorities(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), file, "ca_file")
        except TlsError as error:
            yield Problem(f"router.shared.{error.field}", error.why)
    yield from _problems("worker_tls", config.worker_tls)
    for index, worker in enumerate(config.workers):
        yield from _problems(f"workers[{index}].tls", worker.tls)
    for index, pool in enumerate(config.pools):
        yield from _problems(f"discovery.pools[{index}].tls", pool.tls)


def _problems(path: str, block: TlsConfig | WorkerTlsConfig | None) -> Iterator[Problem]:
    if block is None:
        return
    try:
        if isinstance(block, TlsConfig):
            server_context(block)
        else:
            client_context(block)
    except TlsError as error:
        yield Problem(f"{path}.{error.field}", error.why)


def check_tls(config: FleetConfig, source: str) -> None:
    """Load all TLS files of a fleet file; raise `ConfigError` if any can't be used."""
    if problems := list(tls_problems(config)):
        raise ConfigError(source, problems)
    for worker in config.workers:
        to_worker(config.tls_of(worker))  # so that no request waits for the files
