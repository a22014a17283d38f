"""Extensions of vLLM's start: checks before the model loads, and a compilation for logprobs.

vLLM calls `load` in each of its processes (entry point `vllm.general_plugins`); `server` calls
`register`.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import Any, Final

import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.executor.abstract import Executor
from vllm.v1.sample.sampler import Sampler

from vllm_sched.engine import behaviour_checks, policy_setup, vllm_compat
from vllm_sched.engine.scheduler import PolicyMixin
from vllm_sched.engine.vllm_compat import installed_version
from vllm_sched.errors import UnsupportedVllmError, UsageError

logger = logging.getLogger("vllm.vllm_sched")

WARM_UP_VARIABLE: Final = "VLLM_SCHED_WARM_UP"
EXTENDED: Final = "_extended_by_vllm_sched"


def load() -> None:
    try:
        register()
    except UnsupportedVllmError as error:
        logger.warning(
            "vllm-sched does not check the configuration before the model loads: %s", error
        )


def register() -> None:
    """Extend vLLM's functions in this process, once."""
    _extend(EngineArgs, "create_engine_config", _with_check)
    _extend(Executor, "compile_or_warm_up_model", _with_logprobs)


def _extend(owner: type, name: str, extension: Callable[[Any], Any]) -> None:
    upstream = getattr(owner, name, None)
    if upstream is None:
        raise UnsupportedVllmError(
            f"vLLM {installed_version()} lacks {owner.__name__}.{name}, which `vllm-sched serve` "
            "extends; use one of the tested range, or `vllm serve` with --scheduler-cls"
        )
    if not hasattr(upstream, EXTENDED):
        extended = functools.wraps(upstream)(extension(upstream))
        setattr(extended, EXTENDED, True)
        setattr(owner, name, extended)


def policy_scheduler_class(config: VllmConfig) -> type[Scheduler] | None:
    """Return the configured scheduler class if it is one with policies, else None."""
    scheduler_class: Any = config.scheduler_config.scheduler_cls
    if isinstance(scheduler_class, str):
        if scheduler_class.startswith("vllm."):
            return None
        scheduler_class = resolve_obj_by_qualname(scheduler_class)
    is_ours = isinstance(scheduler_class, type) and issubclass(scheduler_class, PolicyMixin)
    return scheduler_class if is_ours else None


def _with_check(upstream: Callable[..., VllmConfig]) -> Callable[..., VllmConfig]:
    def create_engine_config(*args: Any, **kwargs: Any) -> VllmConfig:
        config = upstream(*args, **kwargs)
        scheduler_class = policy_scheduler_class(config)
        policy_setup.check_configuration(config, scheduler_class)
        release = installed_version().split("+", maxsplit=1)[0]
        if scheduler_class is not None and release not in vllm_compat.TESTED_RELEASES:
            behaviour_checks.require_known_behaviour()
        compiles_logprobs(config)  # to refuse a wrong setting
        return config

    return create_engine_config


def compiles_logprobs(config: VllmConfig) -> bool:
    """Return whether the engine compiles for logprobs before it is ready."""
    setting = os.environ.get(WARM_UP_VARIABLE)
    if setting not in (None, "0", "1"):
        raise UsageError(
            f"{WARM_UP_VARIABLE}={setting!r} must be 0 or 1; correct it or leave it out"
        )
    if config.model_config.runner_type != "generate":  # a pooling model has no logprobs
        return False
    return setting == "1" or (setting is None and policy_scheduler_class(config) is not None)


def _with_logprobs(upstream: Callable[..., Any]) -> Callable[..., Any]:
    def compile_or_warm_up_model(executor: Executor, *args: Any, **kwargs: Any) -> Any:
        result = upstream(executor, *args, **kwargs)
        if compiles_logprobs(executor.vllm_config):
            executor.collective_rpc(compile_logprobs)
        return result

    return compile_or_warm_up_model


def compile_logprobs(worker: Any) -> None:
    """Compute the logprobs of one token in a worker process.

    vLLM compiles this at the first call, for up to 20 s without tokens.
    """
    sampler = getattr(worker.model_runner, "sampler", None)
    if not isinstance(sampler, Sampler):  # other samplers compile nothing for logprobs
        return
    try:
        with torch.inference_mode():  # as in a step, to compile for the same mode
            logits = torch.zeros(1, worker.model_config.get_vocab_size(), device=worker.device)
            token = torch.zeros(1, dtype=torch.int64, device=worker.device)
            sampler.gather_logprobs(sampler.compute_logprobs(logits), 1, token)
    except Exception:  # the engine can serve without
        logger.warning("could not compile for logprobs before serving", exc_info=True)
