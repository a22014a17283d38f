"""The block `router.admin`: address and key of the admin API."""

from __future__ import annotations

import ipaddress

from proxy.config.tls import TlsConfig
from proxy.config.types import Block, FilePath, Name, Port, Variable


class AdminConfig(Block):
    """Address and key of the admin API."""

    host: Name = "127.0.0.1"
    """Address to listen on. A client that reaches it and has the key controls the fleet"""
    port: Port = 8001
    """Port to listen on; 0 selects a free port"""
    key_file: FilePath | None = None
    """File with the key that clients must send; read at the start and at each reload"""
    key_env: Variable | None = None
    """Name of an environment variable with that key, instead of key_file"""
    tls: TlsConfig | None = None
    """Certificate of the admin port; plain HTTP if not given"""

    @property
    def has_key(self) -> bool:
        """Whether clients must send a key."""
        return self.key_file is not None or self.key_env is not None


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
