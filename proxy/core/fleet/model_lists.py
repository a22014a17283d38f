"""The model lists of workers that the router still waits for.

Adapters appear in the workers' model lists only, not in the fleet file. Until every list is known,
an unknown model is refused with 503 instead of 404.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf

from proxy.core.fleet.worker import Worker
from proxy.core.model.role import Role

MAX_MODEL_LIST_WAIT_S = 600.0
MAX_SERVED_MODELS = 10_000


class ModelLists:
    """Served models, and pools and workers without a list yet."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._empty_since: dict[str, float] = {}  # expected models without workers
        self._up_since: dict[str, float] = {}  # pools, by their first worker up
        self._served: dict[str, None] = {}  # models, the latest last

    def are_complete(self, model: str, workers: Iterable[Worker]) -> bool:
        """Return whether no further worker may list this model.

        Workers that were never up, and empty pools, are waited for up to `MAX_MODEL_LIST_WAIT_S`.
        Once a pool has been up that long, only models served before are waited for.
        """
        due = self._clock() - MAX_MODEL_LIST_WAIT_S
        served = model in self._served
        return not any(
            since > due and self._is_awaited(pool, due, served=served)
            for pool, since in self._empty_since.items()
        ) and not any(
            worker.awaited_since > due
            and not (worker.up or worker.up_since)
            and self._is_awaited(worker.model, due, served=served)
            for worker in workers
            if worker.role is not Role.PREFILL  # decode workers list the same models
        )

    def _is_awaited(self, pool: str, due: float, *, served: bool) -> bool:
        return served or self._up_since.get(pool, inf) > due

    def add(self, models: Iterable[str]) -> None:
        served = self._served
        for model in models:
            served.pop(model, None)
            served[model] = None
        while len(served) > MAX_SERVED_MODELS:
            del served[next(iter(served))]

    def came_up(self, worker: Worker) -> None:
        if worker.role is not Role.PREFILL:
            self._up_since.setdefault(worker.model, self._clock())

    def set_empty_pools(self, models: Iterable[str]) -> None:
        before, now = self._empty_since, self._clock()
        self._empty_since = {model: before.get(model, now) for model in models}
