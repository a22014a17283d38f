"""The router's records of its hand-overs: metrics, and the decision for each request."""

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
from vllm_sched.bench.results.stats import percentile

TIMEOUT_S = 10.0
MAX_DECISIONS = 1000  # that a router returns at once
POLLS, POLL_S = 300, 0.2  # for the first connection
SETTLE_S = 2.5  # the router reads its workers' counts each second
PREDICTION_TOLERANCE = 0.3  # of the median transfer time
MAX_FIRST_RATIO = 3.0  # first transfer to the median; more includes a handshake
BYTES_TOLERANCE = 0.1  # whole blocks are moved, and tokens are estimated


@dataclass(frozen=True)
class Counts:
    """Counters of a router's metrics."""

    connections: float = 0.0  # made before the first hand-over
    transferred: float = 0.0
    timed: float = 0.0  # transfers with a recorded time
    tokens: float = 0.0
    bytes: float = 0.0

    @classmethod
    def read(cls, page: str) -> Counts:
        """Parse a router's /metrics."""
        return cls(
            total(page, "proxy_handover_warmups_total", outcome="done"),
            total(page, "proxy_handovers_total", outcome="transferred"),
            total(page, "proxy_transfer_seconds_count"),
            total(page, "proxy_transfer_tokens_total"),
            total(page, "proxy_transfer_bytes_total"),
        )


@dataclass(frozen=True)
class Transfers:
    """The hand-overs of the long prompts."""

    before: Counts
    after: Counts
    sent: int
    warming: int  # sent in the warm-up round
    handed_over: Sequence[Mapping[str, Any]]  # from /admin/decisions, oldest first
    token_bytes: int  # KV cache per token

    @property
    def missing(self) -> bool:
        """True if a long prompt was not handed over, which makes the figures invalid."""
        return len(self.handed_over) < self.sent

    @property
    def promises(self) -> list[Promise]:
        """The measured values beside their bounds."""
        both = [decision for decision in self.handed_over if decision["transferred_s"] is not None]
        fitted = both[self.warming :]  # earlier predictions are from an unfitted model
        seen = percentile((decision["transferred_s"] for decision in fitted), 50)
        predicted = percentile((decision["transfer_s"] for decision in fitted), 50)
        first = both[0]["transferred_s"] if both else None
        counted = self.after.transferred - self.before.transferred
        tokens, moved = self.after.tokens - self.before.tokens, self.after.bytes - self.before.bytes
        size = f"{moved / counted / 1e6:.3g} MB each" if counted else "none"
        return [
            Promise(
                f"long prompts handed over, of {self.sent}", len(self.handed_over), None, self.sent
            ),
            Promise(
                f"counted in proxy_handovers and timed in proxy_transfer_seconds, of {self.sent}",
                min(counted, self.after.timed - self.before.timed),
                at_least=self.sent,
            ),
            Promise(
                f"predicted median transfer ({report.show(predicted, report.SECONDS)}), "
                f"to the measured one ({report.show(seen, report.SECONDS)})",
                report.ratio_of(predicted, seen),
                1.0 + PREDICTION_TOLERANCE,
                1.0 - PREDICTION_TOLERANCE,
            ),
            Promise(
                f"bytes in proxy_transfer_bytes ({size}), to those of the tokens handed over",
                report.ratio_of(moved, tokens * self.token_bytes),
                1.0 + BYTES_TOLERANCE,
                1.0 - BYTES_TOLERANCE,
            ),
            Promise(
                "connections made before the first request", self.before.connections, at_least=1
            ),
            Promise(
                f"the first transfer ({report.show(first, report.SECONDS)}), to the median",
                report.ratio_of(first, seen),
                MAX_FIRST_RATIO,
            ),
        ]


def total(page: str, name: str, **labels: str) -> float:
    """Return the sum of the samples of a metric that have these labels."""
    samples = re.findall(rf"^{name}(?:{{(.*)}})? (\S+)", page, re.MULTILINE)
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    return sum(
        float(value) for having, value in samples if all(label in having for label in wanted)
    )


async def wait_connected(url: str) -> Counts:
    """Return a router's counts once it has a connection, or after POLLS polls."""
    async with _session() as session:
        for _ in range(POLLS):
            if (await _counts(session, url)).connections:
                break
            await asyncio.sleep(POLL_S)
        await asyncio.sleep(SETTLE_S)
        return await _counts(session, url)


async def fetch(
    url: str, admin: str, before: Counts, plan: ComparisonPlan, token_bytes: int
) -> Transfers:
    """Return the hand-overs of all long prompts sent since `before`."""
    longs = [arrival for arrival in plan.workload.arrivals if arrival.klass == LONG]
    min_tokens = min((arrival.prompt_tokens for arrival in longs), default=0) // 2
    query = {"reason": Reason.HANDOVER.value, "limit": str(MAX_DECISIONS)}
    async with _session() as session:
        await asyncio.sleep(SETTLE_S)
        after = await _counts(session, url)
        async with session.get(f"{admin}/admin/decisions", params=query) as answer:
            answer.raise_for_status()
            newest_first = await answer.json()
    decisions = [
        decision for decision in reversed(newest_first) if decision["prompt_tokens"] > min_tokens
    ]
    sent = (plan.rounds + 1) * len(longs)
    return Transfers(before, after, sent, len(longs), decisions, token_bytes)


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S))


async def _counts(session: aiohttp.ClientSession, url: str) -> Counts:
    async with session.get(f"{url}/metrics") as answer:
        answer.raise_for_status()
        return Counts.read(await answer.text())
