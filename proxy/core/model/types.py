"""What the core takes in and gives out. All of it is plain data: no sockets, no clock.

A request becomes a `RequestInfo`, which holds what is known before it runs. The router answers it
with a `Lease` (a worker, charged), a `Ticket` (a place in the queue) or a `Refusal` (an immediate
response).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from sys import maxsize
from typing import TYPE_CHECKING

from proxy.core.learned.media_tokens import RequestMedia
from proxy.core.model.bill import Bill
from proxy.core.model.specs import Score
from proxy.core.tenants.tenants import Rank, Tenant

if TYPE_CHECKING:
    from proxy.core.request.json_edit import JsonMember

STANDARD = Rank.STANDARD
NONE = "none"  # the label for the worker, the pool or the size of a request that has none


class Reason(StrEnum):
    """Why a request went where it went, or went nowhere. Counted, logged and shown."""

    # It was placed.
    SHORT_POOL = "short_pool"  # fits a short worker, and that was the best place
    LONG_POOL = "long_pool"  # only long workers can hold it, or its size makes it long
    GENERAL_POOL = "general_pool"
    DECODE_POOL = "decode_pool"  # whole on a decode worker: there is little to prefill
    HANDOVER = "handover"  # prefill on one worker, decode on another
    SPILL_TO_LONG = "spill_to_long"  # a short that the long pool had room for
    SPILL_TO_SHORT = "spill_to_short"  # a long that a short worker can hold after all
    PREFIX = "prefix"  # a cached prefix decided
    ONLY_CHOICE = "only_choice"
    LEAST_LOADED = "least_loaded"
    ROUND_ROBIN = "round_robin"
    RETRY = "retry"  # another worker had failed
    OWN = "own"  # the router answered it itself: files, batches
    # It waits.
    FLEET_FULL = "fleet_full"
    # It was refused.
    BAD_REQUEST = "bad_request"
    UNKNOWN_PATH = "unknown_path"
    UNKNOWN_MODEL = "unknown_model"
    NOT_KNOWN_YET = "not_known_yet"  # a model that somebody may serve who has yet to say
    TOO_LONG = "too_long"
    QUEUE_FULL = "queue_full"
    WAITED_TOO_LONG = "waited_too_long"
    NO_WORKER = "no_worker"
    DRAINING = "draining"
    ROUTER_FULL = "router_full"  # the router's machine has no room for a connection
    BAD_KEY = "bad_key"  # of no tenant
    NOT_ALLOWED = "not_allowed"  # a model that is not for this tenant, or a web page
    LIMITED = "limited"  # the tenant's limits
    TOO_SLOW = "too_slow"  # its first token would have come too late
    # It was ended.
    TIME_LIMIT = "time_limit"  # it took longer than a request may take
    SLOW_BODY = "slow_body"  # its body came at too low a rate


@dataclass(slots=True)
class RequestInfo:
    """What is known of a request before it ran."""

    id: str
    route: str  # the path's name in metrics, as in `chat/completions`
    model: str
    body_bytes: int
    prompt_tokens: int  # of all its prompts together; an estimate unless `counted`
    prompt_error: int  # the largest of them may be off by so many tokens
    largest_prompt: int  # tokens of the largest of its prompts: what a context must hold
    output_tokens: int | None  # the most each sample may write; None = whatever the model has left
    expected_output: int = 0  # what each sample is likely to write, learnt; at most the above
    generates: bool = True  # whether it decodes at all
    stream: bool = False
    samples: int = 1  # sequences an engine makes of it: prompts times `n`
    counted: bool = False
    sure_prompt: int = -1  # that a largest prompt has at least which a worker may cut; else -1
    least_prompt: int = -1  # that its largest prompt has, be it of the longest words; -1: see error
    most: int = maxsize  # the largest context there is, where the worker that has it should judge
    long: bool = False  # its total budget is above the fleet's `short_limit`
    prefix: tuple[int, ...] = ()  # chained hashes of the prompt's blocks, first block first
    prefix_bytes: int = 0  # bytes of body from where the prompt starts
    text_bytes: int = 0  # bytes of prompt text, of which `prompt_tokens` was reckoned
    tool_bytes: int = 0  # of those, what describes tools
    prompts: int = 1
    extra_tokens: int = 0  # tokens reckoned otherwise: template, images, token ids
    media: RequestMedia | None = None  # images and their like, where `usage` can tell their sizes
    countable: bool = False  # whether a worker's /tokenize understands its body
    erred_on: tuple[str, ...] = ()  # the names of workers that answered it with a 500
    drops: int = 0  # workers that closed its connection before any of the answer was passed on
    pinned: str = ""  # the worker that holds what it refers to, as a stored response
    whole: str = ""  # why its prefill and its decode can't be two workers'; empty if they can
    least_output: bool = False  # whether its body says `min_tokens`
    said: frozenset[str] | None = None  # the names of its body's members, where it may be split
    tenant: Tenant | None = None  # who asks; None where nobody is asked for a key
    rank: Rank = STANDARD
    salt: str = ""  # of its cached prefix: with another, the same text is another prefix
    fields: dict[str, bytes | None] | None = None  # of its body, that are set or taken out
    found: list[JsonMember] | None = None  # of those, the ones that are there, where that is known
    bill: Bill = field(default_factory=Bill)

    @property
    def needs(self) -> int:
        """The context that its largest prompt takes, with what one sample may write.

        A worker clamps an output limit that was not stated, so one token has to do for that. One
        that was stated it clamps too, so that where no context is large enough, the largest is.
        """
        output = self.output_tokens
        needs = self.largest_prompt + (self.generates if output is None else output)
        return min(needs, self.most)

    @property
    def computes(self) -> bool:
        """Whether an engine has work with it; else its API process answers, whatever is ahead."""
        return self.generates or self.prompt_tokens > 0

    @property
    def budget(self) -> int:
        """All tokens it may come to: prompts, and what every sample may write.

        A client that states no limit is taken to want the usual, not the model's whole rest.
        """
        each = self.expected_output if self.output_tokens is None else self.output_tokens
        return self.prompt_tokens + each * self.samples


class Outcome(StrEnum):
    """How a leg on a worker ended."""

    DONE = "done"
    CLIENT_GONE = "client_gone"
    REFUSED = "refused"  # a 4xx of the worker: the request's own fault
    ERRED = "erred"  # a 500: its fault, or the request's; another worker's answer will tell
    FAILED = "failed"  # no connection, another 5xx, a reset, a timeout
    BUSY = "busy"  # 429 or 503 of the worker
    UNFINISHED = "unfinished"  # its answer is longer than a client may wait; the worker is well
    MOOT = "moot"  # it tells nothing of the worker


@dataclass(slots=True, frozen=True)
class Usage:
    """What a worker says it computed."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0


@dataclass(slots=True, frozen=True)
class Refusal:
    """An answer without a worker, to be given in the shape of the API that was asked."""

    status: int
    reason: Reason
    message: str
    code: str | None = None  # OpenAI's machine-readable code, as `context_length_exceeded`
    param: str | None = None
    retry_after_s: float | None = None
    scores: tuple[Score, ...] = ()  # kept only when somebody asked to see them
    headers: tuple[tuple[str, str], ...] = ()  # beyond those that every answer has
