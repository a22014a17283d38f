"""Settings of the engine's journal, which are given like those of a policy."""

from __future__ import annotations

import re
from typing import Final

from pydantic import field_validator

from vllm_sched.errors import UsageError
from vllm_sched.policies.types import Settings

TCP: Final = re.compile(r"tcp://(?P<host>\[[^\]/]+\]|[^:/\s]+):(?P<port>\d{1,5})")
IPC: Final = re.compile(r"ipc://(?P<path>/\S+)")
LOOPBACK: Final = ("127.", "localhost", "[::1]")


class JournalSettings(Settings):
    endpoint: str
    """address on which the engine listens, tcp://HOST:PORT or ipc:///PATH"""
    key_file: str | None = None
    """file with a secret that signs messages; set it if other machines can reach the port"""

    @field_validator("endpoint")
    @classmethod
    def _is_endpoint(cls, endpoint: str) -> str:
        tcp = TCP.fullmatch(endpoint)
        if not IPC.fullmatch(endpoint) and not (tcp and 0 < int(tcp["port"]) < 1 << 16):
            raise ValueError("an endpoint is tcp://HOST:PORT or ipc:///PATH")
        return endpoint

    def endpoint_of(self, rank: int) -> str:
        if not rank:
            return self.endpoint
        if (tcp := TCP.fullmatch(self.endpoint)) is None:
            return f"{self.endpoint}_dp{rank}"
        port = int(tcp["port"]) + rank
        if port >= 1 << 16:
            raise UsageError(
                f"journal.endpoint={self.endpoint}: rank {rank} would listen on port {port}; "
                "choose a lower port"
            )
        return f"tcp://{tcp['host']}:{port}"

    @property
    def is_local(self) -> bool:
        """Return whether only this machine can connect."""
        tcp = TCP.fullmatch(self.endpoint)
        return tcp is None or tcp["host"].startswith(LOOPBACK)
