"""Charges on a worker that this process did not make.

Other router processes made them, or the worker's predecessor. A worker's charges include them, so
rules and limits do not depend on the number of processes. An increase acts as a charge, a decrease
as a first token. A breaker's state is copied from its last writer.

A new worker at a removed one's address is the same server, the successor for requests in flight.
"""

from __future__ import annotations

from typing import Protocol

from proxy.core.fleet.worker import Worker
from proxy.core.fleet.worker_load import WorkerLoad


class RemoteLoad(Protocol):
    """The other router processes."""

    def read_remote_charges(self, now: float) -> None:
        """Apply their charges to the workers."""

    def publish_soon(self, worker: Worker) -> None: ...

    def is_filled_by_others(self, worker: Worker, now: float) -> bool:
        """Return whether remote charges fill a chosen worker; then apply them."""


def own_load(worker: Worker) -> WorkerLoad:
    """Return this process's charges."""
    remote = worker.remote_load
    return WorkerLoad(
        worker.requests - remote.requests,
        worker.sequences - remote.sequences,
        worker.prefill_tokens - remote.prefill_tokens,
        worker.long_tokens - remote.long_tokens,
        worker.decode_tokens - remote.decode_tokens,
        worker.kv_tokens - remote.kv_tokens,
        worker.num_decoding - remote.num_decoding,
        worker.unfetched_handovers - remote.unfetched_handovers,
        worker.kv_coming - remote.kv_coming,
        worker.total_written - remote.total_written,
        worker.total_placed - remote.total_placed,
    )


def set_remote_load(worker: Worker, load: WorkerLoad, now: float) -> None:
    before, worker.remote_load = worker.remote_load, load
    if grown := _replace_load(worker, before, load):
        token_s = worker.pace.token_s
        if grown > 0:
            worker.free_at = max(worker.free_at, now) + token_s * grown
        else:
            worker.free_at = now + token_s * worker.prefill_tokens


def inherit_load(successor: Worker, before: Worker) -> None:
    """Charge the successor with its predecessor's requests."""
    load = own_load(before)
    inherited, successor.inherited = successor.inherited, load
    if grown := _replace_load(successor, inherited, load):
        token_s = successor.pace.token_s
        after = before.free_at + token_s * (successor.prefill_tokens - load.prefill_tokens)
        successor.free_at = max(successor.free_at + token_s * min(grown, 0), after)


def _replace_load(worker: Worker, before: WorkerLoad, load: WorkerLoad) -> int:
    """Replace a load; return the increase in prefill tokens."""
    worker.requests += load.requests - before.requests
    worker.sequences += load.sequences - before.sequences
    worker.long_tokens += load.long_tokens - before.long_tokens
    worker.decode_tokens += load.decode_tokens - before.decode_tokens
    worker.kv_tokens += load.kv_tokens - before.kv_tokens
    worker.unfetched_handovers += load.unfetched_handovers - before.unfetched_handovers
    worker.kv_coming += load.kv_coming - before.kv_coming
    worker.total_written += load.total_written - before.total_written
    worker.total_placed += load.total_placed - before.total_placed
    if load.num_decoding != before.num_decoding:
        worker.num_decoding += load.num_decoding - before.num_decoding
        worker.reprice()
    grown = load.prefill_tokens - before.prefill_tokens
    worker.prefill_tokens += grown
    return grown
