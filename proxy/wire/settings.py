"""What the wire is told."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WireSettings:
    """Limits on size and on patience; seconds."""

    refuses_pages: bool = False  # of elsewhere, where whoever may connect may ask
    max_body_bytes: int = 64 << 20
    max_header_bytes: int = 64 << 10
    max_collected_bytes: int = 512 << 20  # of all bodies that are held
    connect_s: float = 3.0  # until a worker takes the connection
    first_byte_s: float = 600.0  # until its answer begins
    prefill_s: float = 20.0  # until a prefill leg's has, beyond what it may take
    idle_s: float = 300.0  # between two pieces of it; also how long a client may take none
    client_idle_s: float = 75.0  # between two requests, or two pieces of a body
    client_header_s: float = 10.0  # for a request's head
    body_min_bytes_per_s: int = 1024  # on average, once a body has taken `client_idle_s`; 0: any
    request_s: float | None = None  # for a whole request
    count_s: float = 0.15  # for a worker to count tokens, before the estimate has to do
    notice_s: float = 0.0  # that /ready says no before it listens no more
    linger_s: float = 2.0  # for a refused client to read the answer while it still sends
