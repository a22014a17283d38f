"""Evict requests from a full queue, so that no tenant fills it alone.

A new request evicts the newest request of the tenant with the largest share by weight, if that
exceeds its own tenant's. A share is the largest part in requests, bytes or tokens. Batch is evicted
first, retries never.

Cost: nothing until the queue is full; then a scan of the FIFOs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from proxy.core.model.types import RequestInfo
from proxy.core.queue.request_fifo import RequestFifo
from proxy.core.queue.ticket import Ticket
from proxy.core.tenants.tenants import Rank, Tenant

BATCH = Rank.BATCH
APART = "apart"
MOST_EVICTED = 64  # per new request
Amounts = tuple[float, float, float]  # requests, bytes, tokens
NOTHING: Amounts = (0, 0, 0)


def amounts(ask: RequestInfo) -> Amounts:
    return 1, ask.body_bytes, ask.prompt_tokens


class QueueCapacity:
    def __init__(self) -> None:
        self._used: dict[Tenant | None, Amounts] = {}

    def take(self, ask: RequestInfo) -> None:
        self._used[ask.tenant] = _plus(self._used.get(ask.tenant, NOTHING), amounts(ask))

    def give(self, ask: RequestInfo) -> None:
        left = _plus(self._used[ask.tenant], amounts(ask), -1)
        if left[0]:
            self._used[ask.tenant] = left
        else:
            del self._used[ask.tenant]

    def yielding(
        self, ask: RequestInfo, lines: Iterable[RequestFifo], over: Amounts, most: Amounts
    ) -> list[Ticket]:
        """Return the tickets to evict; none if that would not make enough room.

        `over` is the excess with the request.
        """
        used = dict(self._used)
        own = _share(_plus(used.get(ask.tenant, NOTHING), amounts(ask)), most, ask.tenant)
        may = [line for line in lines if line.place[1] != APART and _may_yield(line, ask)]
        if not any(_is_more(line, ask, used, own, most) for line in may):
            return []
        return _last_of(may, used, over, most, lambda line: _is_more(line, ask, used, own, most))

    def surplus(self, lines: Iterable[RequestFifo], over: Amounts, most: Amounts) -> list[Ticket]:
        """Return tickets to evict, even if an excess remains.

        An oversized request accepted by an empty queue is kept.
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
    """Take the newest ticket of the largest tenant until nothing exceeds its limit."""
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
