"""The charges of requests on workers.

A request is charged when it is sent, so that a burst of long prompts does not go to one worker. The
charge is released once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from typing import NamedTuple

from proxy.core.fleet import kv_usage
from proxy.core.fleet.leases import FIRST_ATTEMPT, Attempts, Decision, HandoverDecision, Lease
from proxy.core.fleet.monitoring import WorkerHealth
from proxy.core.fleet.roster import Roster, time_zero
from proxy.core.fleet.worker import Worker
from proxy.core.model.role import Role
from proxy.core.model.specs import WorkerSpec
from proxy.core.model.types import RequestInfo

# A request without a stream shows no first token: its prefill ends at this multiple of the
# predicted time.
SILENT_PREFILL_FACTOR = 1.25
LARGE_PREFILL_TOKENS = 2048  # other routers should see such a prompt at once
MAX_LENT_OBSERVATIONS = 8  # first observations that are copied to new workers


class SilentLease(NamedTuple):
    """A request whose first token is not seen."""

    due: float  # of its first token
    number: int  # decides between equal times
    lease: Lease


class Fleet:
    """The workers, their health, and the charges on them."""

    def __init__(
        self, *, down_after: int = 3, up_after: int = 2, clock: Callable[[], float] = time_zero
    ) -> None:
        self.roster = Roster(clock)
        self.health = WorkerHealth(self.roster, down_after, up_after)
        self.large_prefill_changes = 0  # starts and ends of large prefills
        self._silent: list[SilentLease] = []

    def charge(
        self, info: RequestInfo, decision: Decision, now: float, attempts: Attempts = FIRST_ATTEMPT
    ) -> Lease:
        if decision.handover is not None:
            return self._charge_both(info, attempts, decision, decision.handover, now)
        worker = decision.worker
        cached = int(decision.cached_tokens * (1.0 - worker.pace.evicted_share))
        prefill = (info.prompt_tokens - cached or 1) if info.needs_engine else 0
        decode = info.expected_output * info.samples
        lease = Lease(info, attempts, decision, worker, now, prefill, decode)
        self._charge_prefill(lease, now)
        pace = worker.pace
        if info.generates and not info.stream:
            wait = worker.free_at - now + pace.fixed_s
            due = now + SILENT_PREFILL_FACTOR * wait
            heappush(self._silent, SilentLease(due, worker.last_used, lease))
        self.roster.load_changed(worker)
        return lease

    def _charge_prefill(self, lease: Lease, now: float) -> None:
        info, worker, prefill = lease.info, lease.worker, lease.prefill_tokens
        pace = worker.pace
        # remote prefills may appear late
        idle = worker.prefill_tokens == worker.remote_load.prefill_tokens
        before = worker.prefill_tokens + worker.foreign_tokens
        if before:
            ahead = min(worker.wait_s(now, for_long=True) / pace.token_s, before)
            longs = worker.long_tokens + worker.foreign_long_tokens
            if longs and not info.long:
                lease.ahead_long_tokens = ahead * longs / before
                ahead -= lease.ahead_long_tokens
            lease.ahead_tokens = ahead
        worker.last_used = next(self.roster.numbers)
        worker.requests += 1
        worker.total_placed += 1
        worker.sequences += info.samples
        self._count_prefill(lease, 1)
        worker.decode_tokens += lease.decode_tokens
        kv_usage.charge(lease, now)
        worker.free_at = max(worker.free_at, now) + pace.token_s * prefill
        if idle and prefill:
            worker.note_progress(now)
        lease.trial = worker.breaker.record_sent(now)

    def _count_prefill(self, lease: Lease, sign: int) -> None:
        worker, tokens = lease.worker, lease.prefill_tokens
        worker.prefill_tokens += sign * tokens
        if lease.info.long:
            worker.long_tokens += sign * tokens
        if tokens >= LARGE_PREFILL_TOKENS:
            self.large_prefill_changes += 1

    # Hand-overs

    def _charge_both(
        self,
        info: RequestInfo,
        attempts: Attempts,
        decision: Decision,
        handover: HandoverDecision,
        now: float,
    ) -> Lease:
        first = handover.prefill
        cached = int(handover.cached_tokens * (1.0 - first.pace.evicted_share))
        prefill = info.prompt_tokens - cached or 1
        prefill_leg = Lease(info, attempts, decision, first, now, prefill, 0)
        self._charge_prefill(prefill_leg, now)
        self.roster.load_changed(first)
        worker = decision.worker
        decode = info.expected_output * info.samples
        lease = Lease(info, attempts, decision, worker, now, 0, decode)
        lease.prefill, lease.sent = prefill_leg, False
        worker.last_used = next(self.roster.numbers)
        worker.requests += 1
        worker.decode_tokens += decode
        kv_usage.charge(lease, now, shares_prefix=False)
        lease.trial = worker.breaker.record_sent(now)
        self.roster.load_changed(worker)
        return lease

    def hand_over(self, lease: Lease, now: float) -> None:
        """Release the prefill leg and start the decode leg."""
        prefill_leg, handover = lease.prefill, lease.decision.handover
        if prefill_leg is None or handover is None or prefill_leg.released or lease.released:
            return
        worker = prefill_leg.worker
        worker.note_progress(now)
        if now >= worker.pace.first_token_learnable_at:
            worker.pace.learn_handover_tokens(prefill_leg.info.prompt_tokens)
            self._learn_first_token(prefill_leg, handover.cached_tokens, now)
        if handover.tokens:
            lease.holds_blocks = True
            worker.unfetched_handovers += 1
            lease.worker.total_written += handover.tokens
        worker.total_written += prefill_leg.prefill_tokens
        self.release(prefill_leg)
        worker.free_at = now + worker.pace.token_s * worker.prefill_tokens
        lease.sent = True
        lease.charged_at = now
        lease.worker.sequences += lease.info.samples
        if self.roster.leaving:
            self.roster.load_changed(lease.worker)
        if not lease.info.stream:
            wait = handover.transfer_s + lease.worker.pace.fixed_s
            due = now + SILENT_PREFILL_FACTOR * wait
            heappush(self._silent, SilentLease(due, next(self.roster.numbers), lease))

    def _count_fetched(self, lease: Lease) -> None:
        if lease.holds_blocks and lease.prefill is not None:
            lease.holds_blocks = False
            lease.prefill.worker.unfetched_handovers -= 1
            self.roster.load_changed(lease.prefill.worker)

    def move(self, lease: Lease, worker: Worker, now: float) -> None:
        if lease.released or not lease.sent or lease.num_decoding:
            return
        before, samples = lease.worker, lease.info.samples
        if lease.trial:
            before.breaker.abandon_trial()
        for owner, sign in ((before, -1), (worker, 1)):
            owner.requests += sign
            owner.sequences += sign * samples
            owner.decode_tokens += sign * lease.decode_tokens
        kv_tokens = lease.kv_tokens
        kv_usage.release(lease)
        worker.last_used = next(self.roster.numbers)
        lease.worker = lease.decision.worker = worker
        lease.kv_tokens = kv_tokens
        kv_usage.charge(lease, now, shares_prefix=False)
        lease.trial = worker.breaker.record_sent(now)
        self.roster.load_changed(before)
        self.roster.load_changed(worker)

    def _learn_first_token(self, lease: Lease, cached: int, now: float) -> None:
        pace = lease.worker.pace
        pace.learn_first_token(lease.prefill_work(cached), now - lease.charged_at, now)
        if pace.prefills <= MAX_LENT_OBSERVATIONS:
            self._copy_latency(lease.worker)

    def _start_decoding(self, lease: Lease) -> None:
        worker, samples = lease.worker, lease.info.samples
        lease.decoding_before = worker.num_decoding
        worker.num_decoding += samples
        lease.num_decoding = samples
        worker.reprice()
        self.roster.load_changed(worker)

    # Progress of requests

    def start_due_decodes(self, now: float) -> None:
        """Count silent requests as decoding once their first token is due.

        Read the charges of other processes first.
        """
        if (others := self.roster.remote_load) is not None:
            others.read_remote_charges(now)
        silent = self._silent
        while silent and (silent[0].due <= now or silent[0].lease.released):
            lease = heappop(silent).lease
            if not lease.released:
                kv_usage.mark_prompt_cached(lease)
            if lease.prefill_tokens:
                self._end_prefill(lease, now)
            elif lease.prefill is not None and not lease.released and not lease.num_decoding:
                self._start_decoding(lease)

    def record_first_token(self, lease: Lease, now: float) -> None:
        """Move a request from prefill to decode."""
        if lease.released or lease.first_token_at is not None or not lease.sent:
            return
        lease.first_token_at = now
        kv_usage.mark_prompt_cached(lease)
        self._count_fetched(lease)
        if lease.info.needs_engine:
            lease.worker.note_progress(now)
        if lease.trial:
            self.health.record_success(lease.worker)
        if not lease.prefill_tokens:
            if lease.prefill is not None and not lease.num_decoding:
                self._start_decoding(lease)
            elif self.roster.leaving:
                self.roster.load_changed(lease.worker)
            return
        info, worker = lease.info, lease.worker
        is_seen = info.stream or not info.generates
        may_learn = is_seen and now >= worker.pace.first_token_learnable_at
        # The time may include a wait for a slot.
        if may_learn and not (worker.role is Role.DECODE and worker.queued_before):
            self._learn_first_token(lease, lease.decision.cached_tokens, now)
        self._end_prefill(lease, now)

    def _copy_latency(self, worker: Worker) -> None:
        for other in self.roster.workers_of(worker.model):
            if not other.pace.prefills:
                other.pace.adopt(worker.pace)
                other.reprice()
                self.roster.load_changed(other)

    def _end_prefill(self, lease: Lease, now: float) -> None:
        worker = lease.worker
        worker.total_written += lease.prefill_tokens
        self._count_prefill(lease, -1)
        lease.prefill_tokens = 0
        worker.free_at = now + worker.pace.token_s * worker.prefill_tokens
        if lease.info.generates:
            self._start_decoding(lease)
        else:
            self.roster.load_changed(worker)

    def record_tokens(self, lease: Lease, seen: int) -> None:
        lease.seen_tokens += seen
        lease.worker.total_written += seen
        before = lease.decode_tokens
        if before and not lease.released:
            left = before - seen
            if left <= 0:
                left = _estimate_remaining(lease.info, lease.seen_tokens)
            lease.decode_tokens = left
            lease.worker.decode_tokens += left - before
        if self.roster.leaving and lease.worker in self.roster.leaving:
            self.roster.pass_to_successor(lease.worker)

    def release(self, lease: Lease) -> bool:
        """Release the charge; False if it was released before."""
        if lease.released:
            return False
        lease.released = True
        if lease.prefill is not None:
            self.release(lease.prefill)
            self._count_fetched(lease)
        worker = lease.worker
        sequences = lease.info.samples if lease.sent else 0
        worker.requests -= 1
        worker.sequences -= sequences
        worker.decode_tokens -= lease.decode_tokens
        kv_usage.release(lease)
        if lease.prefill_tokens:
            self._count_prefill(lease, -1)
            worker.free_at -= worker.pace.token_s * lease.prefill_tokens
        if lease.num_decoding:
            worker.num_decoding -= lease.num_decoding
            lease.num_decoding = 0
            worker.reprice()
        lease.prefill_tokens = lease.decode_tokens = 0
        if worker.reports_prefixes and lease.info.prefix:
            self.roster.prefixes.end_request(lease.info.prefix, worker.index)
        self.roster.load_changed(worker)
        return True


def _estimate_remaining(info: RequestInfo, seen: int) -> int:
    """Estimate the rest of a response that has reached its expected length.

    The expected length again: otherwise long responses would seem nearest to their end.
    """
    expected, limit = info.expected_output * info.samples, info.output_tokens
    more = expected - seen % expected
    return more if limit is None else max(min(more, limit * info.samples - seen), 0)


def idle_fleet(specs: Iterable[WorkerSpec], clock: Callable[[], float] = time_zero) -> Fleet:
    """Return a fleet of idle workers that are all up."""
    fleet = Fleet(clock=clock)
    for spec in specs:
        fleet.roster.add(spec)
        fleet.health.probe_ok(spec.name, 0.0)
    return fleet
