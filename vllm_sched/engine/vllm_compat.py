"""The tested range of vLLM, and the names in vLLM that we rely on.

A missing name is refused, because an override of a renamed method would silently do nothing.
"""

from __future__ import annotations

import importlib
import inspect
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_sched.errors import UnsupportedVllmError

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler

    class UpstreamScheduler(Scheduler):
        """Either of vLLM's schedulers, to a class that comes before it."""

        max_num_scheduled_tokens: int
else:
    UpstreamScheduler = object

# As in pyproject's extras.
TESTED = ((0, 31), (0, 34))
# Tested by `make versions`; other releases are probed at start.
TESTED_RELEASES = ("0.31.0", "0.32.0", "0.33.0")
OVERRIDE = "VLLM_SCHED_ALLOW_UNTESTED"
# vLLM may shorten chunks for a drafter that reads this many tokens ahead.
MIN_LOOKAHEAD_TOKENS = 2


class UsedNames(NamedTuple):
    """The names of one of vLLM's classes that we use."""

    methods: Mapping[str, tuple[str, ...]] = {}  # with the parameters that we use
    fields: tuple[str, ...] = ()  # attributes that its constructor assigns


SCHEDULER = UsedNames(
    methods={
        "schedule": (),
        "update_from_output": ("scheduler_output",),
        "add_request": ("request",),
        "_free_request": ("request",),
        "_enqueue_waiting_request": ("request",),
        "reset_prefix_cache": (),
        "_handle_blocked_waiting_request": ("request",),
        "_reserve_prefill_lookahead": ("request", "num_computed_tokens", "num_new_tokens"),
        "_mamba_block_aligned_split": (
            "request", "num_new_tokens", "num_new_local_computed_tokens"
        ),
    },
    fields=(
        "waiting", "kv_holding_waiting", "running", "_inflight_prefills",
        "finished_recving_kv_req_ids", "max_num_active_reqs", "num_waiting_for_streaming_input",
        "lora_config", "max_num_scheduled_tokens", "current_step", "pause_state", "connector",
        "kv_cache_manager", "need_mamba_block_aligned_split", "policy", "requests",
        "num_spec_tokens", "max_model_len", "max_num_running_reqs", "block_size", "use_pp",
        "vllm_config", "scheduler_config", "cache_config", "kv_cache_config", "parallel_config",
    ),
)  # fmt: skip
KV_CACHE_MANAGER = UsedNames(
    {"prefix_cache_lookup_enabled": ("request",), "usage": ()},
    ("block_pool", "coordinator", "watermark_blocks"),
)
USED_NAMES: Mapping[str, UsedNames] = {
    "vllm.v1.core.sched.scheduler.Scheduler": SCHEDULER,
    "vllm.v1.request.Request": UsedNames(
        fields=(
            "is_prefill_chunk", "next_decode_eligible_step", "has_encoder_inputs", "mm_features",
            "lora_request", "structured_output_request", "skip_reading_prefix_cache",
            "prefill_stats",
        )
    ),
    "vllm.v1.metrics.stats.PrefillStats": UsedNames(
        {"set": ("num_prompt_tokens", "num_local_cached_tokens", "num_external_cached_tokens")}
    ),
    "vllm.v1.core.kv_cache_manager.KVCacheManager": KV_CACHE_MANAGER,
    "vllm.v1.core.kv_cache_coordinator.KVCacheCoordinator": UsedNames(
        {"find_longest_cache_hit": ("block_hashes", "max_cache_hit_length")},
        ("single_type_managers",),
    ),
    "vllm.v1.core.single_type_kv_cache_manager.SingleTypeKVCacheManager": UsedNames(
        fields=("block_size", "kv_cache_spec")
    ),
    "vllm.v1.core.block_pool.BlockPool": UsedNames({
        "cache_full_blocks": (
            "request", "blocks", "num_cached_blocks", "num_full_blocks", "block_size",
            "kv_cache_group_id",
        ),
        "reset_prefix_cache": (),
    }),
    "vllm.v1.core.block_pool.BlockHashToBlockMap": UsedNames(
        {"pop": ("key", "block_id"), "get_one_block": ("key",)}
    ),
    # The connector that would pin the blocks that it is asked about.
    "vllm.v1.simple_kv_offload.manager.SimpleCPUOffloadScheduler": UsedNames(
        fields=("block_size", "hash_block_size", "cpu_coordinator")
    ),
    "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector.MultiConnector": UsedNames(
        {"get_num_new_matched_tokens": ("request", "num_computed_tokens"), "sub_connectors": ()}
    ),
    "vllm.v1.structured_output.StructuredOutputManager": UsedNames(
        {"accept_tokens": ("request", "new_token_ids")}
    ),
    "vllm.v1.structured_output.request.StructuredOutputRequest": UsedNames(
        {"is_grammar_ready": ()}
    ),
}  # fmt: skip


