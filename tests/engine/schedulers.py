"""Real vLLM scheduler objects without a model runner, and fake model output."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    KVTransferConfig,
    LoRAConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from vllm_sched import PolicyScheduler
from vllm_sched.workers.tiny_model import tiny_model

BLOCK = 16
SIMULATED = "vllm_sched.engine.simulated_transfer"
_ids = itertools.count()


@functools.cache
def base_config() -> VllmConfig:
    """Return the checked model configuration; the check is slow, so it runs once."""
    config = VllmConfig(
        model_config=ModelConfig(
            model=str(tiny_model()), skip_tokenizer_init=True, dtype="float32"
        ),
        scheduler_config=SchedulerConfig.default_factory(),
        cache_config=CacheConfig(block_size=BLOCK, gpu_memory_utilization=0.9, cache_dtype="auto"),
    )
    register_all_kvcache_specs(config)
    return config


def full_attention(block: int = BLOCK) -> KVCacheSpec:
    """Return a group of layers that keep every token."""
    return FullAttentionSpec(block_size=block, num_kv_heads=1, head_size=1, dtype=torch.float32)


def sliding_window(window: int, block: int = BLOCK) -> KVCacheSpec:
    """Return a group of layers that keep the last tokens."""
    return SlidingWindowSpec(
        block_size=block, num_kv_heads=1, head_size=1, dtype=torch.float32, sliding_window=window
    )


def mamba(block: int, drafts: int = 0) -> KVCacheSpec:
    """Return a group of Mamba layers that keep their state at block boundaries."""
    return MambaSpec(
        block_size=block,
        shapes=((1,),),
        dtypes=(torch.float32,),
        mamba_cache_mode="align",
        num_speculative_blocks=drafts,
    )


def tensor_of(spec: KVCacheSpec, num_blocks: int) -> KVCacheTensor:
    page = spec.page_size_bytes
    return KVCacheTensor(
        size=num_blocks * page, layers=["layer 0"], layer_stride=0, block_stride=page
    )


def make_scheduler(
    policies: Mapping[str, Mapping[str, object]] | None = None,
    *,
    scheduler_cls: type = PolicyScheduler,
    budget: int = 64,
    max_model_len: int = 2000,
    max_num_seqs: int = 16,
    num_blocks: int = 2_500,
    async_scheduling: bool = False,
    priority: bool = False,
    prefix_caching: bool = False,
    chunked_prefill: bool = True,
    max_loras: int = 0,
    connector: str | Mapping[str, Any] | None = None,
    groups: Sequence[KVCacheSpec] = (),
    **scheduler_options: Any,
) -> Any:
    """Return a scheduler as the engine creates it, with this number of KV blocks of 16 tokens.

    `connector` names a class in `vllm_sched.engine.simulated_transfer`, or is the whole transfer
    configuration. The KV cache has one full-attention group, or the given groups, all of one block
    size.
    """
    groups = groups or (full_attention(),)
    block = groups[0].block_size
    config = copy.copy(base_config())
    config.model_config = copy.copy(config.model_config)
    config.model_config.max_model_len = max_model_len
    config.cache_config = copy.copy(config.cache_config)
    config.cache_config.enable_prefix_caching = prefix_caching
    config.cache_config.num_gpu_blocks = num_blocks
    config.cache_config.block_size = block
    if any(isinstance(group, MambaSpec) for group in groups):
        config.cache_config.mamba_cache_mode = "align"
    config.additional_config = {} if policies is None else {"vllm_sched": dict(policies)}
    config.scheduler_config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=max_model_len,
        enable_chunked_prefill=chunked_prefill,
        async_scheduling=async_scheduling,
        is_encoder_decoder=False,
        watermark=0.0,
        policy="priority" if priority else "fcfs",
        **scheduler_options,
    )
    if max_loras:
        config.lora_config = LoRAConfig(max_loras=max_loras)
    if connector is not None:
        if isinstance(connector, str):
            connector = {"kv_connector": connector, "kv_connector_module_path": SIMULATED}
        config.kv_transfer_config = KVTransferConfig(**{"kv_role": "kv_both", **connector})
    return scheduler_cls(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[] if connector is None else [tensor_of(groups[0], num_blocks)],
            kv_cache_groups=[
                KVCacheGroupSpec([f"layer {number}"], spec) for number, spec in enumerate(groups)
            ],
        ),
        log_stats=True,
        structured_output_manager=StructuredOutputManager(config),
        block_size=block,
    )


@functools.cache
def hasher(block: int = BLOCK) -> Any:
    init_none_hash(sha256)
    return get_request_block_hasher(block, sha256)


def make_request(
    tokens: int | Sequence[int],
    *,
    output: int = 16,
    name: str | None = None,
    priority: int = 0,
    arrival: float | None = None,
    hashed: bool = True,
    adapter: int = 0,
    salt: str | None = None,
    grammar: Future[Any] | None = None,
    block: int = BLOCK,
    **parameters: Any,
) -> Request:
    """Return a request with a unique prompt of this length, or with these tokens.

    Without hashes it is created faster, for tests without caching. `adapter` is the number of a
    LoRA adapter, 0 for none. A request with a `grammar` waits until it is compiled. `parameters`
    are more sampling parameters.
    """
    number = next(_ids)
    # The first token is unique, so that generated prompts share no prefix.
    prompt = [number, *[5] * (tokens - 1)] if isinstance(tokens, int) else list(tokens)
    sampling = SamplingParams(
        ignore_eos=True,
        max_tokens=output,
        structured_outputs=None if grammar is None else StructuredOutputsParams(regex="a"),
        **parameters,
    )
    sampling.update_from_generation_config({}, eos_token_id=1)
    request = Request(
        request_id=name or f"r{number}",
        prompt_token_ids=prompt,
        sampling_params=sampling,
        pooling_params=None,
        arrival_time=float(number) if arrival is None else arrival,
        priority=priority,
        block_hasher=hasher(block) if hashed else None,
        lora_request=LoRARequest(f"adapter{adapter}", adapter, "/none") if adapter else None,
        cache_salt=salt,
    )
    if grammar is not None:
        assert request.structured_output_request is not None
        request.structured_output_request.grammar = grammar
    return request


def answer(scheduler: Any, output: SchedulerOutput) -> ModelRunnerOutput:
    """Return the model's output: a token for each request whose prompt is complete.

    Every other drafted token is accepted. Call it right after `schedule()`.
    """
    ids = list(output.num_scheduled_tokens)
    drafted = output.scheduled_spec_decode_tokens
    taken = {i: 1 + len(drafted.get(i, ())) // 2 for i in ids}
    return ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
        sampled_token_ids=[
            [] if scheduler.requests[i].is_prefill_chunk else [7] * taken[i] for i in ids
        ],
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )


def step(scheduler: Any) -> dict[str, int]:
    """Run one step to its end and return the tokens that each request got."""
    output = scheduler.schedule()
    scheduler.update_from_output(output, answer(scheduler, output))
    return dict(output.num_scheduled_tokens)


def until(
    scheduler: Any,
    over: Callable[[], object],
    max_steps: int = 10_000,
    run: Callable[[Any], dict[str, int]] = step,
) -> dict[str, int]:
    """Run steps until `over()` is true; return the last step's tokens."""
    tokens: dict[str, int] = {}
    for _ in range(max_steps):
        if over():
            return tokens
        tokens = run(scheduler)
    raise AssertionError(f"the condition was never true in {max_steps} steps")


def drain(scheduler: Any, max_steps: int = 10_000) -> int:
    for count in range(max_steps):
        if not scheduler.has_unfinished_requests():
            return count
        step(scheduler)
    raise AssertionError(f"{scheduler.get_num_unfinished_requests()} requests never finished")
