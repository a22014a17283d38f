"""Reports about workers: probes, metrics pages, failed requests, and other router processes."""

from __future__ import annotations

from proxy.core.fleet import kv_usage, slots
from proxy.core.fleet.breaker import BreakerSnapshot
from proxy.core.fleet.remote_load import set_remote_load
from proxy.core.fleet.roster import Roster
from proxy.core.fleet.worker import Worker
from proxy.core.fleet.worker_load import WorkerLoad
from proxy.core.model.specs import Gauges

IDLE_BEFORE_RETRY_S = 10.0  # of a slow worker
RETRY_LATENCY_SHARE = 0.1


class WorkerHealth:
    def __init__(self, roster: Roster, down_after: int, up_after: int) -> None:
        self.roster = roster
        self.down_after = down_after
        self.up_after = up_after

    def probe_ok(self, name: str, now: float) -> bool:
        """Count a good probe; True if the worker comes up."""
        worker = self.roster.get(name)
        if worker is None:
            return False
        worker.failed_probes = 0
        worker.good_probes += 1
        if worker.up or (worker.probed and worker.good_probes < self.up_after):
            return False
        if worker.probed:  # its cache may be empty
            self.roster.prefixes.forget(worker.index)
        worker.up = worker.probed = True
        worker.up_since = now
        self.roster.model_lists.came_up(worker)
        worker.pace.seen_at = now
        if not worker.pace.prefills:
            self._copy_latency(worker)
        self.roster.live_changed()
        return True

    def probe_failed(self, name: str, why: str = "") -> bool:
        """Count a failed probe; True if the worker goes down."""
        worker = self.roster.get(name)
        if worker is None:
            return False
        worker.good_probes = 0
        worker.failed_probes += 1
        worker.probed = True
        worker.probe_error = why
        if worker.up and worker.failed_probes < self.down_after:
            return False
        self.forget_gauges(worker)  # a dead worker's last page says nothing
        if not worker.up:
            return False
        worker.up = False
        self.roster.live_changed()
        return True

    def apply_health(
        self,
        worker: Worker,
        *,
        up: bool,
        probed: bool,
        up_since: float,
        awaited_since: float,
        draining: bool,
    ) -> None:
        worker.awaited_since = awaited_since
        if worker.up_since != up_since:
            if worker.probed:
                self.roster.prefixes.forget(worker.index)  # restarted
            worker.up_since = up_since
        if up and not worker.up:
            self.roster.model_lists.came_up(worker)
            worker.pace.seen_at = up_since
            if not worker.pace.prefills:
                self._copy_latency(worker)
        changed = (worker.up, worker.draining) != (up, draining)
        worker.up, worker.probed, worker.draining = up, probed, draining
        if changed:
            self.roster.live_changed()

    def record_failure(
        self,
        worker: Worker,
        now: float,
        retry_after_s: float | None = None,
        *,
        busy: bool = False,
        why: str = "",
    ) -> None:
        """Count a failed request in the breaker."""
        worker.breaker.record_failure(now, retry_after_s, busy=busy, why=why)
        self._breaker_changed(worker, now)

    def record_success(self, worker: Worker) -> None:
        worker.breaker.record_success()
        self._breaker_changed(worker, 0.0)

    def _breaker_changed(self, worker: Worker, now: float) -> None:
        self.roster.ejections.breaker_changed(worker, now)
        self.roster.load_changed(worker)

    def set_gauges(self, name: str, gauges: Gauges) -> None:
        """Apply a metrics page."""
        worker = self.roster.get(name)
        if worker is None:
            return
        before, worker.gauges = worker.gauges, gauges
        if before is not None and gauges.computed_tokens > before.computed_tokens:
            worker.worked_at = gauges.at
        worker.kv_capacity = gauges.kv_capacity_tokens or 0
        # The page is a moment old: only requests on two pages count as other clients'.
        foreign_requests = max(gauges.running + gauges.waiting - worker.sequences, 0)
        worker.foreign_requests = min(foreign_requests, worker.foreign_requests_before)
        worker.foreign_requests_before = foreign_requests
        # Charged prompts may be partly computed: this underestimates other clients' work.
        backlog = gauges.extra.get("backlog", 0.0)
        foreign = max(backlog - worker.prefill_tokens, 0.0) if foreign_requests else 0.0
        worker.foreign_tokens = min(foreign, worker.foreign_tokens_before)
        worker.foreign_tokens_before = foreign
        longs = gauges.extra.get("backlog_long", 0.0) / backlog if backlog else 0.0
        worker.foreign_long_tokens = worker.foreign_tokens * longs
        slots.learn_from_page(worker, gauges)
        kv_usage.learn_from_page(worker, gauges, worker.queued_before)
        if gauges.at - worker.pace.seen_at > IDLE_BEFORE_RETRY_S and not worker.requests:
            self._allow_another_try(worker)
        worker.reprice()
        self.roster.load_changed(worker)

    def drop_old_gauges(self, name: str, now: float) -> None:
        worker = self.roster.get(name)
        if worker is None or worker.gauges is None:
            return
        if now - worker.gauges.at > slots.MAX_PAGE_AGE_S:
            self.forget_gauges(worker)

    def forget_gauges(self, worker: Worker) -> None:
        """Forget the gauges, except the cache capacity."""
        if worker.gauges is None:
            return
        worker.gauges = None
        worker.foreign_requests = worker.foreign_requests_before = 0
        worker.foreign_tokens = worker.foreign_tokens_before = worker.foreign_long_tokens = 0.0
        worker.kv_overcharged = 0
        slots.forget(worker)
        worker.reprice()
        self.roster.load_changed(worker)

    def _allow_another_try(self, worker: Worker) -> None:
        peers = [w.pace for w in self.roster.workers_of(worker.model) if w.pace.prefills]
        best = min(peers, key=lambda pace: pace.token_s, default=worker.pace)
        if best.token_s < worker.pace.token_s:
            worker.pace.adopt(best, RETRY_LATENCY_SHARE)

    def _copy_latency(self, worker: Worker) -> None:
        peers = [w for w in self.roster.workers_of(worker.model) if w.pace.prefills]
        if peers:
            worker.pace.adopt(max(peers, key=lambda w: w.pace.prefills).pace)
            worker.reprice()

    # Reports of other processes

    def apply_remote_load(
        self, worker: Worker, load: WorkerLoad, due_at: float, now: float
    ) -> None:
        """Apply the remote charges; `due_at`: their next first token."""
        if self.roster.get(worker.name) is not worker:
            return  # removed: no release would follow
        set_remote_load(worker, load, now)
        worker.due_at = max(worker.due_at, due_at)
        self.roster.load_changed(worker)

    def reserve(self, worker: Worker, slots: int) -> None:
        """Leave some of a worker's slots to routers on other hosts."""
        if slots != worker.reserved:
            worker.reserve(slots)
            self.roster.load_changed(worker)

    def take_breaker(self, worker: Worker, snapshot: BreakerSnapshot) -> None:
        worker.breaker.copy_state(snapshot)
        self._breaker_changed(worker, self.roster.clock())
