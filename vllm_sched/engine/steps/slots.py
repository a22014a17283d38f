"""Whether the scheduler has a free slot."""

from __future__ import annotations

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler


def slots_taken(scheduler: Scheduler) -> int:
    # Streaming sessions that wait for input keep their slots.
    return len(scheduler.running) + int(scheduler.num_waiting_for_streaming_input)


def admits_requests(scheduler: Scheduler) -> bool:
    full = slots_taken(scheduler) >= scheduler.max_num_active_reqs
    return not full and scheduler.pause_state == PauseState.UNPAUSED
