"""The blocks that say how connections are encrypted, and whom both ends believe."""

from __future__ import annotations

from pydantic import Field

from proxy.config.types import Block, FilePath


class TlsConfig(Block):
    """TLS to whoever connects to a port of the router's."""

    cert_file: FilePath = Field(description="the port's certificate and its chain, PEM")
    key_file: FilePath = Field(description="the certificate's private key, PEM, not encrypted")
    client_ca_file: FilePath | None = Field(
        None, description="only clients with a certificate of these authorities are let in"
    )


class WorkerTlsConfig(Block):
    """TLS to workers with an https:// URL."""

    ca_file: FilePath | None = Field(
        None, description="the authorities that sign workers' certificates; the system's if none"
    )
    cert_file: FilePath | None = Field(
        None, description="the router's own certificate, for workers that ask for one (mTLS)"
    )
    key_file: FilePath | None = Field(None, description="the private key of that")
    verify_hostname: bool = Field(
        True, description="whether a worker's certificate has to name the host of its URL"
    )
