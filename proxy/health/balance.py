"""How busy prefill and decode workers are, and which side needs more workers.

Means over the last `MEMORY_S`, without draining workers.

- A prefill worker's busy share is its queued prefill time, relative to that plus a step's fixed
  time.
- A decode worker's busy share is the largest of: KV usage, slots in use, prefill work, and the
  increase of its step time relative to `MAX_STEP_S`. It is 1 if requests wait in its engine.
- Queued work counts as work for additional workers.

A side without workers that take requests is short.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp

from pydantic import BaseModel, Field

from proxy.core.fleet.slots import MAX_PAGE_AGE_S, share_taken
from proxy.core.fleet.worker import Worker
from proxy.core.model.role import Role
from proxy.core.router import Router

MEMORY_S = 30.0
SHORT_ABOVE, SPARE_BELOW = 0.8, 0.5  # busy shares
TARGET_BUSY = 0.7  # leaves room for a burst
MAX_STEP_S = 0.1  # faster than users read


class SideShown(BaseModel):
    """The prefill workers or the decode workers of a model."""

    workers: int
    busy: float = Field(description="share of the workers in use, over the last half minute")
    wanted: float = Field(description="number of workers for this load, with room for bursts")
    ahead_s: float = Field(0.0, description="seconds of queued prefills per worker, on average")
    step_s: float | None = Field(
        None, description="duration of a decode worker's step; null for prefill workers"
    )


class BalanceShown(BaseModel):
    """Prefill and decode workers of a model."""

    model: str
    prefill: SideShown
    decode: SideShown
    short: str = Field(description="prefill, decode, both or neither")
    advice: str


@dataclass(slots=True)
class SideLoad:
    """Moving means of busy shares and seconds."""

    at: float
    prefill: float = 0.0
    decode: float = 0.0
    prefill_ahead_s: float = 0.0
    decode_ahead_s: float = 0.0
    step_s: float = 0.0
    decode_queue: float = 0.0  # queued requests per running request, in the engine
    weight: float = 0.0  # of all samples; approaches 1

    def step(self, now: float) -> float:
        """Return the weight of a new sample, from the time since the last one."""
        share = 1.0 - exp((self.at - now) / MEMORY_S)
        self.at = now
        self.weight += share * (1.0 - self.weight)
        return share / self.weight if share else 0.0

    def draw(self, name: str, step: float, values: list[float]) -> None:
        before = getattr(self, name)
        setattr(self, name, before + step * (_mean(values) - before))


class Balance:
    """Measures the load of both sides of each model."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._seen: dict[str, SideLoad] = {}

    def sample(self, now: float) -> None:
        for model, prefills, decodes in self._sides():
            seen = self._seen.setdefault(model, SideLoad(now))
            step = seen.step(now)
            seen.draw("prefill", step, [_prefills(w) for w in prefills])
            seen.draw("decode", step, [_filled(w, now) for w in decodes])
            seen.draw("prefill_ahead_s", step, [_ahead_s(w) for w in prefills])
            seen.draw("decode_ahead_s", step, [_ahead_s(w) for w in decodes])
            seen.draw("step_s", step, [w.pace.step_s(w.num_decoding) for w in decodes])
            seen.draw("decode_queue", step, [_queue(w, now) for w in decodes])

    def shown(self) -> list[BalanceShown]:
        return [
            balance(model, len(prefills), len(decodes), seen)
            for model, prefills, decodes in self._sides()
            if (seen := self._seen.get(model)) is not None
        ]

    def _sides(self) -> list[tuple[str, list[Worker], list[Worker]]]:
        """Return the workers that take requests; an empty side only with a connector."""
        sides: dict[str, tuple[list[Worker], list[Worker]]] = {}
        for worker in self._router.fleet.roster:
            if worker.role in (Role.PREFILL, Role.DECODE):
                pair = sides.setdefault(worker.model, ([], []))
                if worker.up and not worker.draining:
                    pair[worker.role is Role.DECODE].append(worker)
        has_transfer = self._router.settings.transfer
        return [(model, *pair) for model, pair in sides.items() if has_transfer or all(pair)]


def balance(model: str, prefills: int, decodes: int, seen: SideLoad) -> BalanceShown:
    prefill = _side(prefills, seen.prefill, seen.prefill_ahead_s)
    decode = _side(decodes, seen.decode, seen.decode_ahead_s, seen.step_s, seen.decode_queue)
    sides = {"prefill": prefill, "decode": decode}
    short_sides = [name for name, side in sides.items() if not side.workers]
    if not short_sides:
        short_sides = [name for name, side in sides.items() if side.busy >= SHORT_ABOVE]
    if len(short_sides) == 1:
        [short] = short_sides
    else:
        short = "both" if short_sides else "neither"
    return BalanceShown(
        model=model,
        prefill=prefill,
        decode=decode,
        short=short,
        advice=_advice(short, prefill, decode),
    )


def _side(
    workers: int, busy: float, ahead_s: float, step_s: float | None = None, queue: float = 0.0
) -> SideShown:
    load = workers * (busy + queue + ahead_s / MEMORY_S)
    return SideShown(
        workers=workers,
        busy=round(busy, 3),
        wanted=round(load / TARGET_BUSY, 2),
        ahead_s=round(ahead_s, 3),
        step_s=None if step_s is None else round(step_s, 4),
    )


def _advice(short: str, prefill: SideShown, decode: SideShown) -> str:
    wanted = f"this load needs {prefill.wanted:g} prefill and {decode.wanted:g} decode workers"
    if not prefill.workers and not decode.workers:
        return "no prefill or decode worker takes requests"
    if not prefill.workers:
        return "no prefill worker takes requests: decode workers prefill all prompts"
    if not decode.workers:
        return "no decode worker takes requests: hand-overs are not possible"
    if short == "both":
        return f"both sides are short: {wanted}"
    if short == "neither":
        return f"neither side is short: {wanted}"
    other = decode if short == "prefill" else prefill
    name = "decode" if short == "prefill" else "prefill"
    spare = other.workers > 1 and other.busy < SPARE_BELOW
    move = f", and a {name} worker could become one" if spare else ""
    return f"{short} is short: one more {short} worker would help{move}; {wanted}"


def _prefills(worker: Worker) -> float:
    ahead_s = _ahead_s(worker)
    return ahead_s / (ahead_s + worker.pace.fixed_s)


def _ahead_s(worker: Worker) -> float:
    # `foreign_tokens`: prefills that this router did not send.
    return worker.pace.token_s * (worker.prefill_tokens + worker.foreign_tokens)


def _queue(worker: Worker, now: float) -> float:
    gauges = worker.gauges
    if gauges is None or now - gauges.at > MAX_PAGE_AGE_S:
        return 0.0
    return worker.queued / max(gauges.running, 1)


def _filled(worker: Worker, now: float) -> float:
    """Return a decode worker's busy share, without KV blocks that are still on the way."""
    gauges = worker.gauges
    kv_usage = 0.0 if gauges is None else gauges.kv_usage
    shares = [kv_usage, _prefills(worker), share_taken(worker, now)]
    if _queue(worker, now):
        return 1.0
    if worker.kv_capacity:
        shares.append((worker.kv_tokens - worker.kv_coming) / worker.kv_capacity)
    if worker.max_requests:
        shares.append(min(worker.requests, worker.sequences) / worker.max_requests)
    if worker.pace.steps:
        base_s = worker.pace.step_s(0)
        shares.append(
            (worker.pace.step_s(worker.num_decoding) - base_s) / max(MAX_STEP_S - base_s, base_s)
        )
    return min(max(shares), 1.0)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
