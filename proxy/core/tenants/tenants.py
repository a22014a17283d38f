"""Tenants and their keys.

Keys are long and random, so plain SHA-256 hashes are enough. Digests are compared in constant time.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from hashlib import sha256

from xxhash import xxh3_64_intdigest

from proxy.core.learned.bytes_per_token import LearnedSizes
from proxy.core.tenants.limits import Limits, TenantUsage

SALT_PREFIX = b"vllm-sched cache\0"
NO_TENANT = 1  # the mark of requests without a tenant


class Rank(IntEnum):
    """Tenant classes by precedence."""

    INTERACTIVE = 0
    STANDARD = 1
    BATCH = 2  # when no other class waits


RANKS = {rank.name.lower(): rank for rank in Rank}


@dataclass(frozen=True, slots=True)
class TenantSpec:
    name: str
    rank: Rank = Rank.STANDARD
    weight: float = 1.0
    limits: Limits = field(default_factory=Limits)
    models: frozenset[str] | None = None  # None: all
    salted: bool = False  # separate prefix cache
    explain: bool = False  # may see workers
    ttft_s: float | None = None  # targets of its requests; None: its class's
    tpot_s: float | None = None


@dataclass(slots=True)
class TenantTotals:
    """Counters that outlive the tenant."""

    prompt_tokens: int = 0  # of finished requests
    output_tokens: int = 0
    limited: dict[str, int] = field(default_factory=dict)  # per limit


class ChangedTenants:
    def __init__(self) -> None:
        self.changed: set[Tenant] = set()

    def pop_all(self) -> set[Tenant]:
        changed, self.changed = self.changed, set()
        return changed


class Tenant:
    def __init__(self, spec: TenantSpec, totals: TenantTotals | None = None) -> None:
        self.spec = spec
        self.mark = xxh3_64_intdigest(spec.name.encode()) >> 1 or NO_TENANT  # on all hosts
        self.totals = totals or TenantTotals()
        self.ledger = TenantUsage(spec.limits)
        self.virtual = 0.0  # by weight, see `fairness`
        # Per class: charges of all processes that were not free, and lifts. The least is next.
        self.standings = [0.0] * len(Rank)
        self.charged = [0.0] * len(Rank)  # by this process
        # Estimates within `standings`: of all processes, and of this one.
        self.unsettled = [0.0] * len(Rank)
        self.own_unsettled = [0.0] * len(Rank)
        self.lifts = [0.0] * len(Rank)  # by any process
        # By model and route, the last used at the end.
        self.learned: dict[tuple[str, str], LearnedSizes] = {}
        self.beside_salted = False  # a tenant is salted: no client may set its own salt
        self.waiting = 0  # requests in the queue
        self.waits = 0  # a bit per class
        self.watches: set[ChangedTenants] = set()

    def __repr__(self) -> str:
        return f"<Tenant {self.spec.name}>"

    @property
    def name(self) -> str:
        return self.spec.name

    def notify_watches(self) -> None:
        for watch in self.watches:
            watch.changed.add(self)

    def settled(self, rank: int) -> float:
        return self.standings[rank] - self.unsettled[rank]

    def lift(self, rank: Rank, floor: float) -> None:
        if (lacks := floor - self.settled(rank)) > 0:
            self.apply_lift(rank, self.lifts[rank] + lacks)

    def apply_lift(self, rank: int, lift: float) -> None:
        if (grown := lift - self.lifts[rank]) > 0:
            self.lifts[rank] = lift
            self.standings[rank] += grown
            self.notify_watches()

    def charge(self, tokens: float, rank: Rank | None = None, *, free: bool = False) -> None:
        """Charge tokens; `free`: no other tenant waits."""
        share = tokens / self.spec.weight
        self.virtual += share
        if not free:
            rank = self.spec.rank if rank is None else rank
            self.standings[rank] += share
            self.charged[rank] += share
            self.notify_watches()

    def estimate(self, tokens: float, rank: Rank) -> float:
        """Mark charged tokens as an estimate; return their share."""
        share = tokens / self.spec.weight
        self.unsettled[rank] += share
        self.own_unsettled[rank] += share
        return share

    def settle(self, share: float, rank: Rank) -> None:
        self.unsettled[rank] -= share
        self.own_unsettled[rank] -= share
        self.notify_watches()

    def apply_remote_charge(self, share: float, unsettled: float, rank: int) -> None:
        self.virtual += share
        self.standings[rank] += share
        self.unsettled[rank] += unsettled
        self.notify_watches()

    def may_use(self, model: str) -> bool:
        models = self.spec.models
        return models is None or model in models

    def salt(self, own: str = "") -> str:
        """Return the cache salt; `own`: the client's.

        No secret is needed: clients cannot set another tenant's salt.
        """
        return sha256(SALT_PREFIX + f"{self.name}\0{own}".encode(errors="replace")).hexdigest()[:32]


class Tenants:
    def __init__(self) -> None:
        self.totals: dict[str, TenantTotals] = {}  # including removed tenants
        self._tenants: dict[str, Tenant] = {}
        self._keys: dict[bytes, tuple[bytes, Tenant]] = {}
        self.open = True
        self.edition = 0  # changes with each `replace`

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._tenants.values())

    def __len__(self) -> int:
        return len(self._tenants)

    def get(self, name: str) -> Tenant | None:
        return self._tenants.get(name)

    def replace(self, specs: Iterable[TenantSpec], keys: Mapping[bytes, str]) -> None:
        """Apply the operator's tenants; counters stay."""
        before, self._tenants = self._tenants, {}
        for spec in specs:
            tenant = before.get(spec.name)
            if tenant is None:
                tenant = Tenant(spec, self.totals.setdefault(spec.name, TenantTotals()))
            else:
                tenant.spec = spec
                tenant.ledger.set_limits(spec.limits)
            self._tenants[spec.name] = tenant
        beside = any(tenant.spec.salted for tenant in self)
        for tenant in self:
            tenant.beside_salted = beside
        self._keys = {digest: (digest, self._tenants[name]) for digest, name in keys.items()}
        self.open = not self._tenants
        self.edition += 1

    def find_by_key(self, presented: bytes) -> Tenant | None:
        digest = sha256(presented).digest()
        known, tenant = self._keys.get(digest, (b"", None))
        return tenant if hmac.compare_digest(known, digest) else None


def allowed_models(models: Iterable[str], tenant: Tenant | None) -> list[str]:
    """Return the models that a tenant may use; all of them without tenants."""
    return [model for model in models if tenant is None or tenant.may_use(model)]
