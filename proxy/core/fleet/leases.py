"""What was decided on a request, and what was charged for it."""

from __future__ import annotations

from dataclasses import dataclass

from proxy.core.fleet.worker import Worker
from proxy.core.learned.prefix_tree import PrefixNode
from proxy.core.model.specs import Score
from proxy.core.model.types import Reason, RequestInfo


@dataclass(slots=True)
class HandoverDecision:
    """The half of a decision that only a hand-over has."""

    prefill: Worker  # who prefills; the decision's worker decodes
    cached_tokens: int  # of the prompt, in the prefill worker's cache
    tokens: int  # to transfer: those that the decode worker should not have; 0 if nothing can be
    prefill_s: float  # until the prefill worker has answered, predicted
    transfer_s: float
    transferred_s: float | None = None  # the same as it was seen, where the answer is a stream


@dataclass(slots=True)
class Decision:
    """Where a request goes and why."""

    worker: Worker
    reason: Reason
    predicted_ttft_s: float | None = None
    scores: tuple[Score, ...] = ()  # kept only when somebody asked to see them
    cached_tokens: int = 0  # of the prompt, that the worker should have in its cache
    handover: HandoverDecision | None = None
    whether: str = ""  # it is handed over, or why not: `handover.Why`; "" where nobody could

    @property
    def route(self) -> str:
        """Name who serves it: `w0`, or `p0>d0` where it is handed over."""
        handover = self.handover
        name = self.worker.name
        return name if handover is None else f"{handover.prefill.name}>{name}"


@dataclass(slots=True, eq=False)
class Lease:
    """A worker's capacity, charged for one request until released. Made by `Fleet.charge` alone.

    Of a hand-over it is the decode worker's, and holds the prefill worker's.
    """

    ask: RequestInfo
    decision: Decision
    worker: Worker  # whom it was charged to: the decision's
    charged_at: float
    prefill_tokens: int  # still charged as prefill; 0 once the first token was seen
    decode_tokens: int  # still charged as output to come
    kv_tokens: int  # prompt and output it may hold in the KV cache, less what it shares there
    ahead_tokens: float = 0.0  # to prefill before its own, by what was charged and the time since
    behind_long: float = 0.0  # of longs, if it is short itself: it may be let past them
    trial: bool = False  # the one request let through to a worker whose breaker was open
    decoding_before: int = 0  # samples that decoded there when its first token came
    seen_tokens: int = 0  # output tokens seen so far, all samples together
    first_token_at: float | None = None
    begun_at: float | None = None  # when a tenant's answer began, be it with no token
    released: bool = False
    decoding: int = 0  # samples that count as decoding there
    kv_coming: int = 0  # tokens that its cache was charged with, until the first one is written
    holds: PrefixNode | None = None  # where its prompt ends, if charged with what others begin with
    prefill: Lease | None = None  # of a hand-over, the prefill worker's
    sent: bool = True  # False on a decode worker until the prefill is done
    pins: bool = False  # whether the prefill worker still holds what it computed

    @property
    def under_way(self) -> Lease:
        """The lease of the leg that runs: of a hand-over the prefill's, until that is done."""
        first = self.prefill
        return self if first is None or first.released else first
