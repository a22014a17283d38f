"""A request as it arrives and as parsed, its outcome, and a refusal."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import inf
from sys import maxsize
from typing import TYPE_CHECKING

from proxy.core.learned.media_tokens import RequestMedia
from proxy.core.model.bill import Bill
from proxy.core.model.route_table import Route  # at run time too, for mypyc
from proxy.core.model.specs import Score
from proxy.core.tenants.tenants import Rank, Tenant

if TYPE_CHECKING:
    from proxy.core.request.json_body import LargeBody
    from proxy.core.request.json_edit import JsonMember

STANDARD = Rank.STANDARD
NONE = "none"  # label


class Reason(StrEnum):
    """Why a request was placed or refused, for metrics and logs."""

    # Placed.
    SHORT_POOL = "short_pool"
    LONG_POOL = "long_pool"
    GENERAL_POOL = "general_pool"
    DECODE_POOL = "decode_pool"  # whole, because there is little to prefill
    HANDOVER = "handover"  # prefill and decode on two workers
    SPILL_TO_LONG = "spill_to_long"  # a short on a long worker
    SPILL_TO_SHORT = "spill_to_short"  # a long that fits
    PREFIX = "prefix"
    ONLY_CHOICE = "only_choice"
    LEAST_LOADED = "least_loaded"
    ROUND_ROBIN = "round_robin"
    RETRY = "retry"
    TRIAL = "trial"  # of a worker that failed
    OWN = "own"  # the router responds: files, batches
    # Waiting.
    FLEET_FULL = "fleet_full"
    AWAITS_CACHE = "awaits_cache"  # of a full worker
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
    NOT_ALLOWED = "not_allowed"  # the model, or a web page
    LIMITED = "limited"
    TOO_SLOW = "too_slow"
    DEADLINE = "deadline"  # of the client
    # Ended.
    TIME_LIMIT = "time_limit"
    SLOW_BODY = "slow_body"


@dataclass(slots=True)
class ReceivedRequest:
    """What a client sent: the body, and what the parser needs of its head."""

    route: Route
    body: bytes
    content_type: bytes
    id: str
    tenant: Tenant | None = None
    session: bytes = b""  # the session's id in the headers
    batch: bool = False  # it gets the batch class
    deadline: float = inf  # for the first token, by the client's header
    explain: bool = False  # keep the scores of the decision
    large: LargeBody | None = None  # the body, if it was parsed in steps
    may_wait: bool = False  # until the owner of its stored response is known


@dataclass(slots=True)
class RequestInfo:
    """What is known before the request runs: `parser` and `sizing` fill it, no other step does."""

    id: str
    route: str  # as in metrics: `chat/completions`
    model: str
    body_bytes: int
    prompt_tokens: int  # of all prompts; an estimate unless `counted`
    prompt_error: int  # possible error of the largest prompt
    largest_prompt: int
    output_tokens: int | None  # limit per sample; None: the rest of the context
    expected_output: int = 0  # per sample, learned
    generates: bool = True  # whether it decodes
    stream: bool = False
    asks_usage: bool = False  # its client may expect usage in the stream
    in_background: bool = False  # its client may cancel the response by its id
    samples: int = 1  # prompts times `n`
    counted: bool = False
    sure_prompt: int = -1  # `min_prompt_size`; -1: by `prompt_error`
    least_prompt: int = -1  # least size of the largest prompt; -1: by `prompt_error`
    context_cap: int = maxsize  # largest context, if its worker should decide
    long: bool = False  # budget above `short_limit`
    prefix: tuple[int, ...] = ()  # chained block hashes
    prefix_bytes: int = 0  # body bytes of the prompt
    bytes_before: int = 0  # of tools, which a template puts before the prompt
    text_bytes: int = 0
    tool_bytes: int = 0  # the part of `text_bytes` in tools
    prompts: int = 1
    extra_tokens: int = 0  # template, images
    media: RequestMedia | None = None  # if `usage` shows its sizes
    countable: bool = False  # a worker's /tokenize accepts it
    pinned: str = ""  # worker that holds its stored response
    stored_tokens: int = 0  # of the stored response that it continues, in the prompt
    session: int = 0  # key; 0: none
    is_chained: bool = False  # its response names the session
    why_whole: str = ""  # why it cannot be split; empty if it can
    has_min_tokens: bool = False  # the body has `min_tokens`
    field_names: frozenset[str] | None = None  # names of the body's fields, if it may be split
    tenant: Tenant | None = None  # None: no keys are configured
    rank: Rank = STANDARD
    deadline: float = inf  # for the first token, if the client has one
    explain: bool = False  # its decision keeps all scores
    takes_arguments: bool = False  # the router may add `vllm_xargs`
    salt: str = ""  # of its cached prefixes
    edits: dict[str, bytes | None] | None = None  # body fields to set or remove
    found_members: list[JsonMember] | None = None  # the members of `edits` in the body, if known
    account: Bill | None = None  # see `bill`

    @property
    def bill(self) -> Bill:
        """Return the request's bill, made on first use: only tenants need one."""
        if self.account is None:
            self.account = Bill()
        return self.account

    @property
    def min_prompt_size(self) -> int:
        """Return the least size of the largest prompt, for its tenant's limit."""
        sure = self.sure_prompt
        return self.largest_prompt - self.prompt_error if sure < 0 else sure

    @property
    def needed_context(self) -> int:
        """Return the context of its largest prompt and one sample.

        Workers clamp output: a missing limit needs one token, and `context_cap` caps a stated one.
        """
        output = self.output_tokens
        needs = self.largest_prompt + (self.generates if output is None else output)
        return min(needs, self.context_cap)

    @property
    def needs_engine(self) -> bool:
        return self.generates or self.prompt_tokens > 0

    @property
    def expected_tokens(self) -> int:
        output = self.expected_output if self.output_tokens is None else self.output_tokens
        return self.prompt_tokens + output * self.samples


class Outcome(StrEnum):
    """How a leg on a worker ended."""

    DONE = "done"
    CLIENT_GONE = "client_gone"
    REFUSED = "refused"
    ERRED = "erred"  # 500: a fault of the worker or of the request
    FAILED = "failed"  # network, timeout, other 5xx
    BUSY = "busy"  # 429 or 503
    UNFINISHED = "unfinished"  # longer than a client may wait; the worker is well
    MOOT = "moot"  # no evidence about the worker


@dataclass(slots=True, frozen=True)
class Usage:
    """Tokens that a worker reports for a request."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0


@dataclass(slots=True, frozen=True)
class Refusal:
    """An error response of the router."""

    status: int
    reason: Reason
    message: str
    code: str | None = None
    param: str | None = None
    retry_after_s: float | None = None
    scores: tuple[Score, ...] = ()  # kept on request only
    headers: tuple[tuple[str, str], ...] = ()
