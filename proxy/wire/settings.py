"""Settings of the data path."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WireSettings:
    """Limits on sizes and times."""

    refuses_pages: bool = False  # refuse web pages of other origins
    max_body_bytes: int = 64 << 20
    max_header_bytes: int = 64 << 10
    max_collected_bytes: int = 512 << 20  # all held bodies
    connect_s: float = 3.0
    first_byte_s: float = 600.0  # until the response begins
    prefill_s: float = 20.0  # for a prefill leg, beyond its predicted time
    idle_s: float = 300.0  # between two pieces of a response
    client_idle_s: float = 75.0  # between two requests or pieces of a body
    client_header_s: float = 10.0
    body_min_bytes_per_s: int = 1024  # average after `client_idle_s`; 0: no limit
    request_s: float | None = None
    count_s: float = 0.15  # for a /tokenize request
    drain_notice_s: float = 0.0  # /ready fails before the port closes
    pass_targets: bool = False  # to workers
    client_deadlines: bool = True
    continuation: bool = True  # streams go on after their worker has failed
    continues_by_text: bool = False  # also without their tokens
    linger_s: float = 2.0  # for a refused client to read the response
