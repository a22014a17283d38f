"""Decides the limits of tenants on the Redis server, for all router processes of all hosts.

Requests that arrive during a call share the next one. While a limit is far, calls also charge it in
advance. If the server does not answer, each host decides alone with an equal part of each limit. It
reports its charges when the server is back, and decides alone until all others have reported too:
the server may have lost its data.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from proxy.config.shared import SharedConfig
from proxy.core.tenants.limits import CONCURRENCY_RETRY_S, Decided, Limit
from proxy.core.tenants.tenants import Tenant, Tenants
from proxy.processes.replicas import redis_server
from proxy.processes.replicas.limit_advance import MOMENT_S, LimitAdvance
from proxy.processes.replicas.timers import EarliestTimer, ReplyDeadline
from proxy.processes.shared.shared_memory import SharedTable

logger = logging.getLogger(__name__)

SCRIPT = Path(__file__).with_suffix(".lua")
BEAT_S = 1.0  # between two reports of requests in flight
LEASE_S = 3.0  # after which a silent process has no requests in flight
SOON_S, GATHER_S = 0.002, 0.02  # longest wait of charges for a call: urgent ones, and others
FRESH_S = 0.05  # for which a tenant's state is good enough to refuse requests unread
MAX_KEYS, MAX_REQUESTS = 50, 1000  # of a call: tenants, and new requests of each
DOWN_PAUSE_S = 0.2  # between two calls while the server is away
# Until all processes have noticed a lost connection and reported again.
SETTLE_S = 2 * BEAT_S
MICRO = 1e-6
NO_LIMIT = -1
LIMITS = {1: Limit.REQUESTS, 2: Limit.TOKENS, 3: Limit.CONCURRENCY}


class ServerState(Enum):
    NEW = "new"  # not asked yet
    DOWN = "down"  # hosts decide alone
    SETTLING = "settling"  # it replies, but may lack charges of other processes
    UP = "up"  # it decides


class ReportedCharges(NamedTuple):
    """A tenant's charges that a call reports to the server."""

    call: int  # number of the call
    requests: int
    tokens: int


class TenantReply(NamedTuple):
    """The server's reply on one tenant."""

    requests_s: float  # until the bucket is full
    tokens_s: float
    elsewhere: int  # requests in flight in other processes
    advance: tuple[int, int]  # requests and tokens charged in advance
    verdicts: list[tuple[Limit | None, float]]  # what each new request exceeds, and for how long

    @classmethod
    def read(cls, reply: Sequence[int], requests: int) -> TenantReply:
        """Read the script's reply; raise an error if it is for another number of requests."""
        requests_us, tokens_us, elsewhere, ahead_requests, ahead_tokens, *pairs = reply
        if len(pairs) != 2 * requests:
            raise ValueError("a reply for another number of requests")
        verdicts = [
            (LIMITS[limit] if limit else None, wait_us * MICRO)
            for limit, wait_us in zip(pairs[::2], pairs[1::2], strict=True)
        ]
        advance = ahead_requests, ahead_tokens
        return cls(requests_us * MICRO, tokens_us * MICRO, elsewhere, advance, verdicts)


class LimitRequest:
    """A request that waits for the server's decision."""

    __slots__ = ("on_decided", "tokens")

    def __init__(self, tokens: int, on_decided: Decided) -> None:
        self.tokens = tokens
        self.on_decided: Decided | None = on_decided  # None: the client has left

    def drop(self) -> None:
        self.on_decided = None


