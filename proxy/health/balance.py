"""How busy prefill and decode workers were lately, and which side is short.

All of it in seconds of their time, so that what a token costs there counts. Looked at a few times a
second, with a memory of half a minute, or of all the time since the first look. Who drains is not
counted: its share of the load is the others' from then on.

A prefill worker is busy while it has prefill work, but for what of that takes the same however much
it is: a step that computes little has room for more, and many short prompts that never leave a
worker without one are not yet too many. What lies ahead of it has to be done as well, so the
seconds of it, per half minute, are work for more workers. A decode worker is as busy as the most of
these says: how full its KV cache is; how many of its places are taken, and of its engine's seats,
for want of which hand-overs wait in the router; how much it prefills, reckoned as for prefill
workers, which those who decode there wait for; whether others wait for a place in its own queue;
and how much longer its steps are for those it decodes, of what they may be: a tenth of a second, or
twice as long as for none. Those who wait there, in shares of those who run, are work for more
workers.

A side of which nobody takes requests is short, whoever is busy.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp
from typing import TYPE_CHECKING

from pydantic import BaseModel, Field

from proxy.core.fleet.slots import MAX_PAGE_AGE_S, share_taken
from proxy.core.model.role import Role

if TYPE_CHECKING:
    from proxy.core.fleet.worker import Worker
    from proxy.core.router import Router

MEMORY_S = 30.0
MUCH, LITTLE = 0.8, 0.5
WELL_USED = 0.7  # the share that leaves room for a burst
STEP_S = 0.1  # in which those who read along don't notice that it takes any time


class SideShown(BaseModel):
    """Prefill workers, or decode workers."""

    workers: int
    busy: float = Field(description="share of them that was in use, over the last half minute")
    wanted: float = Field(description="workers that this load would use well")
    ahead_s: float = Field(0.0, description="seconds of prefills that wait on each, on average")
    step_s: float | None = Field(
        None, description="what a step takes a decode worker; null for prefill workers"
    )


class BalanceShown(BaseModel):
    """Both sides of a model's hand-overs."""

    model: str
    prefill: SideShown
    decode: SideShown
    short: str = Field(description="prefill, decode, both or neither")
    advice: str


@dataclass(slots=True)
class SideLoad:
    """Means: shares of workers that were busy, and seconds."""

    at: float
    prefill: float = 0.0
    decode: float = 0.0
    prefill_ahead_s: float = 0.0
    decode_ahead_s: float = 0.0
    step_s: float = 0.0
    decode_queue: float = 0.0  # requests in a decode worker's own queue, for each that runs there
    weight: float = 0.0  # of all that was seen, as far as it is remembered: 1 in time

    def step(self, now: float) -> float:
        """Say what part of the means is to be what is seen now, with the time since the last."""
        share = 1.0 - exp((self.at - now) / MEMORY_S)
        self.at = now
        self.weight += share * (1.0 - self.weight)
        return share / self.weight if share else 0.0

    def draw(self, name: str, step: float, values: list[float]) -> None:
        """Move a mean towards the mean of what is seen now."""
        before = getattr(self, name)
        setattr(self, name, before + step * (_mean(values) - before))


