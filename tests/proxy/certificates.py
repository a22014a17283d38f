"""Certificates for tests."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

import trustme

from proxy.config import TlsConfig, WorkerTlsConfig


@dataclass
class Authority:
    """A certificate authority, and the files that it signed."""

    folder: Path

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.ca = trustme.CA()
        self.ca_file = self.folder / "ca.pem"
        self.ca.cert_pem.write_to_path(self.ca_file)

    def issue(self, name: str, host: str = "127.0.0.1") -> tuple[Path, Path]:
        """Sign a certificate; return its file and its key file."""
        issued = self.ca.issue_cert(host)
        cert, key = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        cert.write_bytes(b"".join(part.bytes() for part in issued.cert_chain_pems))
        issued.private_key_pem.write_to_path(key)
        return cert, key

    def port(self, name: str, *, clients: bool = False, host: str = "127.0.0.1") -> TlsConfig:
        """Return the TLS settings of a port with such a certificate."""
        cert, key = self.issue(name, host)
        ca = self.ca_file if clients else None
        return TlsConfig(cert_file=cert, key_file=key, client_ca_file=ca)

    def worker_tls(
        self, name: str | None = None, *, verify_hostname: bool = True
    ) -> WorkerTlsConfig:
        """Return the TLS settings for workers with certificates of this authority."""
        cert, key = self.issue(name) if name else (None, None)
        return WorkerTlsConfig(
            ca_file=self.ca_file, cert_file=cert, key_file=key, verify_hostname=verify_hostname
        )

    def client(self, name: str | None = None) -> ssl.SSLContext:
        """Return a client's TLS context, with a certificate if a name is given."""
        context = ssl.create_default_context(cafile=self.ca_file)
        if name is not None:
            context.load_cert_chain(*self.issue(name))
        return context
