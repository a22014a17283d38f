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


def own_numbers(worker: Worker) -> tuple[int, ...]:
    """Return this process's charges in the order of `WorkerLoad`."""
    remote = worker.remote_load
    return (
        worker.requests - remote[0],
        worker.sequences - remote[1],
        worker.prefill_tokens - remote[2],
        worker.long_tokens - remote[3],
        worker.decode_tokens - remote[4],
        worker.kv_tokens - remote[5],
        worker.num_decoding - remote[6],
        worker.unfetched_handovers - remote[7],
        worker.kv_coming - remote[8],
        worker.total_written - remote[9],
        worker.total_placed - remote[10],
    )


def own(worker: Worker) -> WorkerLoad:
    return WorkerLoad._make(own_numbers(worker))


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
    load = own(before)
    had, successor.inherited = successor.inherited, load
    if grown := _replace_load(successor, had, load):
        token_s = successor.pace.token_s
        after = before.free_at + token_s * (successor.prefill_tokens - load.prefill_tokens)
        successor.free_at = max(successor.free_at + token_s * min(grown, 0), after)


def _replace_load(worker: Worker, before: WorkerLoad, load: WorkerLoad) -> int:
    """Replace a load; return the increase in prefill tokens."""
    worker.requests += load[0] - before[0]
    worker.sequences += load[1] - before[1]
    worker.long_tokens += load[3] - before[3]
    worker.decode_tokens += load[4] - before[4]
    worker.kv_tokens += load[5] - before[5]
    worker.unfetched_handovers += load[7] - before[7]
    worker.kv_coming += load[8] - before[8]
    worker.total_written += load[9] - before[9]
    worker.total_placed += load[10] - before[10]
    if load[6] != before[6]:
        worker.num_decoding += load[6] - before[6]
        worker.reprice()
    grown = load[2] - before[2]
    worker.prefill_tokens += grown
    return grown
