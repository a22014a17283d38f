"""A real scheduler in virtual time: vLLM's objects and our policies, without a model.

    engine = SimulatedEngine(EngineSettings(...))
    engine.add(NewRequest("a", 1000, 50), now)
    step = engine.schedule(now)          # what it computes; None if there is nothing to do
    ... engine.finish(step, later)       # its result: tokens of each request

Scheduler, block manager and prefix cache are vLLM's. In place of the model, each complete prompt
gets a token. The caller decides how long steps take and passes the time. It names KV blocks, so
that no token is hashed.
"""

from __future__ import annotations

import copy
import functools
import json
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from vllm_sched.cost.step_time import StepShape
from vllm_sched.engine.in_flight import ScheduledStep, chunks_of
from vllm_sched.engine.policy_setup import CONFIG_KEY
from vllm_sched.engine.scheduler import PolicyScheduler, SyncPolicyScheduler
from vllm_sched.engine.simulated_transfer import REMOTE_DECODE, REMOTE_PREFILL
from vllm_sched.engine.trace import EngineTrace

TOKEN = 7
# Above any max_model_len that a worker may set.
MAX_CONTEXT_TOKENS = 1 << 24
# A minimal model configuration. Nothing is computed.
MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128,
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1,
    "num_key_value_heads": 1, "max_position_embeddings": MAX_CONTEXT_TOKENS,
    "torch_dtype": "float32",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    max_model_len: int
    kv_tokens: int
    block_tokens: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    prefix_caching: bool = True
    async_scheduling: bool = True
    longest_chunk: int = 0  # --long-prefill-token-threshold
    longest_chunk_adapts: bool = False  # --long-prefill-token-threshold-adaptive
    transfers: bool = False  # with KV transfers from and to other workers
    policies: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NewRequest:
    id: str
    prompt_tokens: int
    output_tokens: int
    # Names the text up to its n-th token. Without it the text is unique.
    name_of: Callable[[int], bytes] | None = None
    extra_args: Mapping[str, object] = field(default_factory=dict)
    priority: int = 0
    remote_prefill: bool = False
    remote_decode: bool = False


class RequestResult(NamedTuple):
    id: str
    tokens: int
    finished: bool
    cached_tokens: int  # of the prompt, with the first token


class SimulatedStep(NamedTuple):
    scheduled: ScheduledStep
    shape: StepShape
    model_output: ModelRunnerOutput

    @property
    def output(self) -> SchedulerOutput:
        return self.scheduled.output


class _VirtualClock:
    """A scheduler's clock, set by the caller."""

    now = 0.0

    def clock(self) -> float:
        return self.now

    def wall_clock(self) -> float:
        return self.now


class _AsyncScheduler(_VirtualClock, PolicyScheduler): ...


class _SyncScheduler(_VirtualClock, SyncPolicyScheduler): ...


