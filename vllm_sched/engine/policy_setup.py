"""The policies of an engine, and the configurations that they do not support.

Configuration arrives as `--additional-config '{"vllm_sched": {"long_prompt": {...}}}'`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager

from vllm_sched.engine.vllm_compat import installed_version
from vllm_sched.errors import UsageError
from vllm_sched.policies import registry
from vllm_sched.policies.journal_settings import JournalSettings
from vllm_sched.policies.kv_cache import KvCache, KvGroup
from vllm_sched.policies.types import EngineFacts, Policy
from vllm_sched.version import __version__

CONFIG_KEY: Final = "vllm_sched"
# Why policies contradict `prefill_schedule_interval`: while requests decode, only every n-th step
# computes prompts.
INTERVAL_CONFLICTS: Final[Mapping[str, str]] = {
    "prefill_first": "the policy pauses decodes in steps in which vLLM holds prompts, so that "
    "nothing is computed in them",
    "deferred_prefill": "both say when prompts enter, and their waits add up",
}
# A child of vLLM's logger, to inherit the operator's handlers and level.
logger = logging.getLogger("vllm.vllm_sched")


def configured_policies(
    scheduler: Scheduler, defaults: Mapping[str, Mapping[str, object]]
) -> list[Policy]:
    """Return the policies of the configuration, or of the scheduler's class."""
    settings = _with_defaults(_configured_settings(scheduler.vllm_config), defaults)
    if not settings:
        return []
    facts = EngineFacts(
        max_model_len=scheduler.max_model_len,
        max_num_batched_tokens=scheduler.max_num_scheduled_tokens,
        max_num_seqs=scheduler.max_num_running_reqs,
        kv_cache=kv_cache_of(scheduler),
        chunked_prefill=bool(scheduler.scheduler_config.enable_chunked_prefill),
        pipeline_stages=scheduler.parallel_config.pipeline_parallel_size,
        orders_by_priority=scheduler.policy == SchedulingPolicy.PRIORITY,
    )
    for warning in registry.former_setting_warnings(settings):
        logger.warning("%s", warning)
    return registry.build(settings, facts)


def kv_cache_of(scheduler: Scheduler) -> KvCache:
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    # Sparse attention may have groups in host memory.
    groups = [
        _kv_group(scheduler, manager)
        for manager, group in zip(managers, scheduler.kv_cache_config.kv_cache_groups, strict=True)
        if not getattr(group, "host_resident", False)
    ]
    return KvCache(scheduler.cache_config.num_gpu_blocks or 0, groups)


