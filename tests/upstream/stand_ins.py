"""A class for the run's own process, which finds this module by its bare name.

The package `tests` is upstream's there.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler


class Careless(AsyncScheduler):  # type: ignore[misc]
    """Serves those who run in the wrong order: a fault that upstream's tests must notice."""

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        output = super().schedule(*args, **kwargs)
        self.running.reverse()
        return output
