"""Charges on a worker that this process did not make.

They come from other router processes, or from requests that a removed worker with the same address
still has in flight.

Idea: a worker's charges include those of all processes, so that rules, limits and the comparison
with the worker's own metrics do not depend on the number of processes. The part of the other
processes is kept separately. Each `RemoteLoad.look` replaces it, and the charges change by the
difference: more tokens to prefill act as a charge does, fewer as a first token does.

The state of a breaker is copied whole from the process that wrote it last.

A removed worker may still have requests in flight. A new worker at its address is the same server,
so these requests are charged to the new worker, the heir, until they end.
"""

from __future__ import annotations

from typing import Protocol

from proxy.core.fleet.worker import Worker
from proxy.core.fleet.worker_load import WorkerLoad


class RemoteLoad(Protocol):
    """The other processes, as the fleet needs them."""

    def look(self, now: float) -> None:
        """Take in what they have charged."""

    def changed(self, worker: Worker) -> None:
        """Tell them soon of a worker whose charges or breaker have changed here."""

    def have_filled(self, worker: Worker, now: float) -> bool:
        """Whether a worker that was chosen is full by now, through them; then that is taken in."""


def own_numbers(worker: Worker) -> tuple[int, ...]:
    """Return what this process has charged to a worker, in the order of a `WorkerLoad`."""
    theirs = worker.elsewhere
    return (
        worker.requests - theirs[0],
        worker.sequences - theirs[1],
        worker.prefill_tokens - theirs[2],
        worker.long_tokens - theirs[3],
        worker.decode_tokens - theirs[4],
        worker.kv_tokens - theirs[5],
        worker.decoding - theirs[6],
        worker.pinned - theirs[7],
        worker.kv_coming - theirs[8],
        worker.written - theirs[9],
    )


def own(worker: Worker) -> WorkerLoad:
    """Return what this process has charged to a worker."""
    return WorkerLoad._make(own_numbers(worker))


def replace(worker: Worker, load: WorkerLoad, now: float) -> None:
    """Have a worker charged by others with so much, in place of what it was."""
    before, worker.elsewhere = worker.elsewhere, load
    if grown := _shift(worker, before, load):
        token_s = worker.pace.token_s
        if grown > 0:
            worker.free_at = max(worker.free_at, now) + token_s * grown
        else:
            worker.free_at = now + token_s * worker.prefill_tokens


def inherit(heir: Worker, before: Worker) -> None:
    """Have a worker charged with what is charged to one that had its address before."""
    load = own(before)
    had, heir.inherited = heir.inherited, load
    if grown := _shift(heir, had, load):
        token_s = heir.pace.token_s
        after = before.free_at + token_s * (heir.prefill_tokens - load.prefill_tokens)
        heir.free_at = max(heir.free_at + token_s * min(grown, 0), after)


def _shift(worker: Worker, before: WorkerLoad, load: WorkerLoad) -> int:
    """Charge one load in place of another; return how much more that is to prefill."""
    worker.requests += load[0] - before[0]
    worker.sequences += load[1] - before[1]
    worker.long_tokens += load[3] - before[3]
    worker.decode_tokens += load[4] - before[4]
    worker.kv_tokens += load[5] - before[5]
    worker.pinned += load[7] - before[7]
    worker.kv_coming += load[8] - before[8]
    worker.written += load[9] - before[9]
    if load[6] != before[6]:
        worker.decoding += load[6] - before[6]
        worker.reprice()
    grown = load[2] - before[2]
    worker.prefill_tokens += grown
    return grown
