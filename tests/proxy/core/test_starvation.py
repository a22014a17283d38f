"""Waits of tenants with one request at a time beside a flood, in virtual time.

A request runs in proportion to the tokens that it is finally charged for. The estimate at its
placement may be anything.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from itertools import count

from hypothesis import example, given, settings
from hypothesis import strategies as st

from proxy.core.fleet.leases import Lease
from proxy.core.model.types import Outcome, Refusal, RequestInfo, Usage
from proxy.core.queue.ticket import Ticket
from proxy.core.tenants.tenants import Tenant, TenantSpec
from tests.proxy.core.making import make_info, router_of, spec


@dataclass(frozen=True)
class Size:
    """The true size of a request, and the factor of its estimate."""

    prompt: int
    output: int
    error: float

    @property
    def runs(self) -> float:
        """The run time, which equals the tokens charged."""
        return self.prompt + 2.0 * self.output


@dataclass
class World:
    """A worker with a few slots, a tenant that fills the queue, and tenants that do not."""

    places: int
    flood: list[Size]
    polite: list[Size]
    depth: int = 14  # waiting requests of the flood
    now: float = 0.0
    waited: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.router = router_of(
            spec("w", most=self.places), queue_wait_s=1e12, queue_requests=10**6
        )
        self.flooder = Tenant(TenantSpec("flooder"))
        self.others = [Tenant(TenantSpec(f"polite{i}")) for i in range(len(self.polite))]
        self.running: list[tuple[float, int, Lease, Size]] = []
        self.tickets: dict[Ticket, tuple[Size, float]] = {}
        self.numbers = count()

    def ask(self, tenant: Tenant, size: Size) -> None:
        info: RequestInfo = make_info(max(int(size.prompt * size.error), 1), size.output + 1)
        info.expected_output = int(size.output * size.error)
        info.tenant, info.rank = tenant, tenant.spec.rank
        answer = self.router.submit(info, self.now)
        assert not isinstance(answer, Refusal), answer
        if isinstance(answer, Ticket):
            self.tickets[answer] = size, self.now
        else:
            self.begin(answer, size, self.now)

    def begin(self, lease: Lease, size: Size, since: float) -> None:
        heapq.heappush(self.running, (self.now + size.runs, next(self.numbers), lease, size))
        if lease.info.tenant is not self.flooder:
            self.waited.append(self.now - since)

    def refill(self, turn: int) -> None:
        while self.flooder.waiting < self.depth:
            self.ask(self.flooder, self.flood[(turn + self.flooder.waiting) % len(self.flood)])

    def play(self, ends: int, quiet: int) -> None:
        """End this many requests; the other tenants come after the first `quiet` ends."""
        for turn in range(ends):
            self.refill(turn)
            if turn == quiet:
                for tenant, size in zip(self.others, self.polite, strict=True):
                    self.ask(tenant, size)
            self.now, _, lease, size = heapq.heappop(self.running)
            usage = Usage(size.prompt, size.output)
            self.router.leases.finish(lease, self.now, Outcome.DONE, usage)
            for ticket, answer in self.router.pop_due(self.now):
                assert isinstance(answer, Lease), answer
                self.begin(answer, *self.tickets.pop(ticket))
            if lease.info.tenant is not self.flooder and lease.info.tenant is not None:
                self.ask(lease.info.tenant, size)
        since = [at for ticket, (_, at) in self.tickets.items() if self.is_polite(ticket)]
        self.waited += [self.now - at for at in since]

    def is_polite(self, ticket: Ticket) -> bool:
        return ticket.info.tenant is not self.flooder

    @property
    def longest(self) -> float:
        return max(size.runs for size in (*self.flood, *self.polite))


ERRORS = st.sampled_from([0.01, 0.1, 0.5, 1.0, 2.0, 20.0, 200.0])
SIZES = st.builds(Size, st.integers(1, 2000), st.integers(0, 500), ERRORS)


@given(st.integers(1, 12), st.lists(SIZES, min_size=1, max_size=6), SIZES, st.integers(0, 30))
@example(12, [Size(540, 10, 170.0)], Size(100, 20, 1.0), 30)
@settings(deadline=None, max_examples=50)
def test_single_requests_wait_for_two_requests_at_most(
    places: int, flood: list[Size], polite: Size, quiet: int
) -> None:
    world = World(places, flood, [polite])
    world.play(150, quiet)
    assert world.waited
    assert max(world.waited) <= 2 * world.longest + 1e-6


def test_overestimated_flood_starves_no_later_tenant() -> None:
    """Ninety tiny images, estimated at 1,024 tokens each, and a small chat."""
    world = World(16, [Size(540, 10, 170.0)], [Size(100, 20, 1.0)], depth=134)
    world.play(300, 50)
    assert max(world.waited) <= world.longest


def test_overestimates_earn_no_share() -> None:
    """Its requests in flight end with far fewer tokens than were charged."""
    world = World(4, [Size(100, 0, 1.0)], [Size(100, 0, 1.0)])
    world.play(400, 10)
    router, late = world.router, Tenant(TenantSpec("late"))
    for _ in range(20):
        info = make_info(100_000, 1)
        info.expected_output = 0
        info.tenant = late
        answer = router.submit(info, world.now)
        assert isinstance(answer, Ticket)
        world.tickets[answer] = Size(100, 0, 1000.0), world.now
    world.play(60, -1)
    names = [entry[2].info.tenant for entry in world.running]
    assert late in names
    assert len(set(names)) == 3, "no tenant has all slots"
