"""How busy prefill and decode workers were lately, and which side is short.

Looked at a few times a second, with a memory of half a minute. A prefill worker is busy while a
prompt is charged to it. A decode worker is as busy as its KV cache is full, or its places are
taken, whichever is more: those are what a further request waits for.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp
from typing import TYPE_CHECKING

from pydantic import BaseModel, Field

from proxy.core.types import Role

if TYPE_CHECKING:
    from proxy.core.router import Router
    from proxy.core.worker import Worker

MEMORY_S = 30.0
MUCH, LITTLE = 0.8, 0.5
WELL_USED = 0.7  # the share that leaves room for a burst


class SideShown(BaseModel):
    """Prefill workers, or decode workers."""

    workers: int
    busy: float = Field(description="share of them that was in use, over the last half minute")
    wanted: float = Field(description="workers that this load would use well")


class BalanceShown(BaseModel):
    """Both sides of a model's hand-overs."""

    model: str
    prefill: SideShown
    decode: SideShown
    short: str = Field(description="prefill, decode, both or neither")
    advice: str


@dataclass(slots=True)
class _Seen:
    at: float
    prefill: float = 0.0
    decode: float = 0.0


class Balance:
    """Watches both sides of each model."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._seen: dict[str, _Seen] = {}

    def look(self, now: float) -> None:
        """Take in how busy they are at this moment."""
        for model, prefills, decodes in self._sides():
            seen = self._seen.setdefault(model, _Seen(now))
            step = 1.0 - exp((seen.at - now) / MEMORY_S)
            seen.at = now
            seen.prefill += step * (
                _mean([float(w.prefill_tokens > 0) for w in prefills]) - seen.prefill
            )
            seen.decode += step * (_mean([_filled(w) for w in decodes]) - seen.decode)

    def shown(self) -> list[BalanceShown]:
        """Describe every model that has both sides."""
        return [
            balance(model, len(prefills), seen.prefill, len(decodes), seen.decode)
            for model, prefills, decodes in self._sides()
            if (seen := self._seen.get(model)) is not None
        ]

    def _sides(self) -> list[tuple[str, list[Worker], list[Worker]]]:
        sides: dict[str, tuple[list[Worker], list[Worker]]] = {}
        for worker in self._router.fleet:
            if worker.up and worker.role in (Role.PREFILL, Role.DECODE):
                pair = sides.setdefault(worker.model, ([], []))
                pair[worker.role is Role.DECODE].append(worker)
        return [(model, *pair) for model, pair in sides.items() if all(pair)]


def balance(
    model: str, prefills: int, prefill_busy: float, decodes: int, decode_busy: float
) -> BalanceShown:
    """Say which side is short."""
    prefill = _side(prefills, prefill_busy)
    decode = _side(decodes, decode_busy)
    short = "neither"
    if prefill_busy >= MUCH and decode_busy >= MUCH:
        short = "both"
    elif prefill_busy >= MUCH:
        short = "prefill"
    elif decode_busy >= MUCH:
        short = "decode"
    return BalanceShown(
        model=model,
        prefill=prefill,
        decode=decode,
        short=short,
        advice=_advice(short, prefill, decode),
    )


def _side(workers: int, busy: float) -> SideShown:
    return SideShown(
        workers=workers, busy=round(busy, 3), wanted=round(workers * busy / WELL_USED, 2)
    )


def _advice(short: str, prefill: SideShown, decode: SideShown) -> str:
    wanted = (
        f"this load would use {prefill.wanted:g} prefill and {decode.wanted:g} decode workers well"
    )
    if short == "both":
        return f"both sides are short: {wanted}"
    if short == "neither":
        return f"neither side is short: {wanted}"
    other = decode if short == "prefill" else prefill
    name = "decode" if short == "prefill" else "prefill"
    spare = other.workers > 1 and other.busy < LITTLE
    move = f", and a {name} worker could become one" if spare else ""
    return f"{short} is short: one more {short} worker would help{move}; {wanted}"


def _filled(worker: Worker) -> float:
    gauges = worker.gauges
    shares = [gauges.kv_usage if gauges is not None else 0.0]
    if worker.kv_capacity:
        shares.append(worker.kv_tokens / worker.kv_capacity)
    if worker.max_requests:
        shares.append(worker.requests / worker.max_requests)
    return min(max(shares), 1.0)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
