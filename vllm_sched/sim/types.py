"""Types of the simulation: worker models, jobs, events and the engine protocol.

Engines have no clock: calls pass a time `now` that never decreases. `exact_engine` steps real vLLM
schedulers, `fluid_engine` is a fast approximation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol, TypeAlias

from vllm_sched.bench.traffic.types import Piece
from vllm_sched.cost.step_time import StepTime
from vllm_sched.cost.transfer import TransferTime


class Leg(Enum):
    """The part of a request that an engine serves."""

    WHOLE = "whole"
    # The prompt and one discarded token. The KV stays in the cache until `release`.
    PREFILL = "prefill"
    # Uncached KV is fetched once there is room; the last prompt token is computed again.
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Job:
    """A request or one of its legs. Jobs with different `text` share only their pieces."""

    id: str  # unique among the jobs in an engine
    prompt_tokens: int
    output_tokens: int
    text: int = 0
    shared: tuple[Piece, ...] = ()
    leg: Leg = Leg.WHOLE
    klass: str = ""
    priority: int = 0  # as sent to workers: lower is more urgent
    extra_args: Mapping[str, object] = field(default_factory=dict, hash=False)  # `vllm_xargs`


class Event(NamedTuple):
    """An event of a job. Coarse engines combine tokens after the first into one event."""

    job_id: str
    at: float
    tokens: int = 0  # written
    finished: bool = False
    fetched: bool = False  # the KV has arrived, the prefill worker may `release` it
    cached_tokens: int = 0  # set with the first token


class Gauges(NamedTuple):
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0  # share of the cache
    backlog_tokens: float = 0.0  # prompt tokens not yet computed
    backlog_long_tokens: float = 0.0
    steps: int = 0
    fetching: int = 0  # waiting requests with a KV transfer under way


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerModel:
    name: str
    time: StepTime
    max_model_len: int
    kv_tokens: int  # cache capacity
    profile: str = ""  # source of `time`
    gpus: int = 1
    block_tokens: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    prefix_caching: bool = True
    async_scheduling: bool = True  # a step is scheduled while the previous step runs
    # vLLM's --long-prefill-token-threshold (0 = none) and its adaptive variant; exact engines only.
    longest_chunk: int = 0
    longest_chunk_adapts: bool = False
    transfers: bool = False  # serves prefill or decode legs
    front_s: float = 0.0  # HTTP and tokenizer, round trip
    policies: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    kv_token_bytes: int = 131_072  # over all layers
    kv_pieces: int = 64  # contiguous pieces per block: layers x 2
    transfer: TransferTime = field(default_factory=TransferTime)  # from another worker
    assumed: tuple[str, ...] = ()  # names of sizes with default values
    flags: tuple[str, ...] = ()  # of vLLM, that `time` holds for
    unread: tuple[str, ...] = ()  # flags and settings that are not simulated

    def transfer_s(self, tokens: int) -> float:
        blocks = -(-tokens // self.block_tokens)
        size = blocks * self.block_tokens * self.kv_token_bytes
        return self.transfer.seconds(size, blocks * self.kv_pieces)


class Engine(Protocol):
    """A worker's engine. A call with an unknown id does nothing."""

    model: WorkerModel

    def submit(self, job: Job, now: float) -> None:
        """Accept a job; the earliest schedule is at `now`."""

    def abort(self, job_id: str, now: float) -> None:
        """Drop a job without further events."""

    def release(self, job_id: str, now: float) -> None:
        """Free the KV of a finished prefill leg."""

    def next_at(self) -> float:
        """Return the time of the next event; inf while idle."""

    def advance(self, now: float) -> Sequence[Event]:
        """Simulate up to `now` and return the events; afterwards `next_at() > now`."""

    def gauges(self, now: float) -> Gauges:
        """Return the current gauges."""

    def facts(self) -> Mapping[str, Any]:
        """Return further figures after the run, as JSON values."""


MakeEngine: TypeAlias = Callable[[WorkerModel], Engine]  # idle, at time 0
Engines: TypeAlias = Mapping[str, Engine]  # by worker name