def installed_version() -> str:
    import vllm

    return str(vllm.__version__)


def is_tested(version: str) -> bool:
    try:
        release = tuple(int(part) for part in version.split("+", maxsplit=1)[0].split(".")[:2])
    except ValueError:
        return False
    return TESTED[0] <= release < TESTED[1]


def missing_methods(owner: type, used: Mapping[str, tuple[str, ...]]) -> list[str]:
    missing = []
    for name, parameters in used.items():
        method: Any = getattr(owner, name, None)
        if method is None:
            missing.append(f"{owner.__name__}.{name}")
        elif parameters:
            has = inspect.signature(method).parameters
            missing += [f"{owner.__name__}.{name}({p})" for p in parameters if p not in has]
    return missing


def missing_fields(owner: type, used: Sequence[str]) -> list[str]:
    # Read from the constructor, because a scheduler takes minutes to make.
    assigned = owner.__init__.__code__.co_names  # type: ignore[misc]
    return [f"{owner.__name__}.{n}" for n in used if n not in assigned and not hasattr(owner, n)]


def missing_names() -> list[str]:
    missing = []
    for path, names in USED_NAMES.items():
        module, _, name = path.rpartition(".")
        owner = getattr(importlib.import_module(module), name)
        missing += missing_methods(owner, names.methods) + missing_fields(owner, names.fields)
    return missing


def looks_ahead(scheduler: Any, method: Any) -> bool:
    """Return whether vLLM's `_reserve_prefill_lookahead` can change a chunk."""
    from vllm.v1.core.sched.scheduler import Scheduler

    if method is not Scheduler._reserve_prefill_lookahead:  # another class overrides it
        return True
    ahead = getattr(scheduler, "num_prefill_lookahead", MIN_LOOKAHEAD_TOKENS)
    return bool(ahead >= MIN_LOOKAHEAD_TOKENS)


def require_tested_vllm() -> None:
    try:
        version = installed_version()
    except ImportError as error:
        raise UnsupportedVllmError(
            f"vLLM can't be imported ({error}); install it: pip install 'vllm-sched[vllm]' "
            "(GPU) or 'vllm-sched[cpu]'"
        ) from error
    tested = f"{'.'.join(map(str, TESTED[0]))} to {TESTED[1][0]}.{TESTED[1][1] - 1}"
    if not is_tested(version):
        if os.environ.get(OVERRIDE) != "1":
            raise UnsupportedVllmError(
                f"vLLM {version} is outside the tested range {tested}; "
                f"install one inside it, or set {OVERRIDE}=1 to try anyway"
            )
        warnings.warn(f"vLLM {version} is outside the tested range {tested}", stacklevel=2)
    try:
        missing = missing_names()
    except (ImportError, AttributeError) as error:  # a module or class is missing
        missing = [f"a module or class ({error})"]
    if missing:
        raise UnsupportedVllmError(
            f"vLLM {version} lacks {', '.join(missing)}, which the policies need; "
            f"the tested range is {tested}"
        )
