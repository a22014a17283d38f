"""Probes every worker, each in a task of its own.

A worker is healthy if /health and, when it is read, /v1/models succeed; /metrics may fail. The
models are read at first, when the worker may have restarted, and every `MODELS_EVERY_S`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable
from contextlib import closing

from proxy.config import ProbeConfig
from proxy.core.fleet.worker import Worker
from proxy.core.model.role import Role
from proxy.core.model.specs import Gauges, WorkerSpec
from proxy.core.router import Router
from proxy.errors import short_list
from proxy.health.probe_client import Models, ProbeClient, ProbeError, SilentError
from proxy.health.worker_metrics import parse

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S = 0.2  # for new workers
MODELS_EVERY_S = 10.0  # adapters are loaded and unloaded at run time
MAX_REASON_CHARS = 200
HANDOVER_ROLES = frozenset([Role.PREFILL, Role.DECODE])


class Prober:
    """Probes all workers of a fleet; `settings` may be replaced at any time."""

    def __init__(
        self, router: Router, settings: ProbeConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.fleet = router.fleet
        self.settings = settings
        self.clock = clock

    async def run(self) -> None:
        tasks: dict[Worker, asyncio.Task[None]] = {}
        try:
            while True:
                tasks = {worker: task for worker, task in tasks.items() if not task.done()}
                for worker in self.fleet.roster:
                    if worker not in tasks:
                        tasks[worker] = asyncio.create_task(self._probe_until_removed(worker))
                await asyncio.sleep(CHECK_INTERVAL_S)
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)

    async def _probe_until_removed(self, worker: Worker) -> None:
        with closing(WorkerProbe(self, worker)) as worker_probe:
            while worker_probe.is_in_fleet:
                started = self.clock()
                await worker_probe.probe()
                # Jitter spreads the parsing of pages on the event loop.
                pause = self.settings.interval_s * random.uniform(0.9, 1.1)
                await asyncio.sleep(max(pause - (self.clock() - started), 0))


class WorkerProbe:
    def __init__(self, prober: Prober, worker: Worker) -> None:
        self._prober = prober
        self._fleet = prober.fleet
        self._worker = worker
        self._spec: WorkerSpec | None = None  # that `_client` was made for
        self._client: ProbeClient | None = None
        self._models_known_at = -math.inf
        self._models: Models | None = None
        self._compared_contexts = 0, 0  # configured and reported
        self._gauges: Gauges | None = None
        self._logged_reason: str | None = None  # the last reason that was logged
        self._been_up = False
        self._computed_tokens = 0  # at the last probe without a response

    @property
    def is_in_fleet(self) -> bool:
        """Whether this worker, not another one of the same name, is in the fleet."""
        return self._fleet.roster.get(self._worker.name) is self._worker

    async def probe(self) -> None:
        why = None
        try:
            models, gauges = await self._fetch()
        except SilentError as error:
            if self._take_progress():
                return  # it sends tokens, so it is busy, not down
            why = str(error)
        except ProbeError as error:
            why = str(error)
        except Exception as error:  # probing must continue
            logger.exception("worker %s: the probe raised an error", self._worker.name)
            why = repr(error)
        if not self.is_in_fleet:
            return
        if why is not None:
            self._report_failure(why)
            return
        self._report_success(models, gauges)

    def _take_progress(self) -> bool:
        """Return whether the worker has computed tokens since the last probe without a response."""
        before, self._computed_tokens = self._computed_tokens, self._worker.total_written
        return self._computed_tokens != before

    def close(self) -> None:
        if self._client is not None:
            self._client.close()

    def _current_client(self) -> ProbeClient:
        spec, timeout_s = self._worker.spec, self._prober.settings.timeout_s
        if self._client is None or spec is not self._spec:
            self.close()
            self._spec = spec
            self._client = ProbeClient(spec.url, spec.api_key, timeout_s, spec.tls)
        self._client.timeout_s = timeout_s
        return self._client

    async def _fetch(self) -> tuple[Models | None, Gauges | None]:
        """Return models, None if they are up to date, and gauges."""
        client = self._current_client()
        await client.health()
        gauges = await self._read_gauges(client)
        if restarted(self._gauges, gauges):
            self._models_known_at = -math.inf
            # A new process has an empty cache.
            self._fleet.roster.prefixes.forget(self._worker.index)
            self._worker.up_since = self._prober.clock()
        is_recent = self._prober.clock() - self._models_known_at < MODELS_EVERY_S
        return (None if is_recent else await client.served_models()), gauges

    async def _read_gauges(self, client: ProbeClient) -> Gauges | None:
        try:
            page = await client.metrics()
            return parse(page, self._prober.clock(), moves=self._worker.role in HANDOVER_ROLES)
        except ProbeError as error:
            logger.debug("worker %s: %s", self._worker.name, error)
            return None

    def _report_success(self, models: Models | None, gauges: Gauges | None) -> None:
        name = self._worker.name
        if models is not None:
            self._models_known_at = self._prober.clock()
            self._apply_models(models)
            self._compare_contexts()
        if gauges:
            self._gauges = gauges
            self._fleet.health.set_gauges(name, gauges)
        else:
            self._fleet.health.drop_old_gauges(name, self._prober.clock())
        if self._fleet.health.probe_ok(name, self._prober.clock()):
            logger.info("worker %s is up", name)
            self._been_up = True
            self._logged_reason = None

    def _apply_models(self, models: Models) -> None:
        worker = self._worker
        if models == self._models:
            return
        self._models = models
        if not models:
            logger.warning(
                "worker %s does not list its models to the router; check its api_key", worker.name
            )
            return
        lengths = [card.length for card in models.values() if card.length is not None]
        own = models.get(worker.model)
        length = (own.length if own else None) or min(lengths, default=None)
        origins = {name: (card.root, card.parent) for name, card in models.items()}
        self._fleet.roster.set_served(worker.name, models, length, origins)
        if worker.model not in models:
            names = short_list(models)
            logger.warning("worker %s serves %s, not %s", worker.name, names, worker.model)

    def _compare_contexts(self) -> None:
        """Log once if the worker reports a shorter context than configured."""
        worker = self._worker
        contexts = stated, reported = (
            worker.spec.max_model_len or 0,
            worker.reported_max_model_len or 0,
        )
        if contexts != self._compared_contexts and stated > reported > 0:
            logger.warning(
                "worker %s reports a context of %d tokens, less than its max_model_len of %d",
                worker.name,
                reported,
                stated,
            )
        self._compared_contexts = contexts

    def _report_failure(self, why: str) -> None:
        # It may come back with other models.
        self._models_known_at = -math.inf
        self._fleet.health.probe_failed(self._worker.name, why[:MAX_REASON_CHARS])
        if not self._worker.up and why != self._logged_reason:
            if self._been_up:
                logger.warning("worker %s is down: %s", self._worker.name, why)
            else:  # it may still be loading
                logger.info("worker %s is not up yet: %s", self._worker.name, why)
            self._logged_reason = why


def restarted(before: Gauges | None, after: Gauges | None) -> bool:
    """Return whether a worker restarted between two pages: by start time or lower counts."""
    if before is None or after is None:
        return False
    if before.extra.get("started") != after.extra.get("started"):
        return True
    return (
        after.prompt_tokens_total < before.prompt_tokens_total
        or after.generation_tokens_total < before.generation_tokens_total
    )
