"""What a simulated worker is, takes in and gives out.

An engine is a machine without a clock: whoever plays it (`fleet`) tells it what time it is.

    engine.submit(job, now)      # a request arrives; now is never before an earlier call's
    engine.abort(job.id, now)    # its client left
    engine.next_at()             # when it has something to tell, inf if nothing is under way
    engine.advance(now)          # become as it is then, and tell what happened until then

`exact` steps real vLLM schedulers, `fluid` is a plain model for scale. Both are built from a
`WorkerModel`, so that a fleet may be played with either, and give the same events.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol, TypeAlias

from vllm_sched.bench.traffic.types import Piece
from vllm_sched.cost.step_time import StepTime
from vllm_sched.cost.transfer import TransferTime


class Leg(Enum):
    """What of a request an engine is asked for."""

    WHOLE = "whole"
    # The prompt, and one token that nobody reads. When it is told as finished its KV stays in the
    # cache until `release`: somebody is still to fetch it.
    PREFILL = "prefill"
    # The prompt's KV is fetched, as far as it is not cached (`WorkerModel.transfer_s`, from when
    # there is room for it), its last token computed again, and all of the output written.
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Job:
    """A request, or one of its legs, as an engine sees it.

    It writes exactly `output_tokens`. What follows its shared pieces is nobody else's: no two
    jobs of different `text` share more than their pieces; both legs of one request have one text.
    """

    id: str  # unique among all that are under way in an engine
    prompt_tokens: int
    output_tokens: int
    text: int = 0
    shared: tuple[Piece, ...] = ()
    leg: Leg = Leg.WHOLE
    klass: str = ""
    tenant: str = ""
    priority: int = 0  # its class, where workers are told: less is more urgent


class Event(NamedTuple):
    """Something that happened to a job, in the order of `at`.

    An exact engine tells each token; one that is not may put several into one event, but never the
    first token together with others. Every job ends in one event with `finished`, or by `abort`.
    """

    job_id: str
    at: float
    tokens: int = 0  # that were written
    finished: bool = False
    fetched: bool = False  # of a decode leg: its KV is here, the other worker may `release` it
    cached_tokens: int = 0  # of the prompt, found in the cache; told with the first token


class Gauges(NamedTuple):
    """What a worker's /metrics would say."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0  # share of the cache
    backlog_tokens: float = 0.0  # of prompts, still to be computed
    backlog_long_tokens: float = 0.0
    preemptions: int = 0
    steps: int = 0
    fetching: int = 0  # of those that wait: their KV cache is on its way


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerModel:
    """What there is to say of a worker that is not there."""

    name: str
    time: StepTime
    max_model_len: int
    kv_tokens: int  # that its cache holds
    profile: str = ""  # where `time` is from
    gpus: int = 1
    block_tokens: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    prefix_caching: bool = True
    async_scheduling: bool = True  # the next step is scheduled while one runs, as on a GPU
    # vLLM's own limit on a prompt's chunk beside other requests, 0 for none; and whether it is at
    # least an even share of a step. To exact engines alone.
    longest_chunk: int = 0
    longest_chunk_adapts: bool = False
    transfers: bool = False  # whether it prefills or decodes for others
    front_s: float = 0.0  # between client and engine, there and back again: HTTP, tokenizer
    policies: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    kv_token_bytes: int = 131_072  # that a token's KV takes, over all layers
    kv_pieces: int = 64  # contiguous pieces that a block's KV is in: layers x 2
    transfer: TransferTime = field(default_factory=TransferTime)  # from another worker
    assumed: tuple[str, ...] = ()  # of these sizes nobody knows them
    unread: tuple[str, ...] = ()  # its flags that are not simulated

    def transfer_s(self, tokens: int) -> float:
        """How long it takes to fetch so many tokens' KV."""
        blocks = -(-tokens // self.block_tokens)
        size = blocks * self.block_tokens * self.kv_token_bytes
        return self.transfer.seconds(size, blocks * self.kv_pieces)


class Engine(Protocol):
    """A worker's engine; see the module's text. A call with an unknown id does nothing."""

    model: WorkerModel

    def submit(self, job: Job, now: float) -> None:
        """Take a job in; it may be scheduled at the earliest at `now`."""

    def abort(self, job_id: str, now: float) -> None:
        """Forget a job; nothing more is told of it."""

    def release(self, job_id: str, now: float) -> None:
        """Let go of a finished prefill leg's KV: it was fetched, or never will be."""

    def next_at(self) -> float:
        """When `advance` would have something to do next; inf while nothing is under way."""

    def advance(self, now: float) -> Sequence[Event]:
        """Do all that is due at `now` or before, and tell it; after that `next_at() > now`."""

    def gauges(self, now: float) -> Gauges:
        """Tell how it fares."""

    def facts(self) -> Mapping[str, Any]:
        """Tell, when all is over, what else there is to say: JSON."""


class MakeEngine(Protocol):
    """What makes an engine: a class, or a function."""

    def __call__(self, model: WorkerModel, *, seed: int) -> Engine:
        """Make one that has nothing to do, at time 0."""


Engines: TypeAlias = Mapping[str, Engine]  # by their workers' names
