"""Scheduling policies inside vLLM, and the tools around them.

Importing this package loads neither vLLM nor torch. The schedulers are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_sched.version import __version__

if TYPE_CHECKING:
    from vllm_sched.engine.scheduler import (
        LongPromptScheduler,
        PolicyScheduler,
        SyncLongPromptScheduler,
        SyncPolicyScheduler,
    )

__all__ = [
    "LongPromptScheduler",
    "PolicyScheduler",
    "SyncLongPromptScheduler",
    "SyncPolicyScheduler",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from vllm_sched.engine import scheduler

        return getattr(scheduler, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
