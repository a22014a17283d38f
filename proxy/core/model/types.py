"""Input and output of the core, as plain data.

The router responds to a `RequestInfo` with a `Lease` (a charged worker), a `Ticket` (a place in the
queue) or a `Refusal`.
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
NONE = "none"  # label of a missing worker, pool or size


class Reason(StrEnum):
    """Why a request was placed or refused; a label of metrics and logs."""

    # Placed.
    SHORT_POOL = "short_pool"  # fits a short worker
    LONG_POOL = "long_pool"  # needs a long worker, or is long
    GENERAL_POOL = "general_pool"
    DECODE_POOL = "decode_pool"  # whole: little to prefill
    HANDOVER = "handover"  # prefill and decode on two workers
    SPILL_TO_LONG = "spill_to_long"  # a short on a free long worker
    SPILL_TO_SHORT = "spill_to_short"  # a long that a short worker can hold
    PREFIX = "prefix"  # a cached prefix decided
    ONLY_CHOICE = "only_choice"
    LEAST_LOADED = "least_loaded"
    ROUND_ROBIN = "round_robin"
    RETRY = "retry"  # another worker failed
    OWN = "own"  # by the router: files, batches
    # Waiting.
    FLEET_FULL = "fleet_full"
    # Refused.
    BAD_REQUEST = "bad_request"
    UNKNOWN_PATH = "unknown_path"
    UNKNOWN_MODEL = "unknown_model"
    NOT_KNOWN_YET = "not_known_yet"  # a worker has not listed its models
    TOO_LONG = "too_long"
    QUEUE_FULL = "queue_full"
    WAITED_TOO_LONG = "waited_too_long"
    NO_WORKER = "no_worker"
    DRAINING = "draining"
    ROUTER_FULL = "router_full"  # no room for a connection
    BAD_KEY = "bad_key"
    NOT_ALLOWED = "not_allowed"  # model or web page
    LIMITED = "limited"  # by tenant limits
    TOO_SLOW = "too_slow"  # predicted first token too late
    # Ended.
    TIME_LIMIT = "time_limit"
    SLOW_BODY = "slow_body"  # body too slow


@dataclass(slots=True)
class RequestInfo:
    """Facts about a request before it runs."""

    id: str
    route: str  # label, as `chat/completions`
    model: str
    body_bytes: int
    prompt_tokens: int  # of all prompts; an estimate unless `counted`
    prompt_error: int  # possible error of the largest
    largest_prompt: int  # tokens of the largest prompt
    output_tokens: int | None  # limit per sample; None: the rest of the context
    expected_output: int = 0  # learnt, per sample
    generates: bool = True  # whether it decodes
    stream: bool = False
    samples: int = 1  # prompts times `n`
    counted: bool = False
    sure_prompt: int = -1  # least size of a prompt that a worker may cut, or -1
    least_prompt: int = -1  # least size of the largest prompt; -1: by error
    most: int = maxsize  # largest context, where its worker should decide
    long: bool = False  # budget above `short_limit`
    prefix: tuple[int, ...] = ()  # chained block hashes
    prefix_bytes: int = 0  # body bytes from the prompt's start
    text_bytes: int = 0  # behind `prompt_tokens`
    tool_bytes: int = 0  # of these, tools
    prompts: int = 1
    extra_tokens: int = 0  # template, images, token ids
    media: RequestMedia | None = None  # if `usage` can teach sizes
    countable: bool = False  # by a worker's /tokenize
    erred_on: tuple[str, ...] = ()  # workers that responded 500
    drops: int = 0  # connections closed before any response
    pinned: str = ""  # worker with the stored response
    whole: str = ""  # why it can't be split; "" if it can
    least_output: bool = False  # has `min_tokens`
    said: frozenset[str] | None = None  # body field names, if it may be split
    tenant: Tenant | None = None  # None: no keys are configured
    rank: Rank = STANDARD
    salt: str = ""  # separates its cached prefixes
    fields: dict[str, bytes | None] | None = None  # body fields to set or remove
    found: list[JsonMember] | None = None  # of these, known members
    bill: Bill = field(default_factory=Bill)

    @property
    def needs(self) -> int:
        """Return the context that its largest prompt and one sample need.

        Workers clamp output limits. A missing limit needs one token. A stated one is capped by
        `most`.
        """
        output = self.output_tokens
        needs = self.largest_prompt + (self.generates if output is None else output)
        return min(needs, self.most)

    @property
    def computes(self) -> bool:
        """Return whether an engine works on it; otherwise its API process responds."""
        return self.generates or self.prompt_tokens > 0

    @property
    def budget(self) -> int:
        """Return all expected tokens; a missing limit counts as the usual output."""
        each = self.expected_output if self.output_tokens is None else self.output_tokens
        return self.prompt_tokens + each * self.samples


class Outcome(StrEnum):
    """The end of a leg."""

    DONE = "done"
    CLIENT_GONE = "client_gone"
    REFUSED = "refused"  # a 4xx of the worker
    ERRED = "erred"  # a 500; the cause is open
    FAILED = "failed"  # no connection, another 5xx, a reset, a timeout
    BUSY = "busy"  # 429 or 503
    UNFINISHED = "unfinished"  # longer than a client may wait
    MOOT = "moot"  # says nothing of the worker


@dataclass(slots=True, frozen=True)
class Usage:
    """A worker's usage report."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0


@dataclass(slots=True, frozen=True)
class Refusal:
    """A response without a worker, in the API's error format."""

    status: int
    reason: Reason
    message: str
    code: str | None = None  # as `context_length_exceeded`
    param: str | None = None
    retry_after_s: float | None = None
    scores: tuple[Score, ...] = ()  # kept on request only
    headers: tuple[tuple[str, str], ...] = ()  # additional
