"""Behaviours of vLLM's scheduler that policies rely on, tried on a scheduler without a model.

The tests run every check, and an engine of an untested release before the model loads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue
from vllm.v1.request import RequestStatus

from vllm_sched.engine.simulated import EngineSettings, NewRequest, SimulatedEngine
from vllm_sched.engine.vllm_compat import installed_version
from vllm_sched.errors import UnsupportedVllmError

BUDGET: Final = 64
logger = logging.getLogger("vllm.vllm_sched")


class CheckedEngine(SimulatedEngine):
    def __init__(self, kv_tokens: int = 4096) -> None:
        super().__init__(
            EngineSettings(
                max_model_len=1024,
                kv_tokens=kv_tokens,
                max_num_batched_tokens=BUDGET,
                max_num_seqs=8,
                prefix_caching=False,
                async_scheduling=False,
            )
        )
        self.now = 0.0

    def add_prompts(self, *prompts: tuple[str, int, int]) -> None:
        """Add requests: name, tokens, priority."""
        for name, tokens, priority in prompts:
            self.add(NewRequest(name, tokens, 400, priority=priority), self.now)

    def step(self) -> dict[str, int]:
        self.now += 1
        step = self.schedule(self.now)
        if step is None:
            return {}
        self.finish(step, self.now)
        return dict(step.output.num_scheduled_tokens)


def budget_is_read_in_every_step() -> bool:
    engine = CheckedEngine()
    engine.add_prompts(("a", 200, 0))
    engine.scheduler.max_num_scheduled_tokens = 10
    first = engine.step()
    engine.scheduler.max_num_scheduled_tokens = BUDGET
    return [first, engine.step()] == [{"a": 10}, {"a": BUDGET}]


def lookahead_has_the_last_word() -> bool:
    """`_reserve_prefill_lookahead` decides the size of a chunk, waiting or running."""
    engine = CheckedEngine()
    engine.add_prompts(("a", 200, 0))
    engine.scheduler._reserve_prefill_lookahead = lambda _request, _computed, tokens: min(tokens, 9)
    return [engine.step(), engine.step()] == [{"a": 9}, {"a": 9}]


def request_without_tokens_stays_first() -> bool:
    """Keep a request without tokens in front, without blocks."""
    engine = CheckedEngine()
    engine.add_prompts(("a", 20, 0), ("b", 20, 0))
    scheduler: Any = engine.scheduler
    upstream = scheduler._reserve_prefill_lookahead
    scheduler._reserve_prefill_lookahead = lambda request, computed, tokens: (
        0 if request.request_id == "a" else upstream(request, computed, tokens)
    )
    engine.step()
    waits = scheduler.waiting.peek_request().request_id == "a"
    blocks = scheduler.kv_cache_manager.get_blocks("a").get_block_ids()
    scheduler._reserve_prefill_lookahead = upstream
    return waits and not any(blocks) and engine.step().get("a") == 20


def running_is_served_in_order() -> bool:
    engine = CheckedEngine()
    engine.add_prompts(("a", 200, 0))
    engine.scheduler._reserve_prefill_lookahead = lambda _request, _computed, tokens: min(tokens, 9)
    engine.step()
    engine.add_prompts(("b", 200, 0))
    engine.step()
    del engine.scheduler._reserve_prefill_lookahead
    engine.scheduler.running.reverse()
    return engine.step() == {"b": BUDGET}


def decode_is_left_out_of_one_step() -> bool:
    """`next_decode_eligible_step` leaves a request out until that step."""
    engine = CheckedEngine()
    engine.add_prompts(("a", 10, 0))
    engine.step()
    scheduler: Any = engine.scheduler
    scheduler.requests["a"].next_decode_eligible_step = scheduler.current_step + 2
    return [engine.step(), engine.step()] == [{}, {"a": 1}]


def last_of_running_is_preempted() -> bool:
    engine = _filled(SchedulingPolicy.FCFS)
    return [r.request_id for r in engine.scheduler.running] == ["a"]


def preempted_request_of_a_low_priority_waits() -> bool:
    engine = _filled(SchedulingPolicy.PRIORITY)
    waiting = [r.request_id for r in engine.scheduler.waiting]
    return [r.request_id for r in engine.scheduler.running] == ["b"] and waiting == ["a"]


def _filled(policy: SchedulingPolicy) -> CheckedEngine:
    """Return an engine after a preemption: two decodes filled the KV cache."""
    engine = CheckedEngine(kv_tokens=128)
    engine.scheduler.policy = policy
    engine.scheduler.waiting = create_request_queue(policy)
    engine.add_prompts(("a", 30, 1), ("b", 30, 0))
    for _ in range(100):
        engine.step()
        if engine.preemptions:
            break
    return engine


def abort_frees_the_request() -> bool:
    """`_free_request` is called for a request that is aborted."""
    engine = CheckedEngine()
    engine.add_prompts(("a", 10, 0))
    engine.step()
    freed = []
    upstream = engine.scheduler._free_request

    def note(request: Any, *args: Any, **kwargs: Any) -> Any:
        freed.append(request.request_id)
        return upstream(request, *args, **kwargs)

    engine.scheduler._free_request = note
    engine.scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORTED)
    return freed == ["a"]


CHECKS: Final[tuple[Callable[[], bool], ...]] = (
    budget_is_read_in_every_step,
    lookahead_has_the_last_word,
    request_without_tokens_stays_first,
    running_is_served_in_order,
    decode_is_left_out_of_one_step,
    last_of_running_is_preempted,
    preempted_request_of_a_low_priority_waits,
    abort_frees_the_request,
)


def require_known_behaviour() -> None:
    changed = [check.__name__ for check in CHECKS if not _succeeds(check)]
    if changed:
        raise UnsupportedVllmError(
            f"vLLM {installed_version()} schedules differently from what policies rely on "
            f"(vllm_sched.engine.behaviour_checks: {', '.join(changed)}); install a tested release"
        )


def _succeeds(check: Callable[[], bool]) -> bool:
    try:
        return check()
    except Exception:
        logger.warning(
            "vllm_sched.engine.behaviour_checks: %s raised", check.__name__, exc_info=True
        )
        return False
