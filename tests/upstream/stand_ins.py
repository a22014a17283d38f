"""A scheduler class for upstream's runs, which import this module by its bare name."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler


class Careless(AsyncScheduler):  # type: ignore[misc]
    """Serves running requests in the wrong order, a fault that upstream's tests must detect."""

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        output = super().schedule(*args, **kwargs)
        self.running.reverse()
        return output
