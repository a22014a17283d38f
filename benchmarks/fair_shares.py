"""Simulate what fair shares give a tenant while another tenant overloads the fleet.

    python -m benchmarks.fair_shares

The router's core places requests on workers with fixed slots and speeds, in virtual time. The flood
sends 1.5 times what the fleet can serve, the chat a twentieth of that, and the nightly job always
has requests. They run as one tenant, as three of one class, and as three of different classes.
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections import Counter, defaultdict
from itertools import count

from proxy.core.fleet.charges import idle_fleet
from proxy.core.fleet.leases import Lease
from proxy.core.model.role import Role
from proxy.core.model.specs import WorkerSpec
from proxy.core.model.types import Outcome, Refusal, RequestInfo, Usage
from proxy.core.queue.ticket import Ticket
from proxy.core.router import Router, RouterSettings
from proxy.core.tenants.tenants import Rank, Tenant, TenantSpec

MODEL, WORKERS, SLOTS = "m", 4, 16
PREFILL_S, STEP_S = 1 / 20_000, 0.02  # per prompt token, per output token
# Prompt tokens, output tokens, requests/s
FLOOD, CHAT, JOB = (1500, 200, 22.0), (300, 100, 1.0), (2000, 300, 3.0)
LOADS = {"flood": FLOOD, "chat": CHAT, "job": JOB}
CLASSES = {"flood": Rank.STANDARD, "chat": Rank.INTERACTIVE, "job": Rank.BATCH}


def make_router() -> Router:
    """Return a router of WORKERS workers with SLOTS slots each."""
    fleet = idle_fleet(
        WorkerSpec(f"w{number}", f"http://w{number}", Role.GENERAL, MODEL, 65_536, SLOTS)
        for number in range(WORKERS)
    )
    return Router(RouterSettings(queue_requests=1024, queue_wait_s=30.0), fleet)


def make_request(number: int, prompt: int, output: int, tenant: Tenant | None) -> RequestInfo:
    request = RequestInfo(
        str(number), "chat/completions", MODEL, prompt * 4, prompt, 0, prompt, output, output
    )
    request.counted = request.stream = True
    request.tenant = tenant
    if tenant is not None:
        request.rank = tenant.spec.rank
    return request


class Run:
    """One simulation, and the waits, refusals and tokens of each load."""

    def __init__(self, tenants: dict[str, Tenant] | None, seconds: float, seed: int) -> None:
        self.router = make_router()
        self.tenants = tenants
        self.seconds = seconds
        self.random = random.Random(seed)
        self.waits: dict[str, list[float]] = defaultdict(list)
        self.refused: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.load_of: dict[str, str] = {}  # by request id
        self.events: list[tuple[float, int, str, Lease | None]] = []
        self.numbers = count()

    def simulate(self) -> None:
        for name, (_, _, rate) in LOADS.items():
            self.schedule(self.random.expovariate(rate), name)
        while self.events and self.events[0][0] < self.seconds:
            now, _, name, lease = heapq.heappop(self.events)
            if lease is None:
                self.submit(now, name)
            else:
                self.finish(now, lease)
            for ticket, answer in self.router.pop_due(now):
                self.start_or_refuse(now, ticket.info, answer, now - ticket.since)

    def schedule(self, at: float, name: str, lease: Lease | None = None) -> None:
        """Add the arrival of a request, or the end of one that has a lease."""
        heapq.heappush(self.events, (at, next(self.numbers), name, lease))

    def submit(self, now: float, name: str) -> None:
        """Submit a request and schedule the next arrival of its load."""
        prompt, output, rate = LOADS[name]
        self.schedule(now + self.random.expovariate(rate), name)
        tenant = self.tenants[name] if self.tenants else None
        request = make_request(next(self.numbers), prompt, output, tenant)
        self.load_of[request.id] = name
        answer = self.router.submit(request, now)
        if not isinstance(answer, Ticket):
            self.start_or_refuse(now, request, answer, 0.0)

    def start_or_refuse(
        self, now: float, request: RequestInfo, answer: Lease | Refusal, wait: float
    ) -> None:
        """Schedule the end of a placed request, or count a refused one."""
        name = self.load_of[request.id]
        if isinstance(answer, Refusal):
            self.refused[name] += 1
            return
        self.waits[name].append(wait)
        first = now + PREFILL_S * request.prompt_tokens
        self.router.leases.record_first_token(answer, first)
        self.schedule(first + STEP_S * (request.output_tokens or 0), name, answer)

    def finish(self, now: float, lease: Lease) -> None:
        request = lease.info
        output = request.output_tokens or 0
        self.router.leases.record_tokens(lease, output)
        self.router.leases.finish(lease, now, Outcome.DONE, Usage(request.prompt_tokens, output))
        self.tokens[self.load_of[request.id]] += request.prompt_tokens + output

    def print_results(self, what: str) -> None:
        for name in LOADS:
            waits = sorted(self.waits[name]) or [float("nan")]
            middle, tail = waits[len(waits) // 2], waits[int(len(waits) * 0.99)]
            print(
                f"{what:20} {name:6} {len(waits):6} served {self.refused[name]:6} refused   "
                f"wait p50 {middle:6.2f} p99 {tail:6.2f} s   "
                f"{self.tokens[name] / self.seconds:8.0f} tokens/s"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description="simulate fair shares while a tenant floods")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    alike = {name: Tenant(TenantSpec(name)) for name in LOADS}
    ranked = {name: Tenant(TenantSpec(name, rank)) for name, rank in CLASSES.items()}
    for what, tenants in (("one tenant", None), ("three", alike), ("with classes", ranked)):
        run = Run(tenants, args.seconds, args.seed)
        run.simulate()
        run.print_results(what)


if __name__ == "__main__":
    main()
