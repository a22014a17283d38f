"""What happens once, when a scheduler is made: its policies, as configured, and what they can't do.

Configuration arrives as `--additional-config '{"vllm_sched": {"long_prompt": {...}}}'`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Final

from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager

import vllm_sched
from vllm_sched.engine.seams import installed_version
from vllm_sched.errors import UsageError
from vllm_sched.policies import registry
from vllm_sched.policies.kv_cache import KvCache, KvGroup
from vllm_sched.policies.types import EngineFacts, Policy

CONFIG_KEY: Final = "vllm_sched"
# A child of vLLM's logger: its handlers and level are the ones the operator set.
logger = logging.getLogger("vllm.vllm_sched")


def configured(scheduler: Scheduler, defaults: Mapping[str, Mapping[str, object]]) -> list[Policy]:
    """Make the policies that a scheduler's configuration switches on, or its class."""
    given = _given(scheduler.vllm_config)
    facts = EngineFacts(
        max_model_len=scheduler.max_model_len,
        max_num_batched_tokens=scheduler.max_num_scheduled_tokens,
        max_num_seqs=scheduler.max_num_running_reqs,
        kv_cache=kv_cache_of(scheduler),
        cuts_prompts=bool(scheduler.scheduler_config.enable_chunked_prefill),
        pipeline_stages=scheduler.parallel_config.pipeline_parallel_size,
    )
    return registry.build({**defaults, **given}, facts)


def kv_cache_of(scheduler: Scheduler) -> KvCache:
    """Return the groups of layers that share the scheduler's blocks."""
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    # Some groups of sparse attention are in host memory.
    groups = [
        _group(scheduler, manager)
        for manager, group in zip(managers, scheduler.kv_cache_config.kv_cache_groups, strict=True)
        if not getattr(group, "host_resident", False)
    ]
    return KvCache(scheduler.cache_config.num_gpu_blocks or 0, groups)


def _group(scheduler: Scheduler, manager: SingleTypeKVCacheManager) -> KvGroup:
    spec = manager.kv_cache_spec
    spare = getattr(spec, "num_speculative_blocks", 0)
    # With the cache mode `all`, of vLLM 0.31, Mamba layers keep a state for each block.
    if getattr(spec, "mamba_cache_mode", None) == "all":
        most = -(-scheduler.max_model_len // manager.block_size) + spare
    else:
        most = -(-spec.max_memory_usage_bytes(scheduler.vllm_config) // spec.page_size_bytes)
    return KvGroup(manager.block_size, most, spare)


def check(config: VllmConfig) -> None:
    """Refuse what a configuration asks for, as far as can be said before the model loads."""
    facts = EngineFacts(
        max_model_len=config.model_config.max_model_len,
        max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
        max_num_seqs=config.scheduler_config.max_num_seqs,
        cuts_prompts=bool(config.scheduler_config.enable_chunked_prefill),
        pipeline_stages=config.parallel_config.pipeline_parallel_size,
    )
    registry.build(_given(config), facts)


def _given(config: VllmConfig) -> Mapping[str, object]:
    additional = config.additional_config
    given = additional.get(CONFIG_KEY, {}) if isinstance(additional, Mapping) else {}
    if not isinstance(given, Mapping):
        raise UsageError(f"additional_config.{CONFIG_KEY} must be an object, got {given!r}")
    return given


def refuse_unsupported(scheduler: Scheduler) -> None:
    """Refuse in a line what policies don't work with."""
    asynchronous = isinstance(scheduler, AsyncScheduler)
    name = type(scheduler).__name__
    if scheduler.scheduler_config.async_scheduling and not asynchronous:
        logger.warning(
            "%s under asynchronous scheduling leaves the device idle between steps; use %s, "
            "or add --no-async-scheduling",
            name,
            name.removeprefix("Sync"),
        )
    # Upstream's asynchronous scheduler puts placeholders where drafts belong, and where one
    # pipeline stage tells the next which token it made.
    drafts = "speculative decoding" if scheduler.num_spec_tokens else None
    by = drafts or ("pipeline parallelism" if scheduler.use_pp else None)
    if asynchronous and not scheduler.scheduler_config.async_scheduling and by:
        raise UsageError(
            f"this kind of {by} turned asynchronous scheduling off, which {name} can't "
            f"follow; add --no-async-scheduling to `vllm-sched serve`, or to `vllm serve` "
            f"--scheduler-cls vllm_sched.Sync{name}"
        )
    if scheduler.vllm_config.model_config.is_diffusion:
        raise UsageError(
            "policies don't work with diffusion models, which need vLLM's own scheduler; "
            "start without --scheduler-cls"
        )


def announce(scheduler: Scheduler, policies: Sequence[Policy]) -> None:
    """Log the policies and their resolved settings, in one line."""
    told = "; ".join(
        f"{policy.name}({', '.join(f'{k}={v}' for k, v in policy.resolved().items())})"
        for policy in policies
    )
    logger.info(
        "vllm-sched %s on vLLM %s: %s, policies: %s",
        vllm_sched.__version__,
        installed_version(),
        type(scheduler).__name__,
        told or "none",
    )
