"""Routing decisions and the charges made for them."""

from __future__ import annotations

from dataclasses import dataclass

from proxy.core.fleet.worker import Worker
from proxy.core.learned.prefix_tree import PrefixNode
from proxy.core.model.specs import Score
from proxy.core.model.types import Reason, RequestInfo


@dataclass(slots=True)
class HandoverDecision:
    """The part of a decision that only a hand-over has."""

    prefill: Worker  # the decision's worker decodes
    cached_tokens: int  # of the prompt, on the prefill worker
    tokens: int  # to transfer; 0 if nothing is
    prefill_s: float  # predicted time to the prefill worker's response
    transfer_s: float
    transferred_s: float | None = None  # observed, if the response is a stream


@dataclass(slots=True)
class Decision:
    """Where a request goes and why."""

    worker: Worker
    reason: Reason
    predicted_ttft_s: float | None = None
    scores: tuple[Score, ...] = ()  # kept on request only
    cached_tokens: int = 0  # of the prompt, expected on the worker
    handover: HandoverDecision | None = None
    whether: str = ""  # why it is handed over or not, a `Why`; "" if impossible

    @property
    def route(self) -> str:
        """Return the workers' names: `w0`, or `p0>d0` for a hand-over."""
        handover = self.handover
        name = self.worker.name
        return name if handover is None else f"{handover.prefill.name}>{name}"


@dataclass(slots=True, eq=False)
class Lease:
    """A worker's capacity, charged for one request until released. Made by `Fleet.charge` only.

    The lease of a hand-over is on the decode worker, and holds the prefill worker's lease.
    """

    ask: RequestInfo
    decision: Decision
    worker: Worker
    charged_at: float
    prefill_tokens: int  # still charged as prefill; 0 after the first token
    decode_tokens: int  # still charged as output to come
    kv_tokens: int  # prompt and output in the KV cache, less the shared part
    ahead_tokens: float = 0.0  # estimated prefill tokens in front of this request
    behind_long: float = 0.0  # those of long requests, which a short may overtake
    trial: bool = False  # the trial request of an open breaker
    decoding_before: int = 0  # samples decoding on the worker at the first token
    seen_tokens: int = 0  # output tokens, all samples together
    first_token_at: float | None = None
    begun_at: float | None = None  # first byte of a tenant's response
    released: bool = False
    decoding: int = 0  # samples counted as decoding
    kv_coming: int = 0  # cache tokens charged until the first token
    holds: PrefixNode | None = None  # end of the prompt in the worker's `PrefixTree`
    prefill: Lease | None = None  # the prefill leg of a hand-over
    sent: bool = True  # False on a decode worker until the prefill is done
    pins: bool = False  # whether the prefill worker still holds the blocks

    @property
    def under_way(self) -> Lease:
        """Return the lease of the running leg."""
        first = self.prefill
        return self if first is None or first.released else first
