"""What the router itself tells of its hand-overs: its metrics, and each request's transfer."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from benchmarks.policies.promise import Promise
from proxy.core.model.types import Reason
from vllm_sched.bench.compare import report
from vllm_sched.bench.compare.compare import ComparisonPlan
from vllm_sched.bench.compare.workloads import LONG

TIMEOUT_S = 10.0
MOST = 1000  # decisions that a router tells at once
LOOKS, PAUSE_S = 300, 0.2  # for the first connection
SETTLED_S = 2.5  # the router reads its workers' counts each second
NEAR = 0.3  # a median that is predicted may be off by so much of it
FIRST = 3.0  # times the median, and the first transfer of all has paid no handshake
ROUNDED = 0.1  # whole blocks are moved, and tokens are estimated


@dataclass(frozen=True)
class Counts:
    """What a router's metrics have counted so far."""

    connections: float = 0.0  # made before anybody needed them
    transferred: float = 0.0
    timed: float = 0.0  # those of them whose time is told
    tokens: float = 0.0
    bytes: float = 0.0

    @classmethod
    def read(cls, page: str) -> Counts:
        """Read a router's /metrics."""
        return cls(
            total(page, "proxy_handover_warmups_total", outcome="done"),
            total(page, "proxy_handovers_total", outcome="transferred"),
            total(page, "proxy_transfer_seconds_count"),
            total(page, "proxy_transfer_tokens_total"),
            total(page, "proxy_transfer_bytes_total"),
        )


@dataclass(frozen=True)
class Moved:
    """What became of the long prompts."""

    before: Counts
    after: Counts
    sent: int
    warming: int  # of them, in the round that warms up
    handed_over: Sequence[Mapping[str, Any]]  # as /admin/decisions has them, oldest first
    token_bytes: int  # that the model's KV cache takes

    @property
    def missing(self) -> bool:
        """Whether a prompt came another way: then the figures are of something else."""
        return len(self.handed_over) < self.sent

    @property
    def promises(self) -> list[Promise]:
        """Judge them."""
        both = [each for each in self.handed_over if each["transferred_s"] is not None]
        fitted = both[self.warming :]  # what was predicted before anything was seen is no model's
        seen = report.percentile((each["transferred_s"] for each in fitted), 50)
        predicted = report.percentile((each["transfer_s"] for each in fitted), 50)
        first = both[0]["transferred_s"] if both else None
        counted = self.after.transferred - self.before.transferred
        tokens, moved = self.after.tokens - self.before.tokens, self.after.bytes - self.before.bytes
        each = f"{moved / counted / 1e6:.3g} MB each" if counted else "none"
        return [
            Promise(
                f"long prompts handed over, of {self.sent}", len(self.handed_over), None, self.sent
            ),
            Promise(
                f"of them counted in proxy_handovers and timed in proxy_transfer_seconds, of "
                f"{self.sent}",
                min(counted, self.after.timed - self.before.timed),
                at_least=self.sent,
            ),
            Promise(
                f"the median transfer as predicted ({report.show(predicted, report.SECONDS)}), "
                f"beside that seen ({report.show(seen, report.SECONDS)})",
                report.ratio_of(predicted, seen),
                1.0 + NEAR,
                1.0 - NEAR,
            ),
            Promise(
                f"bytes in proxy_transfer_bytes ({each}), beside those of the tokens handed over",
                report.ratio_of(moved, tokens * self.token_bytes),
                1.0 + ROUNDED,
                1.0 - ROUNDED,
            ),
            Promise(
                "connections made before the first request", self.before.connections, at_least=1
            ),
            Promise(
                f"the first transfer ({report.show(first, report.SECONDS)}), beside the median",
                report.ratio_of(first, seen),
                FIRST,
            ),
        ]


def total(page: str, name: str, **labels: str) -> float:
    """Add up the samples of a metric that have these labels."""
    found = re.findall(rf"^{name}(?:{{(.*)}})? (\S+)", page, re.MULTILINE)
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    return sum(float(value) for having, value in found if all(each in having for each in wanted))


async def connected(url: str) -> Counts:
    """Read a router's counts once it has made its first connection, or seems not to."""
    async with _session() as session:
        for _ in range(LOOKS):
            if (await _counts(session, url)).connections:
                break
            await asyncio.sleep(PAUSE_S)
        await asyncio.sleep(SETTLED_S)
        return await _counts(session, url)


async def told(
    url: str, admin: str, before: Counts, plan: ComparisonPlan, token_bytes: int
) -> Moved:
    """Ask a router what became of all long prompts that it was sent."""
    longs = [each for each in plan.workload.arrivals if each.klass == LONG]
    least = min((each.prompt_tokens for each in longs), default=0) // 2
    wanted = {"reason": Reason.HANDOVER.value, "limit": str(MOST)}
    async with _session() as session:
        await asyncio.sleep(SETTLED_S)
        after = await _counts(session, url)
        async with session.get(f"{admin}/admin/decisions", params=wanted) as answer:
            answer.raise_for_status()
            newest_first = await answer.json()
    decisions = [each for each in reversed(newest_first) if each["prompt_tokens"] > least]
    return Moved(before, after, (plan.rounds + 1) * len(longs), len(longs), decisions, token_bytes)


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S))


async def _counts(session: aiohttp.ClientSession, url: str) -> Counts:
    async with session.get(f"{url}/metrics") as answer:
        answer.raise_for_status()
        return Counts.read(await answer.text())
