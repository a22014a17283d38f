"""Whose requests give way where the queue is full: else one tenant's flood would be all that waits.

A newcomer takes the place of the last comer of whoever has most of the queue, for its weight, as
long as that is more than its own tenant has; requests, bytes and tokens count alike, whichever is
scarcest. Batch gives way to all others. So each of n tenants that send without end has an n-th of
the queue, and a tenant that sends one request has a place for it. Retries have waited enough, and
give way to nobody.

Cost: nothing until the queue is full; then a look at who has how much, and only for a newcomer that
gets a place by it at all those who wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from proxy.core.model.types import RequestInfo
from proxy.core.queue.request_fifo import RequestFifo
from proxy.core.queue.ticket import Ticket
from proxy.core.tenants.tenants import Rank, Tenant

BATCH = Rank.BATCH
APART = "apart"
MOST_EVICTED = 64  # for one newcomer: more small ones than that are not worth one large
Amounts = tuple[float, float, float]  # requests, bytes, tokens
NOTHING: Amounts = (0, 0, 0)


def amounts(ask: RequestInfo) -> Amounts:
    """Say what one request takes."""
    return 1, ask.body_bytes, ask.prompt_tokens


class QueueCapacity:
    """What there is, and who has how much of it."""

    def __init__(self) -> None:
        self._used: dict[Tenant | None, Amounts] = {}

    def take(self, ask: RequestInfo) -> None:
        """Count one in."""
        self._used[ask.tenant] = _plus(self._used.get(ask.tenant, NOTHING), amounts(ask))

    def give(self, ask: RequestInfo) -> None:
        """Count one out."""
        left = _plus(self._used[ask.tenant], amounts(ask), -1)
        if left[0]:
            self._used[ask.tenant] = left
        else:
            del self._used[ask.tenant]

    def yielding(
        self, ask: RequestInfo, lines: Iterable[RequestFifo], over: Amounts, most: Amounts
    ) -> list[Ticket]:
        """Name those who give way to a newcomer; none if that would not make room enough.

        `over` is by how much it would be too much.
        """
        used = dict(self._used)
        own = _share(_plus(used.get(ask.tenant, NOTHING), amounts(ask)), most, ask.tenant)
        may = [line for line in lines if line.place[1] != APART and _may_yield(line, ask)]
        if not any(_is_more(line, ask, used, own, most) for line in may):
            return []
        return _last_of(may, used, over, most, lambda line: _is_more(line, ask, used, own, most))

    def surplus(self, lines: Iterable[RequestFifo], over: Amounts, most: Amounts) -> list[Ticket]:
        """Name those who give way because there are too many, as far as that makes it better.

        One that is more than all may be was let in when nobody waited, and stays.
        """
        may = [
            line
            for line in lines
            if line.place[1] != APART and line.tickets[-1].ask.prompt_tokens <= most[2]
        ]
        return _last_of(may, dict(self._used), over, most, lambda _: True, partly=True)


def _last_of(
    may: list[RequestFifo],
    used: dict[Tenant | None, Amounts],
    over: Amounts,
    most: Amounts,
    yields: Callable[[RequestFifo], bool],
    *,
    partly: bool = False,
) -> list[Ticket]:
    """Take the last comers of whoever has most at that moment, until it is not too much."""
    left = {line.key: len(line.tickets) for line in may}
    gone: list[Ticket] = []
    while max(over) > 0 and len(gone) < MOST_EVICTED:
        there = [line for line in may if left[line.key] and yields(line)]
        if not there:
            break
        line = max(there, key=lambda each: _order(each, used, most, left[each.key]))
        left[line.key] -= 1
        ticket = line.tickets[left[line.key]]
        gone.append(ticket)
        used[line.tenant] = _plus(used[line.tenant], amounts(ticket.ask), -1)
        over = _plus(over, amounts(ticket.ask), -1)
    return gone if partly or max(over) <= 0 else []


def _may_yield(line: RequestFifo, ask: RequestInfo) -> bool:
    if line.rank is BATCH:
        return ask.rank is not BATCH or line.tenant is not ask.tenant
    return ask.rank is not BATCH and line.tenant is not ask.tenant


def _is_more(
    line: RequestFifo,
    ask: RequestInfo,
    used: dict[Tenant | None, Amounts],
    own: float,
    most: Amounts,
) -> bool:
    """Whether a line's tenant has more than a newcomer's would."""
    if line.rank is BATCH and ask.rank is not BATCH:
        return True
    return _share(used[line.tenant], most, line.tenant) > own


def _order(
    line: RequestFifo, used: dict[Tenant | None, Amounts], most: Amounts, left: int
) -> tuple[bool, float, int]:
    return line.rank is BATCH, _share(used[line.tenant], most, line.tenant), left


def _share(used: Amounts, most: Amounts, tenant: Tenant | None) -> float:
    share = max(used[0] / most[0], used[1] / most[1], used[2] / most[2])
    return share if tenant is None else share / tenant.spec.weight


def _plus(one: Amounts, other: Amounts, sign: int = 1) -> Amounts:
    return one[0] + sign * other[0], one[1] + sign * other[1], one[2] + sign * other[2]