class TenantLimits:
    """One tenant's limits in this process; implements `RemoteLimits` of the core."""

    def __init__(self, limiter: SharedLimiter, tenant: Tenant) -> None:
        self.tenant = tenant
        self.waiting: list[LimitRequest] = []
        self.requests = self.tokens = 0  # charges to report
        self.advance = LimitAdvance(limiter.clock())
        self.full_at = (0.0, 0.0)  # of both buckets, as last reported
        self.known_at = -FRESH_S
        self.unanswered: ReportedCharges | None = None  # of a call without a reply
        self._limiter = limiter

    @property
    def is_fresh(self) -> bool:
        return self._limiter.clock() - self.known_at <= FRESH_S

    @property
    def has_unreported(self) -> bool:
        return bool(self.unanswered or self.waiting or self.requests or self.tokens)

    def take_from_advance(self, tokens: int) -> bool:
        if not self.advance.take(tokens):
            return False
        self.tenant.ledger.charge_known(self._limiter.clock(), 1, tokens)
        return True

    def request_decision(self, tokens: int, on_decided: Decided) -> LimitRequest | None:
        """Have the server decide a request; None if this process decides."""
        if not self._limiter.is_up:
            return None
        request = LimitRequest(tokens, on_decided)
        self.waiting.append(request)
        self._limiter.call_soon_for(self)
        return request

    def advance_to_request(self) -> tuple[int, int]:
        """Return what to charge in advance; report what is given up."""
        requests, tokens = self.advance.change(self._limiter.clock())
        self.requests += min(requests, 0)
        self.tokens += min(tokens, 0)
        return max(requests, 0), max(tokens, 0)

    def next_call(self, number: int, *, may_advance: bool) -> TenantCall:
        """Return what the next call is for, without a reply to the last one only that again."""
        if self.unanswered is not None:
            return TenantCall(self, self.unanswered, (0, 0), [])
        more_advance = self.advance_to_request() if may_advance else (0, 0)
        charges = ReportedCharges(number, self.requests, self.tokens)
        self.requests = self.tokens = 0
        waiting = self.waiting[:MAX_REQUESTS]
        del self.waiting[:MAX_REQUESTS]
        return TenantCall(self, charges, more_advance, waiting)

    def return_advance(self) -> None:
        advance = self.advance
        self.requests -= advance.requests
        self.tokens -= advance.tokens
        advance.requests = advance.tokens = 0

    def charge(self, requests: int, tokens: int, *, soon: bool) -> None:
        """Report charges; `soon`: others wait for what is free now."""
        self.requests += requests
        self.tokens += tokens
        delay_s = SOON_S if soon else GATHER_S
        self._limiter.report_within(self, MOMENT_S if self.advance.requests else delay_s)


class TenantCall(NamedTuple):
    """A tenant's part of a call."""

    limits: TenantLimits
    charges: ReportedCharges
    more_advance: tuple[int, int]  # requests and tokens to charge in advance
    waiting: list[LimitRequest]  # for the decision


