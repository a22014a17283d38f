"""What other processes of the same router have charged to a worker.

Idea: a worker's charges are everybody's, so that rules, limits and what is subtracted from its own
page need not know how many processes there are. What of them is others' is kept beside, is replaced
whenever somebody looks (`Others.look`), and goes into the charges as a difference: more to prefill
as a charge would, less of it as a first token would.

A breaker is a register that whoever wrote last owns: its state travels whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from proxy.core.worker import Worker


class Load(NamedTuple):
    """Charges on one worker; the names are the worker's."""

    requests: int = 0
    sequences: int = 0
    prefill_tokens: int = 0
    long_tokens: int = 0
    decode_tokens: int = 0
    kv_tokens: int = 0
    decoding: int = 0
    pinned: int = 0
    kv_coming: int = 0
    written: int = 0  # since ever, so it only grows


NO_LOAD = Load()


class Others(Protocol):
    """The other processes, as the fleet needs them."""

    def look(self, now: float) -> None:
        """Take in what they have charged."""

    def changed(self, worker: Worker) -> None:
        """Tell them soon of a worker whose charges or breaker have changed here."""


def own_numbers(worker: Worker) -> tuple[int, ...]:
    """Return what this process has charged to a worker, in the order of a `Load`."""
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


def own(worker: Worker) -> Load:
    """Return what this process has charged to a worker."""
    return Load._make(own_numbers(worker))


def replace(worker: Worker, load: Load, now: float) -> None:
    """Have a worker charged by others with so much, in place of what it was."""
    requests, sequences, prefill, long, decode, kv, decoding, pinned, coming, written = (
        worker.elsewhere
    )
    worker.elsewhere = load
    worker.requests += load[0] - requests
    worker.sequences += load[1] - sequences
    worker.long_tokens += load[3] - long
    worker.decode_tokens += load[4] - decode
    worker.kv_tokens += load[5] - kv
    worker.pinned += load[7] - pinned
    worker.kv_coming += load[8] - coming
    worker.written += load[9] - written
    if grown := load[2] - prefill:
        worker.prefill_tokens += grown
        token_s = worker.pace.token_s
        if grown > 0:
            worker.free_at = max(worker.free_at, now) + token_s * grown
        else:
            worker.free_at = now + token_s * worker.prefill_tokens
    if load[6] != decoding:
        worker.decoding += load[6] - decoding
        worker.reprice()
