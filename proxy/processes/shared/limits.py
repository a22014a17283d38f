"""Tenants' limits and fair shares, for all processes together.

The use of limits per minute is in memory that all processes write. Each process counts its own
requests in flight and adds the others' counts. Where requests in flight are limited, counts are
written and read at once, not at the end of a turn.

A tenant's position is the same in all processes: the sum of its charges in each process, and the
largest lift in any process. Both stay in the table when a process dies. Settled charges and
estimates of requests in flight are separate: lifts compare settled charges, and a dead process's
successor refunds the estimates.
"""

from __future__ import annotations

import logging
from collections.abc import MutableSequence
from operator import sub
from typing import cast

from proxy.core.queue.fairness import ShareCounters
from proxy.core.tenants.limits import TenantUsage
from proxy.core.tenants.tenants import ChangedTenants, Rank, Tenant, Tenants
from proxy.processes.shared.load import SharedLoad
from proxy.processes.shared.process_sheet import (
    LIFE,
    MAX_TENANTS,
    TENANT_CHANGES,
    ProcessSheet,
    TenantRow,
)
from proxy.processes.shared.shared_memory import Peers, SharedTable

logger = logging.getLogger(__name__)

READ_INTERVAL_S = 0.002
FULL_READ_INTERVAL_S = 2.0  # interval of reading all rows, whether marked as changed or not
FLOORS_ROW = MAX_TENANTS  # a pseudo row in the ring of changes
Sums = tuple[float, ...]
NONE: Sums = (0.0,) * 2 * len(Rank)


class LimitsPeer:
    def __init__(self, sheet: ProcessSheet) -> None:
        self.sheet = sheet
        self.life = self.changes = 0

    def changed(self) -> set[int] | None:
        """Return the changed rows; None if all rows must be read."""
        sheet = self.sheet
        self.changes, rows = sheet.changed_since(self.changes, TENANT_CHANGES)
        if (life := sheet.count(LIFE)) != self.life:
            self.life = life
            return None
        return rows


class SharedUsage:
    """A tenant's requests in flight, written and read at once; implements `RemoteUsage`."""

    def __init__(
        self, row: int, own: ProcessSheet, remote: Peers[ProcessSheet], ledger: TenantUsage
    ) -> None:
        self._row = row
        self._own = own
        self._remote = remote
        self._ledger = ledger

    def running(self) -> int:
        # With a part of the limit, other hosts have the other parts.
        sheets = self._remote.local if self._ledger.is_divided else self._remote
        return sum(sheet.read_running(self._row) for sheet in sheets)

    def publish(self, running: int) -> None:
        self._own.write_running(self._row, running)


