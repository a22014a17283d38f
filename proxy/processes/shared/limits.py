"""Tenants' limits and shares, for all processes together.

What a tenant has taken of its limits per minute lies in memory that all write. What it has in
flight each process counts for itself, and adds what the others say; where that is limited, it is
said and read at once, and not at the end of a turn as all else is.

Where it stands among others is the same number in all processes, as far as they have told: what
each has charged it, added up, and the most that it was lifted by in any. Both stay in the table
when a process dies, so that the next one, or one that is given a tenant again, goes on from there.
A tenant that comes back is lifted to the least settled standing of the tenants that wait in any
process. So what is settled and what is an estimate of a request in flight are told apart; the
estimates of a process that died are given back by its successor.
"""

from __future__ import annotations

import logging
from collections.abc import MutableSequence, Sequence
from typing import TYPE_CHECKING, cast

from xxhash import xxh3_64_intdigest

from proxy.core.tenants.tenants import ChangedTenants, Rank
from proxy.processes.shared.shared_memory import (
    LIFE,
    MOST_TENANTS,
    TENANT_CHANGES,
    ProcessSheet,
    SharedTable,
    TenantRow,
)

if TYPE_CHECKING:
    from proxy.core.queue.fairness import ShareCounters
    from proxy.core.tenants.tenants import Tenant, Tenants
    from proxy.processes.shared.load import SharedLoad

logger = logging.getLogger(__name__)

TAKE_S = 0.002
SURE_S = 2.0  # after which all rows are read, whatever was told
AT_FLOORS = MOST_TENANTS  # told as a row's change is
Sums = tuple[float, ...]
NONE: Sums = (0.0,) * 2 * len(Rank)


class LimitsPeer:
    """Another process's say."""

    def __init__(self, sheet: ProcessSheet) -> None:
        self.sheet = sheet
        self.life = self.changes = 0

    def changed(self) -> set[int] | None:
        """Return the rows to read; None: all."""
        sheet = self.sheet
        self.changes, rows = sheet.told(self.changes, TENANT_CHANGES)
        if (life := sheet.count(LIFE)) != self.life:
            self.life = life
            return None
        return rows


class SharedUsage:
    """What a tenant has in flight, told and read at once: see `Others` of limits."""

    def __init__(self, row: int, own: ProcessSheet, theirs: Sequence[ProcessSheet]) -> None:
        self._row = row
        self._own = own
        self._theirs = theirs

    def running(self) -> int:
        """Say how many other processes have at this moment."""
        return sum(sheet.read_running(self._row) for sheet in self._theirs)

    def told(self, running: int) -> None:
        """Say how many this one has."""
        self._own.write_running(self._row, running)