@functools.cache
def _base_config() -> VllmConfig:
    """Return a checked configuration; the check is slow."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        config = VllmConfig(
            model_config=ModelConfig(model=folder, skip_tokenizer_init=True, dtype="float32"),
            scheduler_config=SchedulerConfig.default_factory(),
            cache_config=CacheConfig(block_size=16),
        )
    register_all_kvcache_specs(config)
    return config


def _config(settings: EngineSettings) -> VllmConfig:
    config = copy.copy(_base_config())
    config.model_config = copy.copy(config.model_config)
    config.model_config.max_model_len = settings.max_model_len
    config.cache_config = copy.copy(config.cache_config)
    config.cache_config.block_size = settings.block_tokens
    config.cache_config.enable_prefix_caching = settings.prefix_caching
    config.cache_config.num_gpu_blocks = settings.kv_tokens // settings.block_tokens
    config.additional_config = {CONFIG_KEY: {k: dict(v) for k, v in settings.policies.items()}}
    config.scheduler_config = SchedulerConfig(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=settings.max_model_len,
        enable_chunked_prefill=True,
        async_scheduling=settings.async_scheduling,
        is_encoder_decoder=False,
        long_prefill_token_threshold=settings.longest_chunk,
        long_prefill_token_threshold_adaptive=settings.longest_chunk_adapts,
    )
    if settings.transfers:
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="SimulatedConnector",
            kv_connector_module_path="vllm_sched.engine.simulated_transfer",
            kv_role="kv_both",
        )
    return config


class SimulatedEngine:
    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        config = _config(settings)
        size = settings.block_tokens
        spec = FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=1, dtype=torch.float32)
        self.scheduler: Any = (_AsyncScheduler if settings.async_scheduling else _SyncScheduler)(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=config.cache_config.num_gpu_blocks,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=size,
        )
        self.scheduler._telemetry = None  # telemetry is for real engines
        self.trace: EngineTrace | None = None
        self.preemptions = 0
        self._last_result_at = 0.0

    def add(self, new: NewRequest, now: float) -> None:
        self.scheduler.now = now
        extra: dict[str, Any] = dict(new.extra_args)
        if new.remote_prefill or new.remote_decode:
            extra["kv_transfer_params"] = {
                REMOTE_PREFILL: new.remote_prefill,
                REMOTE_DECODE: new.remote_decode,
            }
        sampling = SamplingParams(
            ignore_eos=True, max_tokens=new.output_tokens, extra_args=extra or None
        )
        sampling.update_from_generation_config({}, eos_token_id=1)
        request = Request(
            request_id=new.id,
            prompt_token_ids=[TOKEN] * new.prompt_tokens,
            sampling_params=sampling,
            pooling_params=None,
            arrival_time=now,
            priority=new.priority,
            block_hasher=self._block_hasher(new),
        )
        self.scheduler.add_request(request)
        if self.trace is not None:
            self.trace.record_arrival(now, new.id, new.prompt_tokens)

    def _block_hasher(self, new: NewRequest) -> Callable[[Request], list[Any]] | None:
        if not self.settings.prefix_caching:
            return None

        def unique_name(end: int) -> bytes:
            return f"{new.id}/{end}".encode()

        return _block_namer(self.settings.block_tokens, new.name_of or unique_name)

    def abort(self, ids: Iterable[str], now: float) -> None:
        """Abort requests; unknown ones are ignored."""
        self.scheduler.now = now
        self.scheduler.finish_requests(list(ids), RequestStatus.FINISHED_ABORTED)

    def schedule(self, now: float) -> SimulatedStep | None:
        """Schedule a step; return None for an empty step."""
        scheduler = self.scheduler
        scheduler.now = now
        num_running = len(scheduler.running)
        prefills = [r for r in scheduler.running if r.is_prefill_chunk]
        output = scheduler.schedule()
        self.preemptions += len(output.preempted_req_ids or ())
        tokens = output.num_scheduled_tokens
        if not tokens:
            scheduler.update_from_output(output, _model_output(output, scheduler.requests))
            return None
        prefills += scheduler.running[num_running:]
        requests = scheduler.requests
        chunks = chunks_of(prefills, tokens)
        contexts = [requests[name].num_computed_tokens for name in tokens if name not in chunks]
        budget = scheduler.max_num_scheduled_tokens
        scheduled = ScheduledStep.of(
            scheduler, output, chunks, at=now, budget=budget, context_tokens=sum(contexts)
        )
        return SimulatedStep(scheduled, scheduled.shape, _model_output(output, requests))

    def finish(self, step: SimulatedStep, now: float) -> list[RequestResult]:
        self.scheduler.now = now
        if self.trace is not None:
            start = max(step.scheduled.scheduled_at, self._last_result_at)
            self.trace.record_step(step.scheduled.traced(start, now))
        self._last_result_at = now
        outputs = self.scheduler.update_from_output(step.output, step.model_output)
        return [
            RequestResult(
                output.request_id,
                len(output.new_token_ids),
                output.finish_reason is not None,
                output.prefill_stats.num_cached_tokens if output.prefill_stats else 0,
            )
            for client_outputs in outputs.values()
            for output in client_outputs.outputs
        ]

    def pop_fetches(self) -> dict[str, int]:
        """Return the tokens of new fetches, by request."""
        connector = self.scheduler.connector
        if connector is None or not connector.new_fetches:
            return {}
        new_fetches: dict[str, int] = connector.new_fetches
        connector.new_fetches = {}
        return new_fetches

    def report_transfers(self, fetched: Iterable[str], released: Iterable[str], now: float) -> None:
        scheduler = self.scheduler
        scheduler.now = now
        output = SchedulerOutput.make_empty()
        model_output = _model_output(output, {})
        model_output.kv_connector_output = KVConnectorOutput(
            finished_recving={name for name in fetched if name in scheduler.requests},
            finished_sending={name for name in released if name in scheduler.requests},
        )
        scheduler.update_from_output(output, model_output)

    @property
    def num_unfinished(self) -> int:
        return int(self.scheduler.get_num_unfinished_requests())

    @property
    def kv_usage(self) -> float:
        return float(self.scheduler.kv_cache_manager.usage)

    @property
    def num_running(self) -> int:
        return len(self.scheduler.running)

    @property
    def num_waiting(self) -> int:
        return self.num_unfinished - self.num_running

    @property
    def num_deferred(self) -> int:
        """Return the requests that wait for KV or the like, not for room."""
        return len(self.scheduler.deferred_waiting)

    def backlog(self) -> int:
        """Return the prompt tokens still to compute."""
        scheduler = self.scheduler
        requests: Sequence[Request] = [
            *(r for r in scheduler.running if r.is_prefill_chunk),
            *scheduler.waiting,
        ]
        return sum(r.num_prompt_tokens - r.num_computed_tokens for r in requests)

    def policy_counters(self) -> dict[str, dict[str, float]]:
        return {policy.name: dict(policy.counters()) for policy in self.scheduler._policies}


def _model_output(output: SchedulerOutput, requests: Mapping[str, Request]) -> ModelRunnerOutput:
    """Return a token for each complete prompt, right after scheduling."""
    ids = list(output.num_scheduled_tokens)
    return ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
        sampled_token_ids=[[] if requests[i].is_prefill_chunk else [TOKEN] for i in ids],
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )


def _block_namer(
    block_tokens: int, name_of: Callable[[int], bytes]
) -> Callable[[Request], list[Any]]:

    def names(request: Request) -> list[Any]:
        first = len(request.block_hashes) + 1
        last = request.num_tokens // block_tokens
        return [name_of(number * block_tokens) for number in range(first, last + 1)]

    return names
