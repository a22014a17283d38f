"""What shares are worth to a tenant whose neighbour floods the fleet; in virtual time.

    python -m benchmarks.fair_shares

The router's own core, and workers that take so many requests and so long for each. A crowd asks for
half as much again as the fleet can do; a chat beside it asks for a twentieth of that, and a nightly
job always has more. Once as one tenant, once as three of the same class, once with their classes.
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections import Counter, defaultdict
from itertools import count

from proxy.core.fleet.charges import Fleet
from proxy.core.fleet.leases import Lease
from proxy.core.model.role import Role
from proxy.core.model.specs import WorkerSpec
from proxy.core.model.types import Outcome, Refusal, RequestInfo, Usage
from proxy.core.queue.ticket import Ticket
from proxy.core.router import Router, RouterSettings
from proxy.core.tenants.tenants import Rank, Tenant, TenantSpec

MODEL, WORKERS, PLACES = "m", 4, 16
PREFILL_S, STEP_S = 1 / 20_000, 0.02  # a token of prompt, and one of output
# prompt, output, and how many a second
CROWD, CHAT, JOB = (1500, 200, 22.0), (300, 100, 1.0), (2000, 300, 3.0)
LOADS = {"crowd": CROWD, "chat": CHAT, "job": JOB}
CLASSES = {"crowd": Rank.STANDARD, "chat": Rank.INTERACTIVE, "job": Rank.BATCH}


def make_router() -> Router:
    """Make a fleet with so many places."""
    fleet = Fleet()
    for number in range(WORKERS):
        spec = WorkerSpec(f"w{number}", f"http://w{number}", Role.GENERAL, MODEL, 65_536, PLACES)
        fleet.roster.add(spec)
        fleet.health.probe_ok(spec.name, 0.0)
    return Router(RouterSettings(queue_requests=1024, queue_wait_s=30.0), fleet)


def asked(number: int, prompt: int, output: int, tenant: Tenant | None) -> RequestInfo:
    """Write a request of that size."""
    one = RequestInfo(
        str(number), "chat/completions", MODEL, prompt * 4, prompt, 0, prompt, output, output
    )
    one.counted = one.stream = True
    one.tenant = tenant
    if tenant is not None:
        one.rank = tenant.spec.rank
    return one


class Play:
    """One run: who came, who waited for how long, who was sent away."""

    def __init__(self, tenants: dict[str, Tenant] | None, seconds: float, seed: int) -> None:
        self.router = make_router()
        self.tenants = tenants
        self.seconds = seconds
        self.random = random.Random(seed)
        self.waits: dict[str, list[float]] = defaultdict(list)
        self.lost: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.whose: dict[str, str] = {}
        self.events: list[tuple[float, int, str, Lease | None]] = []
        self.numbers = count()

    def run(self) -> None:
        """Play it to its end."""
        for name, (_, _, rate) in LOADS.items():
            self.later(self.random.expovariate(rate), name)
        while self.events and self.events[0][0] < self.seconds:
            now, _, name, lease = heapq.heappop(self.events)
            if lease is None:
                self.comes(now, name)
            else:
                self.ends(now, lease)
            for ticket, answer in self.router.due(now):
                self.answered(now, ticket.ask, answer, now - ticket.since)

    def later(self, at: float, name: str, lease: Lease | None = None) -> None:
        """Note what will happen."""
        heapq.heappush(self.events, (at, next(self.numbers), name, lease))

    def comes(self, now: float, name: str) -> None:
        """Let a request come, and know when the next does."""
        prompt, output, rate = LOADS[name]
        self.later(now + self.random.expovariate(rate), name)
        tenant = self.tenants[name] if self.tenants else None
        one = asked(next(self.numbers), prompt, output, tenant)
        self.whose[one.id] = name
        answer = self.router.submit(one, now)
        if not isinstance(answer, Ticket):
            self.answered(now, one, answer, 0.0)

    def answered(self, now: float, one: RequestInfo, answer: Lease | Refusal, wait: float) -> None:
        """Begin what was placed, and count what was not."""
        name = self.whose[one.id]
        if isinstance(answer, Refusal):
            self.lost[name] += 1
            return
        self.waits[name].append(wait)
        first = now + PREFILL_S * one.prompt_tokens
        self.router.leases.first_token(answer, first)
        self.later(first + STEP_S * (one.output_tokens or 0), name, answer)

    def ends(self, now: float, lease: Lease) -> None:
        """Have it done."""
        one = lease.ask
        output = one.output_tokens or 0
        self.router.leases.tokens(lease, output)
        self.router.leases.finish(lease, now, Outcome.DONE, Usage(one.prompt_tokens, output))
        self.tokens[self.whose[one.id]] += one.prompt_tokens + output

    def told(self, what: str) -> None:
        """Print what became of each."""
        for name in LOADS:
            waits = sorted(self.waits[name]) or [float("nan")]
            middle, tail = waits[len(waits) // 2], waits[int(len(waits) * 0.99)]
            print(
                f"{what:20} {name:6} {len(waits):6} served {self.lost[name]:6} refused   "
                f"wait p50 {middle:6.2f} p99 {tail:6.2f} s   "
                f"{self.tokens[name] / self.seconds:8.0f} tokens/s"
            )


def main() -> None:
    """Play all three."""
    parser = argparse.ArgumentParser(description="what shares are worth beside a flood")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    alike = {name: Tenant(TenantSpec(name)) for name in LOADS}
    ranked = {name: Tenant(TenantSpec(name, rank)) for name, rank in CLASSES.items()}
    for what, tenants in (("one tenant", None), ("three", alike), ("with classes", ranked)):
        play = Play(tenants, given.seconds, given.seed)
        play.run()
        play.told(what)


if __name__ == "__main__":
    main()
