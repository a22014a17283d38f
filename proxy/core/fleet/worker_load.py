"""Charges as numbers that processes exchange."""

from __future__ import annotations

from typing import NamedTuple


class WorkerLoad(NamedTuple):
    """Charges, named as in `Worker`."""

    requests: int = 0
    sequences: int = 0
    prefill_tokens: int = 0
    long_tokens: int = 0
    decode_tokens: int = 0
    kv_tokens: int = 0
    num_decoding: int = 0
    unfetched_handovers: int = 0
    kv_coming: int = 0
    total_written: int = 0  # tokens, to the cache
    total_placed: int = 0  # requests


NO_LOAD = WorkerLoad()
