"""Tenants and their keys.

Only SHA-256 hashes of keys are kept. Keys are long and random (`vllm-sched key`), so a slow hash is
unnecessary. Digests are compared in constant time.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from hashlib import sha256

from proxy.core.learned.bytes_per_token import LearnedSizes
from proxy.core.tenants.limits import Limits, TenantUsage

SALTED = b"vllm-sched cache\0"


class Rank(IntEnum):
    """Tenant classes by precedence. Within a class, tenants have shares."""

    INTERACTIVE = 0
    STANDARD = 1
    BATCH = 2  # when no other class waits


RANKS = {rank.name.lower(): rank for rank in Rank}


@dataclass(frozen=True, slots=True)
class TenantSpec:
    """A tenant as the operator configures it."""

    name: str
    rank: Rank = Rank.STANDARD
    weight: float = 1.0
    limits: Limits = field(default_factory=Limits)
    models: frozenset[str] | None = None  # None: all
    salted: bool = False  # separate prefix cache
    explain: bool = False  # may see workers


@dataclass(slots=True)
class TenantTotals:
    """Counters of a tenant, kept after its removal."""

    prompt_tokens: int = 0  # of finished requests
    output_tokens: int = 0
    limited: dict[str, int] = field(default_factory=dict)  # per limit


class ChangedTenants:
    """Tenants that changed since the last look."""

    __slots__ = ("changed",)

    def __init__(self) -> None:
        self.changed: set[Tenant] = set()

    def take(self) -> set[Tenant]:
        """Return and clear them."""
        changed, self.changed = self.changed, set()
        return changed


class Tenant:
    """A tenant, its share and its usage."""

    __slots__ = (
        "beside_salted",
        "charged",
        "learnt",
        "ledger",
        "lifts",
        "own_unsettled",
        "spec",
        "standings",
        "totals",
        "unsettled",
        "virtual",
        "waiting",
        "waits",
        "watches",
    )

    def __init__(self, spec: TenantSpec, totals: TenantTotals | None = None) -> None:
        self.spec = spec
        self.totals = totals or TenantTotals()
        self.ledger = TenantUsage(spec.limits)
        self.virtual = 0.0  # tokens served by weight: see `fairness`
        # Per class: contended charges and lifts, of all processes. The least standing is next.
        self.standings = [0.0] * len(Rank)
        self.charged = [0.0] * len(Rank)  # by this process, not free
        # The estimated part of `standings`: in all processes, and in this one.
        self.unsettled = [0.0] * len(Rank)
        self.own_unsettled = [0.0] * len(Rank)
        self.lifts = [0.0] * len(Rank)  # by any process
        # By model and route, the last used at the end: see `sizing`.
        self.learnt: dict[tuple[str, str], LearnedSizes] = {}
        self.beside_salted = False  # no other tenant may set its own salt
        self.waiting = 0  # in the queue
        self.waits = 0  # a bit per class
        self.watches: set[ChangedTenants] = set()  # get each change

    def __repr__(self) -> str:
        """Return the name."""
        return f"<Tenant {self.spec.name}>"

    @property
    def name(self) -> str:
        """The configured name."""
        return self.spec.name

    def change(self) -> None:
        """Notify the watches, after a direct change."""
        for watch in self.watches:
            watch.changed.add(self)

    def settled(self, rank: int) -> float:
        """Return the standing in a class without estimates in flight."""
        return self.standings[rank] - self.unsettled[rank]

    def lift(self, rank: Rank, floor: float) -> None:
        """Raise the settled standing in a class to `floor`."""
        if (lacks := floor - self.settled(rank)) > 0:
            self.lifted_to(rank, self.lifts[rank] + lacks)

    def lifted_to(self, rank: int, lift: float) -> None:
        """Apply a total lift of any process once."""
        if (grown := lift - self.lifts[rank]) > 0:
            self.lifts[rank] = lift
            self.standings[rank] += grown
            self.change()

    def charge(self, tokens: float, rank: Rank | None = None, *, free: bool = False) -> None:
        """Charge tokens; `free`: no other tenant waits."""
        share = tokens / self.spec.weight
        self.virtual += share
        if not free:
            rank = self.spec.rank if rank is None else rank
            self.standings[rank] += share
            self.charged[rank] += share
            self.change()

    def estimate(self, tokens: float, rank: Rank) -> float:
        """Mark charged tokens as an estimate; return their share, for `settle`."""
        share = tokens / self.spec.weight
        self.unsettled[rank] += share
        self.own_unsettled[rank] += share
        return share

    def settle(self, share: float, rank: Rank) -> None:
        """Settle the share of a finished request."""
        self.unsettled[rank] -= share
        self.own_unsettled[rank] -= share
        self.change()

    def charged_elsewhere(self, share: float, unsettled: float, rank: int) -> None:
        """Add other processes' charges and estimates."""
        self.virtual += share
        self.standings[rank] += share
        self.unsettled[rank] += unsettled
        self.change()

    def may_use(self, model: str) -> bool:
        """Return whether it may use a model."""
        models = self.spec.models
        return models is None or model in models

    def salt(self, own: str = "") -> str:
        """Return the cache salt; `own`: the client's salt.

        No secret is needed: with salted tenants no client sets the salt.
        """
        return sha256(SALTED + f"{self.name}\0{own}".encode(errors="replace")).hexdigest()[:32]


class Tenants:
    """All tenants and their keys. Without any, no key is needed."""

    def __init__(self) -> None:
        self.totals: dict[str, TenantTotals] = {}  # including removed tenants
        self._tenants: dict[str, Tenant] = {}
        self._keys: dict[bytes, tuple[bytes, Tenant]] = {}
        self.open = True  # no keys
        self.edition = 0  # changes with each `replace`

    def __iter__(self) -> Iterator[Tenant]:
        """Iterate over the tenants."""
        return iter(self._tenants.values())

    def __len__(self) -> int:
        """Return the number of tenants."""
        return len(self._tenants)

    def get(self, name: str) -> Tenant | None:
        """Return a tenant by name."""
        return self._tenants.get(name)

    def replace(self, specs: Iterable[TenantSpec], keys: Mapping[bytes, str]) -> None:
        """Apply the operator's tenants, with hashed keys by name; counters stay."""
        before, self._tenants = self._tenants, {}
        for spec in specs:
            tenant = before.get(spec.name)
            if tenant is None:
                tenant = Tenant(spec, self.totals.setdefault(spec.name, TenantTotals()))
            else:
                tenant.spec = spec
                tenant.ledger.limit(spec.limits)
            self._tenants[spec.name] = tenant
        beside = any(tenant.spec.salted for tenant in self)
        for tenant in self:
            tenant.beside_salted = beside
        self._keys = {digest: (digest, self._tenants[name]) for digest, name in keys.items()}
        self.open = not self._tenants
        self.edition += 1

    def of_key(self, presented: bytes) -> Tenant | None:
        """Return the tenant of a key."""
        digest = sha256(presented).digest()
        known, tenant = self._keys.get(digest, (b"", None))
        return tenant if hmac.compare_digest(known, digest) else None
