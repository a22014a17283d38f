"""A scheduler that publishes its journal. A failure turns the journal off, and the engine goes on.

The engine holds the journal's lock during a step, so that a snapshot shows whole steps only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import Request

from vllm_sched.engine import policy_setup
from vllm_sched.engine.journal.journal import NO_TOKENS, Journal
from vllm_sched.engine.journal.journal_requests import JournalRequests
from vllm_sched.engine.journal.publisher import Publisher, read_key
from vllm_sched.engine.journal.resident_prefixes import ResidentPrefixes
from vllm_sched.engine.vllm_compat import UpstreamScheduler

logger = logging.getLogger("vllm.vllm_sched")


class JournalMixin(UpstreamScheduler):
    """Publishes what the scheduler after this class does."""

    # vLLM's tests make schedulers without `__init__`.
    _publisher: Publisher | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = policy_setup.journal_settings(self.vllm_config)
        if settings is None:
            return
        endpoint = settings.endpoint_of(self.parallel_config.data_parallel_index)
        self._publisher = Publisher(endpoint, read_key(settings.key_file), journal_of(self))
        logger.info("the journal is published on %s", endpoint)
        if not settings.is_local and settings.key_file is None:
            logger.warning(
                "other machines may reach the journal on %s, and nothing signs it; "
                "set journal.key_file",
                endpoint,
            )

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        if (publisher := self._publisher) is None:
            return super().schedule(*args, **kwargs)
        with publisher.lock:
            output = super().schedule(*args, **kwargs)
            self._record_in_journal(publisher.journal.record_schedule, output)
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any
    ) -> Any:
        if (publisher := self._publisher) is None:
            return super().update_from_output(scheduler_output, *args, **kwargs)
        with publisher.lock:
            outputs = super().update_from_output(scheduler_output, *args, **kwargs)
            self._record_in_journal(publisher.publish_step, outputs)
        return outputs

    def add_request(self, request: Request) -> None:
        if (publisher := self._publisher) is not None:
            with publisher.lock:
                self._record_in_journal(publisher.journal.record_arrival, request)
        super().add_request(request)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        if (publisher := self._publisher) is not None:
            with publisher.lock:
                self._record_in_journal(publisher.journal.record_end, request)
        return super()._free_request(request, *args, **kwargs)

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        with nullcontext() if self._publisher is None else self._publisher.lock:
            done: bool = super().reset_prefix_cache(*args, **kwargs)
        return done

    def shutdown(self) -> None:
        if self._publisher is not None:
            self._publisher.close()
        super().shutdown()

    def _record_in_journal(self, record: Callable[..., object], *args: object) -> None:
        try:
            record(*args)
        except Exception as error:
            logger.exception("the journal is off after an error; please report it")
            if self._publisher is not None:
                self._publisher.journal.unfollow(error)
                self._publisher.stop()
                self._publisher = None


def journal_of(scheduler: Scheduler) -> Journal:
    """Return a journal that follows the scheduler's KV cache."""
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    full = [isinstance(manager.kv_cache_spec, FullAttentionSpec) for manager in managers]
    group = full.index(True) if True in full else 0
    block_tokens = managers[group].block_size
    requests = JournalRequests()
    prefixes = None
    if scheduler.cache_config.enable_prefix_caching:
        pool = scheduler.kv_cache_manager.block_pool
        prefixes = ResidentPrefixes(pool, group, block_tokens, requests)
    continued = getattr(scheduler, "_continued", None)
    first_tokens = NO_TOKENS if continued is None else continued.returned
    return Journal(requests, prefixes, block_tokens, first_tokens)
