"""TLS contexts from the files that a fleet file names: TLS 1.2 or newer, always verified.

What is shown to clients is renewed in place at a reload: connections that are there stay. What
workers are met with is read again as soon as its files change.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Iterator
from pathlib import Path

from proxy.config import FleetConfig, PartialConfig, TlsConfig, WorkerTlsConfig
from proxy.errors import ConfigError, Problem, ProxyError

logger = logging.getLogger(__name__)

Changed = tuple[int, ...]  # when each file was


class TlsError(ProxyError):
    """Files that make no TLS: which field of the block, and why."""

    def __init__(self, field: str, why: str) -> None:
        super().__init__(f"{field}: {why}")
        self.field = field
        self.why = why


class ServedContext:
    """The context of a port."""

    def __init__(self, config: TlsConfig) -> None:
        self.context = server_context(config)

    def renew(self, config: TlsConfig) -> None:
        """Show what is in the files now. Authorities are added; one that left stays until a start.

        Files that can't be used leave what was shown before.
        """
        try:
            server_context(config)  # all of it is tried on another first
            _take(self.context, config)
        except TlsError as error:
            logger.warning("TLS of a port: %s; what was shown before stays", error)


def server_context(config: TlsConfig) -> ssl.SSLContext:
    """Make the context of a port; raises `TlsError`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if config.client_ca_file is not None:
        context.verify_mode = ssl.CERT_REQUIRED
    _take(context, config)
    return context


def _take(context: ssl.SSLContext, config: TlsConfig) -> None:
    _load_own(context, config.cert_file, config.key_file)
    if config.client_ca_file is not None:
        _load_authorities(context, config.client_ca_file, "client_ca_file")


def client_context(config: WorkerTlsConfig) -> ssl.SSLContext:
    """Make the context that workers are met with; raises `TlsError`."""
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
        _readable(field, path)
    try:
        # An encrypted key would be asked for on the terminal.
        context.load_cert_chain(cert, key, password=_no_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            why = f"{str(key)!r}: is not the key of the certificate in {str(cert)!r}; give that one"
            raise TlsError("key_file", why) from None
        field, path, what = _culprit(cert, key)
        raise TlsError(field, f"{str(path)!r}: holds no {what} in PEM; correct it") from None
    except _EncryptedError:
        why = f"{str(key)!r}: is encrypted; give the key without a password"
        raise TlsError("key_file", why) from None


def _culprit(cert: Path, key: Path) -> tuple[str, Path, str]:
    """Find out which of two files it is; a certificate can be read alone."""
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
    _readable(field, path)
    try:
        context.load_verify_locations(path)
    except ssl.SSLError:
        raise TlsError(field, f"{str(path)!r}: holds no certificate in PEM; correct it") from None


def _readable(field: str, path: Path) -> None:
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        why = f"{str(path)!r}: can't be read: {error.strerror}; check path and permissions"
        raise TlsError(field, why) from None


# To workers

_known: dict[WorkerTlsConfig, tuple[Changed, ssl.SSLContext]] = {}
MOST_KNOWN = 1000


def to_worker(config: WorkerTlsConfig | None) -> ssl.SSLContext | None:
    """Return what a worker is met with; None where that is plain HTTP.

    Files that can't be used any more leave the last ones that could. Raises `TlsError`.
    """
    if config is None:
        return None
    known = _known.get(config)
    changed = _changed(config)
    if known is not None and known[0] == changed:
        return known[1]
    try:
        context = client_context(config)
    except TlsError as error:
        if known is None:
            raise
        logger.warning("TLS to workers: %s; what was read before stays", error)
        context = known[1]
    if len(_known) >= MOST_KNOWN:
        _known.clear()
    _known[config] = changed, context
    return context


def _changed(config: WorkerTlsConfig) -> Changed:
    files = (config.ca_file, config.cert_file, config.key_file)
    return tuple(_date(each) for each in files if each is not None)


def _date(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


# All of a fleet file's


def tls_problems(draft: PartialConfig) -> Iterator[Problem]:
    """Say what is wrong with the files of all blocks about TLS."""
    if router := draft.router:
        yield from _problem("router.tls", router.tls)
        yield from _problem("router.admin.tls", router.admin.tls)
    yield from _problem("worker_tls", draft.worker_tls)
    for index, worker in draft.legible_workers.items():
        yield from _problem(f"workers[{index}].tls", worker.tls)
    for index, pool in draft.pools.items():
        yield from _problem(f"discovery.pools[{index}].tls", pool.tls)


def _problem(path: str, block: TlsConfig | WorkerTlsConfig | None) -> Iterator[Problem]:
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
    """Raise `ConfigError` where any of the files can't be used."""
    if problems := list(tls_problems(PartialConfig.of(config))):
        raise ConfigError(source, problems)
    for worker in config.workers:
        to_worker(config.tls_of(worker))  # so that no request waits for files to be read
