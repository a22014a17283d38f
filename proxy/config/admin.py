"""The block `router.admin`: where the admin API listens, and who may speak to it."""

from __future__ import annotations

import ipaddress
from typing import Annotated

from pydantic import Field

from proxy.config.tls import TlsConfig
from proxy.config.types import Block, FilePath, Name, Port

Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class AdminConfig(Block):
    """Where the admin API listens."""

    host: Name = Field("127.0.0.1", description="whoever reaches it, and has its key, rules")
    port: Port = Field(8001, description="0 is any free one")
    key_file: FilePath | None = Field(
        None, description="a file with the key that it wants; read at the start and at each reload"
    )
    key_env: Variable | None = Field(None, description="the variable that has that key")
    tls: TlsConfig | None = Field(None, description="the certificate that it shows")

    @property
    def has_key(self) -> bool:
        """Whether a key is asked for."""
        return self.key_file is not None or self.key_env is not None


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens there; other names may lead anywhere."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