class Balance:
    """Watches both sides of each model."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._seen: dict[str, SideLoad] = {}

    def look(self, now: float) -> None:
        """Take in how busy they are at this moment."""
        for model, prefills, decodes in self._sides():
            seen = self._seen.setdefault(model, SideLoad(now))
            step = seen.step(now)
            seen.draw("prefill", step, [_prefills(w) for w in prefills])
            seen.draw("decode", step, [_filled(w, now) for w in decodes])
            seen.draw("prefill_ahead_s", step, [_ahead_s(w) for w in prefills])
            seen.draw("decode_ahead_s", step, [_ahead_s(w) for w in decodes])
            seen.draw("step_s", step, [w.pace.step_s(w.decoding) for w in decodes])
            seen.draw("decode_queue", step, [_queue(w, now) for w in decodes])

    def shown(self) -> list[BalanceShown]:
        """Describe every model that has both sides, or ought to."""
        return [
            balance(model, len(prefills), len(decodes), seen)
            for model, prefills, decodes in self._sides()
            if (seen := self._seen.get(model)) is not None
        ]

    def _sides(self) -> list[tuple[str, list[Worker], list[Worker]]]:
        """List those that take requests; where a connector is named, an empty side too."""
        sides: dict[str, tuple[list[Worker], list[Worker]]] = {}
        for worker in self._router.fleet:
            if worker.role in (Role.PREFILL, Role.DECODE):
                pair = sides.setdefault(worker.model, ([], []))
                if worker.up and not worker.draining:
                    pair[worker.role is Role.DECODE].append(worker)
        moves = self._router.settings.transfer
        return [(model, *pair) for model, pair in sides.items() if moves or all(pair)]


def balance(model: str, prefills: int, decodes: int, seen: SideLoad) -> BalanceShown:
    """Say which side is short."""
    prefill_busy, decode_busy = seen.prefill, seen.decode
    prefill = _side(prefills, prefill_busy, seen.prefill_ahead_s)
    decode = _side(decodes, decode_busy, seen.decode_ahead_s, seen.step_s, seen.decode_queue)
    short = "neither"
    if not prefills and not decodes:
        short = "both"
    elif not prefills or not decodes:
        short = "decode" if prefills else "prefill"
    elif prefill_busy >= MUCH and decode_busy >= MUCH:
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


def _side(
    workers: int, busy: float, ahead_s: float, step_s: float | None = None, queue: float = 0.0
) -> SideShown:
    load = workers * (busy + queue + ahead_s / MEMORY_S)
    return SideShown(
        workers=workers,
        busy=round(busy, 3),
        wanted=round(load / WELL_USED, 2),
        ahead_s=round(ahead_s, 3),
        step_s=None if step_s is None else round(step_s, 4),
    )


def _advice(short: str, prefill: SideShown, decode: SideShown) -> str:
    wanted = (
        f"this load would use {prefill.wanted:g} prefill and {decode.wanted:g} decode workers well"
    )
    if not prefill.workers and not decode.workers:
        return "no prefill and no decode worker takes requests"
    if not prefill.workers:
        return "no prefill worker takes requests: prompts are prefilled where they are decoded"
    if not decode.workers:
        return "no decode worker takes requests: nothing can be handed over"
    if short == "both":
        return f"both sides are short: {wanted}"
    if short == "neither":
        return f"neither side is short: {wanted}"
    other = decode if short == "prefill" else prefill
    name = "decode" if short == "prefill" else "prefill"
    spare = other.workers > 1 and other.busy < LITTLE
    move = f", and a {name} worker could become one" if spare else ""
    return f"{short} is short: one more {short} worker would help{move}; {wanted}"


def _prefills(worker: Worker) -> float:
    """Say what part of its time a worker's prefill work takes while it has as much."""
    ahead_s = _ahead_s(worker)
    return ahead_s / (ahead_s + worker.pace.fixed_s)


def _ahead_s(worker: Worker) -> float:
    """Reckon how long the prefills charged to a worker, and strangers', take it."""
    return worker.pace.token_s * (worker.prefill_tokens + worker.strange_tokens)


def _queue(worker: Worker, now: float) -> float:
    """Count who waits in a worker's own queue, for each that runs there."""
    gauges = worker.gauges
    if gauges is None or now - gauges.at > MAX_PAGE_AGE_S:
        return 0.0
    return worker.queued / max(gauges.running, 1)


def _filled(worker: Worker, now: float) -> float:
    """Say what of a decode worker is in use; what is prefilled elsewhere is not there yet."""
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
        shares.append((worker.pace.step_s(worker.decoding) - base_s) / max(STEP_S - base_s, base_s))
    return min(max(shares), 1.0)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