class SharedLimits:
    def __init__(
        self, tenants: Tenants, shares: ShareCounters, table: SharedTable, shared_load: SharedLoad
    ) -> None:
        self._tenants = tenants
        self._shares = shares
        self._table = table
        self._sheet = shared_load.sheet
        self._peers = shared_load.peers_of(LimitsPeer)
        self._sheets = shared_load.peers_of(lambda sheet: sheet)
        self._edition = -1
        self._rows: dict[Tenant, int] = {}
        self._written: dict[Tenant, TenantRow] = {}
        self._remote: dict[Tenant, Sums] = {}  # `_sums` of all other processes, as last read
        self._floors: tuple[float, ...] = ()
        self._tenant_of: dict[int, Tenant] = {}  # by row
        self._watch = ChangedTenants()
        self._next = self._next_full_read = 0.0

    def publish(self) -> None:
        if self._edition != self._tenants.edition:
            self._assign_rows()
        for tenant in self._watch.pop_all():
            taken = _row_of(tenant)
            if tenant in self._rows and self._written[tenant] != taken:
                self._write(tenant, self._rows[tenant], taken)
        floors = tuple(self._shares.floors.values())
        if floors != self._floors:
            self._floors = floors
            self._sheet.write_floors(floors)
            self._sheet.mark_changed(FLOORS_ROW, TENANT_CHANGES)

    def _write(self, tenant: Tenant, row: int, taken: TenantRow) -> None:
        self._written[tenant] = taken
        self._sheet.write_usage(row, taken)
        self._sheet.mark_changed(row, TENANT_CHANGES)

    def read_peers(self, now: float) -> None:
        if self._edition != self._tenants.edition:
            self._assign_rows()
        if now < self._next:
            return
        self._next = now + READ_INTERVAL_S
        rows: set[int] = set()
        read_all = now >= self._next_full_read
        for peer in self._peers:
            if (changed := peer.changed()) is None:
                read_all = True
            else:
                rows |= changed
        if read_all:
            self._next_full_read = now + FULL_READ_INTERVAL_S
            rows = {*self._tenant_of, FLOORS_ROW}
        for row in rows:
            if (tenant := self._tenant_of.get(row)) is not None:
                self._read_tenant(tenant, row)
        if FLOORS_ROW in rows:
            floors = self._shares.floors
            for peer in self._peers:
                for rank, floor in zip(Rank, peer.sheet.read_floors(), strict=True):
                    floors[rank] = max(floors[rank], floor)

    def _read_tenant(self, tenant: Tenant, row: int) -> None:
        rows_read = [peer.sheet.read_usage(row) for peer in self._peers]
        counted = len(self._peers.local) if tenant.ledger.is_divided else len(rows_read)
        tenant.ledger.running_elsewhere = sum(peer_row.running for peer_row in rows_read[:counted])
        waits = 0
        for peer_row in rows_read:
            waits |= peer_row.waits
            for rank, lift in enumerate(peer_row.lifts):
                tenant.apply_lift(rank, lift)
        self._shares.set_remote_waits(tenant, waits)
        sums = (_sums(peer_row) for peer_row in rows_read)
        remote = tuple(map(sum, zip(*sums, strict=True))) or NONE
        if remote != (before_sums := self._remote[tenant]):
            self._remote[tenant] = remote
            grown = [total - before for total, before in zip(remote, before_sums, strict=True)]
            for rank in Rank:
                settled, unsettled = grown[rank], grown[len(Rank) + rank]
                tenant.apply_remote_charge(settled + unsettled, unsettled, rank)

    def _assign_rows(self) -> None:
        self._edition = self._tenants.edition
        rows: dict[Tenant, int] = {}
        for tenant in self._tenants:
            row = self._table.tenant_row(tenant.mark)
            if row is None:
                logger.error(
                    "tenant %s: more than %d tenants since the start; its limits apply to each "
                    "process separately",
                    tenant.name,
                    MAX_TENANTS,
                )
                continue
            rows[tenant] = row
            if tenant not in self._rows:
                self._restore_charges(tenant, row)
        for tenant in self._rows.keys() - rows.keys():
            del self._written[tenant], self._remote[tenant]
            tenant.watches.discard(self._watch)
            tenant.ledger.remote_usage = None
            self._shares.set_remote_waits(tenant, 0)
        self._rows = rows
        self._tenant_of = {row: tenant for tenant, row in rows.items()}

    def _restore_charges(self, tenant: Tenant, row: int) -> None:
        """Restore a tenant's charges after the tenant or a process was absent."""
        cells = self._table.tenant_cells(row)
        tenant.ledger.use_shared_cells(cast("MutableSequence[float]", cells))
        if self._sheets.local:  # other hosts are counted by the server, or have their parts
            tenant.ledger.remote_usage = SharedUsage(row, self._sheet, self._sheets, tenant.ledger)
        before = self._sheet.read_usage(row)
        for rank, share in enumerate(before.settled):
            tenant.charged[rank] += share
            tenant.apply_remote_charge(share, 0.0, rank)
            tenant.apply_lift(rank, before.lifts[rank])
        self._remote[tenant] = NONE
        tenant.watches.add(self._watch)
        self._write(tenant, row, _row_of(tenant))
        self._read_tenant(tenant, row)


def _sums(taken: TenantRow) -> Sums:
    return taken.settled + taken.unsettled


def _row_of(tenant: Tenant) -> TenantRow:
    settled = tuple(map(sub, tenant.charged, tenant.own_unsettled))
    lifts, unsettled = tuple(tenant.lifts), tuple(tenant.own_unsettled)
    return TenantRow(tenant.ledger.running, tenant.waits, settled, lifts, unsettled)
