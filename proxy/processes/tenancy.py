"""Tenants' limits and shares, for all processes together.

What a tenant has taken of its limits per minute lies in memory that all write. What it has in
flight each process counts for itself, and adds what the others say. Its counter of the tokens it
was served grows here by what the others have charged.
"""

from __future__ import annotations

import logging
from collections.abc import MutableSequence
from typing import TYPE_CHECKING, cast

from xxhash import xxh3_64_intdigest

from proxy.processes.table import LIFE, MOST_TENANTS, TENANT_CHANGES, Sheet, Table, Taken

if TYPE_CHECKING:
    from proxy.core.tenants import Tenant, Tenants
    from proxy.processes.sharing import Sharing

logger = logging.getLogger(__name__)

TAKE_S = 0.002
NOTHING = Taken()


class Peer:
    """Another process's say."""

    def __init__(self, sheet: Sheet) -> None:
        self.sheet = sheet
        self.life = self.changes = 0
        self.charged: dict[int, float] = {}  # by row, as it was read last

    def changed(self) -> bool:
        """Whether there is anything to read; what it charged in an earlier life stays charged."""
        sheet = self.sheet
        if (life := sheet.count(LIFE)) != self.life:
            self.life = life
            self.charged.clear()
            self.changes = -1
        before, self.changes = self.changes, sheet.count(TENANT_CHANGES)
        return self.changes != before


class Tenancy:
    """Shares all tenants."""

    def __init__(self, tenants: Tenants, table: Table, sharing: Sharing) -> None:
        self._tenants = tenants
        self._table = table
        self._sheet = sharing.sheet
        self._peers = [Peer(peer.sheet) for peer in sharing.peers]
        self._edition = -1
        self._rows: dict[Tenant, int] = {}
        self._told: dict[Tenant, Taken] = {}
        self._next = 0.0

    def tell(self) -> None:
        """Say what has changed here."""
        if self._edition != self._tenants.edition:
            self._arrange()
        changed = False
        for tenant, row in self._rows.items():
            taken = Taken(tenant.ledger.running, tenant.charged)
            if self._told.get(tenant, NOTHING) != taken:
                self._told[tenant] = taken
                self._sheet.write_taken(row, taken)
                changed = True
        if changed:
            changes = self._sheet.count(TENANT_CHANGES)
            self._sheet.write_count(TENANT_CHANGES, changes + 1)

    def take(self, now: float) -> None:
        """Take what the others have said."""
        if self._edition != self._tenants.edition:
            self._arrange()
        if now < self._next:
            return
        self._next = now + TAKE_S
        changed = [peer.changed() for peer in self._peers]
        if any(changed):
            for tenant, row in self._rows.items():
                self._take(tenant, row)

    def _take(self, tenant: Tenant, row: int) -> None:
        running = 0
        for peer in self._peers:
            taken = peer.sheet.read_taken(row)
            running += taken.running
            known = peer.charged.get(row, 0.0)
            if taken.charged != known:
                tenant.charged_elsewhere(taken.charged - known)
                peer.charged[row] = taken.charged
        tenant.ledger.elsewhere = running

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
                cells = self._table.tenant_cells(row)
                tenant.ledger.share(cast("MutableSequence[float]", cells))
                for peer in self._peers:  # what was charged before it came is not held against it
                    peer.charged.setdefault(row, peer.sheet.read_taken(row).charged)
        self._rows = rows
        self._told = {tenant: told for tenant, told in self._told.items() if tenant in rows}