class SharedLimiter:
    def __init__(
        self,
        settings: SharedConfig,
        password: str | None,
        tenants: Tenants,
        table: SharedTable,
        clock: Callable[[], float],
    ) -> None:
        self.clock = clock
        self._settings = settings
        redis_server.check(settings)  # the import takes longer than a call may
        self._password = password
        self._connection: redis_server.RedisConnection | None = None
        self._script = ""
        self._tenants = tenants
        self._table = table
        self._edition = -1
        self._known: dict[Tenant, TenantLimits] = {}
        self._changed: dict[TenantLimits, None] = {}
        self._name = uuid.uuid4().hex[:12]
        self._calls = 0
        self._in_flight: list[TenantCall] | None = None  # without a reply
        self._state = ServerState.NEW
        self._settled_at = 0.0
        self._call_is_due = False  # the next call is arranged, or follows the reply
        self._deadline = ReplyDeadline(settings.timeout_s, self._reply_is_late)
        self._disconnected = asyncio.Event()
        self._fatal_error: Exception | None = None
        self._timer = EarliestTimer(self._call_soon)
        self._follow_tenants()

    @property
    def is_up(self) -> bool:
        return self._state is ServerState.UP

    def call_soon_for(self, limits: TenantLimits) -> None:
        self._changed[limits] = None
        self._call_soon()

    def report_within(self, limits: TenantLimits, delay_s: float) -> None:
        """Report the changes of a tenant within a time."""
        self._changed[limits] = None
        self._timer.start(delay_s)

    def _follow_tenants(self) -> None:
        if self._edition == self._tenants.edition:
            return
        self._edition = self._tenants.edition
        tenants = set(self._tenants)
        self._known = {
            tenant: limits for tenant, limits in self._known.items() if tenant in tenants
        }
        for tenant in tenants - self._known.keys():
            tenant.ledger.remote_limits = self._known[tenant] = TenantLimits(self, tenant)
        self._divide_limits()

    def _divide_limits(self) -> None:
        """Decide alone with a part of each limit while the server is away."""
        parts = 1 if self.is_up else self._table.hosts
        for tenant in self._known:
            tenant.ledger.divide(parts)

    async def run(self) -> None:
        """Decide until cancelled."""
        try:
            while True:
                self._disconnected.clear()
                if self._connection is None:
                    await self._connect()
                if self._connection is not None:
                    self._follow_tenants()
                    self._changed.update(dict.fromkeys(self._to_report()))
                    self._call_soon()
                if self.is_up:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(BEAT_S):
                            await self._disconnected.wait()
                else:
                    await asyncio.sleep(DOWN_PAUSE_S)
                if self._fatal_error is not None:
                    raise self._fatal_error
        finally:
            if self._in_flight is not None:
                self._in_flight, self._call_is_due = None, False
            self._disconnect()

    def _to_report(self) -> list[TenantLimits]:
        """Return the tenants that the server must know: it may have lost its data."""
        now = self.clock()
        return [
            limits
            for tenant, limits in self._known.items()
            if tenant.ledger.is_limited
            and (tenant.ledger.running or limits.has_unreported or max(limits.full_at) > now)
        ]

    async def _connect(self) -> None:
        key = f"{{{self._settings.namespace}}}"
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                connection = await redis_server.connect(self._settings, self._password, key)
                try:
                    self._script = await connection.ask("SCRIPT", "LOAD", SCRIPT.read_text())
                    self._connection = connection
                finally:
                    if self._connection is None:
                        connection.close()
        except Exception as error:  # requests go on after any error
            self._note_down(error)

    def _call_soon(self) -> None:
        """Call the server for all requests of this turn, after the last reply."""
        if self._call_is_due or self._connection is None:
            return
        self._call_is_due = True
        if self._in_flight is None:
            asyncio.get_running_loop().call_soon(self._call)

    def _call(self) -> None:
        self._call_is_due = False
        if (connection := self._connection) is None:
            return
        self._follow_tenants()
        batch = list(self._changed)[:MAX_KEYS]
        for limits in batch:
            del self._changed[limits]
        self._call_is_due = bool(self._changed)
        self._calls += 1
        is_up = self.is_up
        calls = [limits.next_call(self._calls, may_advance=is_up) for limits in batch]
        self._in_flight = calls
        keys = [f"{{{self._settings.namespace}}}:tenant:{x.limits.tenant.name}" for x in calls]
        arguments = [self._name, LEASE_S]
        for call in calls:
            arguments += self._arguments(call)
        self._deadline.start()
        if connection.error is not None:
            self._replied(connection.error)
        elif keys:
            words = "EVALSHA", self._script, len(keys), *keys, *arguments
            connection.send(*words, replied=self._replied)
        else:
            connection.send("PING", replied=self._replied)

    def _reply_is_late(self) -> None:
        if self._in_flight is not None and self._connection is not None:
            self._connection.fail(TimeoutError())

    def _replied(self, reply: Any) -> None:
        if (calls := self._in_flight) is None:
            return
        is_due, self._in_flight, self._call_is_due = self._call_is_due, None, False
        try:
            if isinstance(reply, Exception):
                raise reply
            tenant_replies = [
                TenantReply.read(part, len(call.waiting))
                for call, part in zip(calls, reply if calls else (), strict=True)
            ]
        except Exception as error:  # requests go on after any error
            self._call_failed(calls, error)
            return
        self._note_up()
        try:
            for call, tenant_reply in zip(calls, tenant_replies, strict=True):
                self._apply_reply(call.limits, call.waiting, tenant_reply)
        except Exception as error:  # a defect; this process must not go on with lost requests
            self._fatal_error = error
            self._disconnected.set()
        if is_due:
            self._call_soon()

    def _call_failed(self, calls: list[TenantCall], error: Exception) -> None:
        """Keep what the server may not have for the next call, and decide here until then."""
        for call in calls:
            call.limits.unanswered = call.charges
            call.limits.waiting = call.waiting + call.limits.waiting
            self._changed[call.limits] = None
        self._disconnect()
        self._note_down(error)

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
            self._disconnected.set()

    def _arguments(self, call: TenantCall) -> list[Any]:
        """Return a tenant's arguments of the script, in the order of `limits.lua`."""
        limits, charges, more_advance, waiting = call
        now, tenant = self.clock(), limits.tenant
        allowed = tenant.spec.limits
        allowances = allowed.requests_per_minute, allowed.tokens_per_minute, allowed.concurrency
        return [
            charges.call,
            tenant.ledger.running + limits.advance.requests,
            charges.requests,
            charges.tokens,
            int(limits.unanswered is not None),
            *(max(full_at - now, 0.0) for full_at in limits.full_at),
            *(NO_LIMIT if limit is None else limit for limit in allowances),
            limits.advance.requests,
            limits.advance.tokens,
            *more_advance,
            len(waiting),
            *(request.tokens for request in waiting),
        ]

    def _apply_reply(
        self, limits: TenantLimits, waiting: list[LimitRequest], reply: TenantReply
    ) -> None:
        now, ledger = self.clock(), limits.tenant.ledger
        limits.unanswered = None
        limits.full_at = now + reply.requests_s, now + reply.tokens_s
        if self.is_up:
            limits.known_at = now
            ledger.apply_reported(*limits.full_at, reply.elsewhere)
            limits.advance.add(*reply.advance)
            ledger.charge_known(now, -limits.advance.requests, -limits.advance.tokens)
        for request, (limit, wait_s) in zip(waiting, reply.verdicts, strict=True):
            exceeded = None
            if limit is not None:
                exceeded = ledger.exceeded_on_server(now, limit, wait_s or CONCURRENCY_RETRY_S)
            if request.on_decided is not None:
                request.on_decided(exceeded)
            elif exceeded is None:  # the client has left
                limits.charge(-1, -request.tokens, soon=True)
        if limits.waiting:
            self.call_soon_for(limits)
        elif limits.has_unreported or limits.advance.requests:
            self.report_within(limits, MOMENT_S)

    # Without the server

    def _note_down(self, error: Exception) -> None:
        if self.is_up:
            reason = redis_server.describe(error)
            if isinstance(error, TimeoutError):
                reason = f"the server did not answer within {self._settings.timeout_s:g} s"
            logger.error(
                "router.shared: %s; this router enforces 1/%d of each tenant's limits",
                reason,
                self._table.hosts,
            )
        self._state = ServerState.DOWN
        self._divide_limits()
        # Those of tenants that a reload has removed are in `_changed` only.
        for limits in {**self._changed, **dict.fromkeys(self._known.values())}:
            limits.return_advance()
            waiting, limits.waiting = limits.waiting, []
            for request in waiting:
                if request.on_decided is not None:
                    ledger = limits.tenant.ledger
                    request.on_decided(ledger.decide(self.clock(), request.tokens))

    def _note_up(self) -> None:
        now = self.clock()
        if self._state is ServerState.DOWN:
            self._state, self._settled_at = ServerState.SETTLING, now + SETTLE_S
        if not self.is_up and now >= self._settled_at:
            logger.info("router.shared: connected; tenant limits are decided on the server")
            self._state = ServerState.UP
            self._divide_limits()