def _kv_group(scheduler: Scheduler, manager: SingleTypeKVCacheManager) -> KvGroup:
    spec = manager.kv_cache_spec
    draft_blocks = getattr(spec, "num_speculative_blocks", 0)
    # With the cache mode `all` (vLLM 0.31), Mamba layers keep a state for each block.
    if getattr(spec, "mamba_cache_mode", None) == "all":
        max_blocks = -(-scheduler.max_model_len // manager.block_size) + draft_blocks
    else:
        max_blocks = -(-spec.max_memory_usage_bytes(scheduler.vllm_config) // spec.page_size_bytes)
    return KvGroup(manager.block_size, max_blocks, draft_blocks)


def check_configuration(config: VllmConfig, scheduler_class: type[Scheduler] | None = None) -> None:
    """Refuse an unsupported configuration; `scheduler_class` is ours, if one is used."""
    facts = EngineFacts(
        max_model_len=config.model_config.max_model_len,
        max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
        max_num_seqs=config.scheduler_config.max_num_seqs,
        chunked_prefill=bool(config.scheduler_config.enable_chunked_prefill),
        pipeline_stages=config.parallel_config.pipeline_parallel_size,
    )
    defaults = getattr(scheduler_class, "default_policies", {})
    settings = _configured_settings(config)
    policies = registry.build(_with_defaults(settings, defaults), facts)
    if scheduler_class is None:
        if settings:
            logger.warning(
                "additional_config.%s has no effect with vLLM's own scheduler; "
                "add --scheduler-cls vllm_sched.PolicyScheduler, or leave the key out",
                CONFIG_KEY,
            )
    elif policies:
        refuse_unsupported(config, scheduler_class, policies)


def journal_settings(config: VllmConfig) -> JournalSettings | None:
    block = _configured_settings(config).get(registry.JOURNAL)
    settings = None if block is None else registry.settings_of(registry.JOURNAL, block)
    return settings if isinstance(settings, JournalSettings) else None


def _configured_settings(config: VllmConfig) -> Mapping[str, object]:
    additional = config.additional_config
    block = additional.get(CONFIG_KEY, {}) if isinstance(additional, Mapping) else {}
    if not isinstance(block, Mapping):
        raise UsageError(f"additional_config.{CONFIG_KEY} must be an object, got {block!r}")
    return block


def _with_defaults(
    settings: Mapping[str, Any], defaults: Mapping[str, Mapping[str, object]]
) -> Mapping[str, Any]:
    """Add the policies of the scheduler's class, which the configuration need not name."""
    added = {name: block for name, block in defaults.items() if name not in settings}
    policies = {**added, **settings}
    for first, second, reason in registry.conflicts_of(policies):
        if first in settings and second in settings:
            continue  # refused without the class, too
        name, other = (first, second) if first in added else (second, first)
        raise UsageError(
            f"policy {other} contradicts {name}, which the scheduler class adds: {reason}; "
            "use PolicyScheduler, or SyncPolicyScheduler"
        )
    return policies


def refuse_unsupported(
    config: VllmConfig, scheduler_class: type[Scheduler], policies: Sequence[Policy]
) -> None:
    if config.model_config.is_diffusion:
        raise UsageError(
            "policies don't work with diffusion models, which need vLLM's own scheduler; "
            "start without --scheduler-cls"
        )
    cause = _cause_of_synchronous_scheduling(config)
    if cause is not None and issubclass(scheduler_class, AsyncScheduler):
        name = scheduler_class.__name__
        raise UsageError(
            f"this kind of {cause} turned asynchronous scheduling off, which {name} can't "
            f"follow; add --no-async-scheduling to `vllm-sched serve`, or to `vllm serve` "
            f"--scheduler-cls vllm_sched.Sync{name}"
        )
    interval = config.scheduler_config.prefill_schedule_interval
    for policy in policies:
        if interval > 1 and (why := INTERVAL_CONFLICTS.get(policy.name)):
            raise UsageError(
                f"policy {policy.name} contradicts --prefill-schedule-interval {interval}: {why}; "
                "leave one of them out"
            )


def _cause_of_synchronous_scheduling(config: VllmConfig) -> str | None:
    """Return what turned asynchronous scheduling off, if an asynchronous scheduler would fail.

    It has placeholders for drafts, and for tokens between pipeline stages.
    """
    if config.scheduler_config.async_scheduling:
        return None
    if config.num_speculative_tokens:
        return "speculative decoding"
    return "pipeline parallelism" if config.parallel_config.pipeline_parallel_size > 1 else None


def warn_of_idle_device(scheduler: Scheduler) -> None:
    asynchronous = scheduler.scheduler_config.async_scheduling
    if asynchronous and not isinstance(scheduler, AsyncScheduler):
        name = type(scheduler).__name__
        logger.warning(
            "%s under asynchronous scheduling leaves the device idle between steps; use %s, "
            "or add --no-async-scheduling",
            name,
            name.removeprefix("Sync"),
        )


def log_policies(scheduler: Scheduler, policies: Sequence[Policy]) -> None:
    listed = "; ".join(
        f"{policy.name}({', '.join(f'{k}={v}' for k, v in policy.effective_settings().items())})"
        for policy in policies
    )
    logger.info(
        "vllm-sched %s on vLLM %s: %s, policies: %s",
        __version__,
        installed_version(),
        type(scheduler).__name__,
        listed or "none",
    )
