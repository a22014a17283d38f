"""The blocks for TLS: to clients and to workers."""

from __future__ import annotations

from proxy.config.types import Block, FilePath


class TlsConfig(Block):
    """TLS for clients that connect to a port of the router."""

    cert_file: FilePath
    """PEM file with the port's certificate, followed by its intermediate certificates"""
    key_file: FilePath
    """PEM file with the certificate's private key, not encrypted"""
    client_ca_file: FilePath | None = None
    """PEM file with CA certificates. If given, a client must present a certificate that one of
    them signed (mTLS)"""


class WorkerTlsConfig(Block):
    """TLS to workers with an https:// URL."""

    ca_file: FilePath | None = None
    """PEM file with the CA certificates that sign workers' certificates; the system's
    certificates if not given"""
    cert_file: FilePath | None = None
    """PEM file with the router's own certificate, for workers that require one (mTLS)"""
    key_file: FilePath | None = None
    """PEM file with the private key of the router's certificate"""
    verify_hostname: bool = True
    """Whether a worker's certificate must name the host of its URL"""