class SharedLimits:
    """Shares all tenants."""

    def __init__(
        self, tenants: Tenants, turns: ShareCounters, table: SharedTable, sharing: SharedLoad
    ) -> None:
        self._tenants = tenants
        self._turns = turns
        self._table = table
        self._sheet = sharing.sheet
        self._peers = [LimitsPeer(peer.sheet) for peer in sharing.peers]
        self._edition = -1
        self._rows: dict[Tenant, int] = {}
        self._told: dict[Tenant, TenantRow] = {}
        self._theirs: dict[Tenant, Sums] = {}  # `_sums` of all others, as it was read last
        self._floors: tuple[float, ...] = ()
        self._tenant_of: dict[int, Tenant] = {}  # by row
        self._watch = ChangedTenants()
        self._next = self._next_sure = 0.0

    def tell(self) -> None:
        """Say what has changed here."""
        if self._edition != self._tenants.edition:
            self._arrange()
        for tenant in self._watch.take():
            taken = _taken(tenant)
            if tenant in self._rows and self._told[tenant] != taken:
                self._say(tenant, self._rows[tenant], taken)
        floors = tuple(self._turns.floors.values())
        if floors != self._floors:
            self._floors = floors
            self._sheet.write_floors(floors)
            self._sheet.tell(AT_FLOORS, TENANT_CHANGES)

    def _say(self, tenant: Tenant, row: int, taken: TenantRow) -> None:
        self._told[tenant] = taken
        self._sheet.write_taken(row, taken)
        self._sheet.tell(row, TENANT_CHANGES)

    def take(self, now: float) -> None:
        """Take what the others have said."""
        if self._edition != self._tenants.edition:
            self._arrange()
        if now < self._next:
            return
        self._next = now + TAKE_S
        rows: set[int] = set()
        everything = now >= self._next_sure
        for peer in self._peers:
            if (changed := peer.changed()) is None:
                everything = True
            else:
                rows |= changed
        if everything:
            self._next_sure = now + SURE_S
            rows = {*self._tenant_of, AT_FLOORS}
        for row in rows:
            if (tenant := self._tenant_of.get(row)) is not None:
                self._take(tenant, row)
        if AT_FLOORS in rows:
            floors = self._turns.floors
            for peer in self._peers:
                for rank, floor in zip(Rank, peer.sheet.read_floors(), strict=True):
                    floors[rank] = max(floors[rank], floor)

    def _take(self, tenant: Tenant, row: int) -> None:
        said = [peer.sheet.read_taken(row) for peer in self._peers]
        tenant.ledger.elsewhere = sum(each.running for each in said)
        waits = 0
        for each in said:
            waits |= each.waits
            for rank, lift in enumerate(each.lifts):
                tenant.lifted_to(rank, lift)
        self._turns.waits_elsewhere(tenant, waits)
        theirs = tuple(map(sum, zip(*(_sums(each) for each in said), strict=True))) or NONE
        if theirs != (known := self._theirs[tenant]):
            self._theirs[tenant] = theirs
            grown = [total - before for total, before in zip(theirs, known, strict=True)]
            for rank in Rank:
                settled, unsettled = grown[rank], grown[len(Rank) + rank]
                tenant.charged_elsewhere(settled + unsettled, unsettled, rank)

    def _arrange(self) -> None:
        """Find the rows of the tenants that there are now."""
        self._edition = self._tenants.edition
        rows: dict[Tenant, int] = {}
        for tenant in self._tenants:
            mark = xxh3_64_intdigest(tenant.name.encode()) >> 1 or 1
            row = self._table.tenant_row(mark)
            if row is None:
                logger.error(
                    "tenant %s: there have been more than %d; its limits hold in each process by "
                    "itself",
                    tenant.name,
                    MOST_TENANTS,
                )
                continue
            rows[tenant] = row
            if tenant not in self._rows:
                self._begin(tenant, row)
        for tenant in self._rows.keys() - rows.keys():
            del self._told[tenant], self._theirs[tenant]
            tenant.watches.discard(self._watch)
            tenant.ledger.others = None
            self._turns.waits_elsewhere(tenant, 0)
        self._rows = rows
        self._tenant_of = {row: tenant for tenant, row in rows.items()}

    def _begin(self, tenant: Tenant, row: int) -> None:
        """Take up the books of a tenant, where it or a process was gone for a while."""
        cells = self._table.tenant_cells(row)
        tenant.ledger.share(cast("MutableSequence[float]", cells))
        theirs = [peer.sheet for peer in self._peers]
        tenant.ledger.others = SharedUsage(row, self._sheet, theirs)
        before = self._sheet.read_taken(row)
        for rank, share in enumerate(before.settled):
            tenant.charged[rank] += share
            tenant.charged_elsewhere(share, 0.0, rank)
            tenant.lifted_to(rank, before.lifts[rank])
        self._theirs[tenant] = NONE
        tenant.watches.add(self._watch)
        self._say(tenant, row, _taken(tenant))
        self._take(tenant, row)


def _sums(taken: TenantRow) -> Sums:
    return taken.settled + taken.unsettled


def _taken(tenant: Tenant) -> TenantRow:
    a, b, c = tenant.charged
    d, e, f = tenant.lifts
    g, h, i = tenant.own_unsettled
    settled = a - g, b - h, c - i
    return TenantRow(tenant.ledger.running, tenant.waits, settled, (d, e, f), (g, h, i))
