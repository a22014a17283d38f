"""Who asks: tenants, known by their keys.

Of a key only its SHA-256 is kept. Keys are long and random (`vllm-sched key` makes them), so a
plain hash is as good as a slow one, which each request would pay for. A presented key is looked up
by its hash and compared in constant time: how long it takes tells nothing of the keys there are.
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
    """Whose turn comes first. Within one, tenants have shares."""

    INTERACTIVE = 0
    STANDARD = 1
    BATCH = 2  # in the gaps that the others leave


RANKS = {rank.name.lower(): rank for rank in Rank}


@dataclass(frozen=True, slots=True)
class TenantSpec:
    """What the operator states of a tenant."""

    name: str
    rank: Rank = Rank.STANDARD
    weight: float = 1.0
    limits: Limits = field(default_factory=Limits)
    models: frozenset[str] | None = None  # None: all
    salted: bool = False  # whether its prefixes are cached apart from others'
    explain: bool = False  # whether it may know of workers


@dataclass(slots=True)
class TenantTotals:
    """What was counted of a tenant since the router began; stays when the tenant goes."""

    prompt_tokens: int = 0  # of requests that are over
    output_tokens: int = 0
    limited: dict[str, int] = field(default_factory=dict)  # requests that met a limit, by which


class ChangedTenants:
    """Who has changed since somebody looked: so nobody need look at all there are."""

    __slots__ = ("changed",)

    def __init__(self) -> None:
        self.changed: set[Tenant] = set()

    def take(self) -> set[Tenant]:
        """Return them, and begin anew."""
        changed, self.changed = self.changed, set()
        return changed


class Tenant:
    """A tenant: its share, and what it has of it."""

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
        self.virtual = 0.0  # tokens it was served, by its weight: see `fairness`
        # By class, of these what others waited for, and what it was away for: whose is the least
        # goes next. They are the sum of the two below, and of what other processes charged.
        self.standings = [0.0] * len(Rank)
        self.charged = [0.0] * len(Rank)  # by this process, since ever, and not free
        # Of `standings`, the estimates of requests in flight: all of them, and this process's.
        self.unsettled = [0.0] * len(Rank)
        self.own_unsettled = [0.0] * len(Rank)
        self.lifts = [0.0] * len(Rank)  # what it was lifted by, anywhere
        # By model and route, the last used at the end: see `sizing`.
        self.learnt: dict[tuple[str, str], LearnedSizes] = {}
        self.beside_salted = False  # whether one of all is salted: no other may name its salt
        self.waiting = 0  # in the queue
        self.waits = 0  # a bit for each class in which it waits here
        self.watches: set[ChangedTenants] = set()  # that are told of each change

    def __repr__(self) -> str:
        """Name it."""
        return f"<Tenant {self.spec.name}>"

    @property
    def name(self) -> str:
        """What the operator calls it."""
        return self.spec.name

    def change(self) -> None:
        """Have those know who watch it: for whoever changes it but by its methods."""
        for watch in self.watches:
            watch.changed.add(self)

    def settled(self, rank: int) -> float:
        """Return the standing in a class without the estimates of requests in flight."""
        return self.standings[rank] - self.unsettled[rank]

    def lift(self, rank: Rank, floor: float) -> None:
        """Raise the settled standing in a class to the settled standings of others."""
        if (lacks := floor - self.settled(rank)) > 0:
            self.lifted_to(rank, self.lifts[rank] + lacks)

    def lifted_to(self, rank: int, lift: float) -> None:
        """Have been lifted by that in all, here or elsewhere: the same lift counts once."""
        if (grown := lift - self.lifts[rank]) > 0:
            self.lifts[rank] = lift
            self.standings[rank] += grown
            self.change()

    def charge(self, tokens: float, rank: Rank | None = None, *, free: bool = False) -> None:
        """Count tokens that it is served here, in a class; `free`: nobody waits for them."""
        share = tokens / self.spec.weight
        self.virtual += share
        if not free:
            rank = self.spec.rank if rank is None else rank
            self.standings[rank] += share
            self.charged[rank] += share
            self.change()

    def estimate(self, tokens: float, rank: Rank) -> float:
        """Mark tokens that were just charged as an estimate; return their share, for `settle`."""
        share = tokens / self.spec.weight
        self.unsettled[rank] += share
        self.own_unsettled[rank] += share
        return share

    def settle(self, share: float, rank: Rank) -> None:
        """Take a share for settled: its request has ended, and its usage is charged."""
        self.unsettled[rank] -= share
        self.own_unsettled[rank] -= share
        self.change()

    def charged_elsewhere(self, share: float, unsettled: float, rank: int) -> None:
        """Add what other processes charged, and by how much their estimates in flight changed."""
        self.virtual += share
        self.standings[rank] += share
        self.unsettled[rank] += unsettled
        self.change()

    def may_use(self, model: str) -> bool:
        """Whether a model is for it."""
        models = self.spec.models
        return models is None or model in models

    def salt(self, own: str = "") -> str:
        """Return what keeps its cached prefixes apart; `own` is a salt that the client gave.

        No secret is needed: where anybody is salted, no client sets it itself.
        """
        return sha256(SALTED + f"{self.name}\0{own}".encode(errors="replace")).hexdigest()[:32]


class Tenants:
    """All of them, and their keys. With none at all nobody is asked for a key."""

    def __init__(self) -> None:
        self.totals: dict[str, TenantTotals] = {}  # of those that are gone too
        self._tenants: dict[str, Tenant] = {}
        self._keys: dict[bytes, tuple[bytes, Tenant]] = {}
        self.open = True  # no keys
        self.edition = 0  # counts the changes: what was found before one must be looked up anew

    def __iter__(self) -> Iterator[Tenant]:
        """List them."""
        return iter(self._tenants.values())

    def __len__(self) -> int:
        """Count them."""
        return len(self._tenants)

    def get(self, name: str) -> Tenant | None:
        """Find one by its name."""
        return self._tenants.get(name)

    def replace(self, specs: Iterable[TenantSpec], keys: Mapping[bytes, str]) -> None:
        """Take what the operator states now; `keys` are hashes, and whose each is.

        Those that stay keep what was counted of them.
        """
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
        """Find whose key this is."""
        digest = sha256(presented).digest()
        known, tenant = self._keys.get(digest, (b"", None))
        return tenant if hmac.compare_digest(known, digest) else None
