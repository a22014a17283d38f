"""The LoRA adapters of running requests, and the adapters with which requests may enter.

A running request keeps its adapter's slot even in a step that leaves the request out. vLLM does not
bound the wait for a slot. Here an adapter gets the next free slot after `MAX_WAIT_S`, and the
adapter with the oldest slot, if it is that old, admits no more requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Final

from vllm.v1.request import Request

MAX_WAIT_S: Final = 30.0
# How long a free slot is kept: the adapter's requests may lack KV blocks.
MAX_KEPT_STEPS: Final = 64


@dataclass(slots=True)
class SkippedAdapter:
    since: float
    requests: set[Request] = field(default_factory=set)


class LoraSlots:
    def __init__(self, max_loras: int) -> None:
        self.max_loras = max_loras
        self._running_requests: Counter[int] = Counter()  # requests, by adapter
        self._slot_since: dict[int, float] = {}
        self._skipped_adapters: dict[int, SkippedAdapter] = {}
        self._now = 0.0
        self._overdue_adapter: int | None = None  # gets the next free slot
        self._closed_adapter: int | None = None  # admits no more requests
        self._kept_steps = 0  # with a free slot for the overdue adapter

    def begin_step(self, running: Iterable[Request], now: float) -> None:
        self._now = now
        self._running_requests = Counter(adapter for r in running if (adapter := adapter_of(r)))
        self._slot_since = {a: self._slot_since.get(a, now) for a in self._running_requests}
        for adapter in self._running_requests:
            if (skipped := self._skipped_adapters.get(adapter)) is not None:
                skipped.since = now
        self._overdue_adapter = self._longest_waiting()
        full = len(self._running_requests) >= self.max_loras
        self._kept_steps = 0 if full or self._overdue_adapter is None else self._kept_steps + 1
        self._closed_adapter = None
        if full and self._overdue_adapter is not None:
            oldest = min(self._slot_since, key=self._slot_since.__getitem__)
            if now - self._slot_since[oldest] >= MAX_WAIT_S:
                self._closed_adapter = oldest

    def _longest_waiting(self) -> int | None:
        """Return the adapter that waits longest; its wait starts anew after a slot kept in vain."""
        if not self._skipped_adapters:
            return None
        adapter, skipped = min(self._skipped_adapters.items(), key=lambda item: item[1].since)
        if self._now - skipped.since < MAX_WAIT_S:
            return None
        if self._kept_steps >= MAX_KEPT_STEPS:
            skipped.since = self._now
            return None
        return adapter

    def record_skip(self, request: Request) -> None:
        adapter = adapter_of(request)
        self._skipped_adapters.setdefault(adapter, SkippedAdapter(self._now)).requests.add(request)

    def record_admission(self, request: Request) -> None:
        if adapter := adapter_of(request):
            self._running_requests[adapter] += 1
            self.record_departure(request)

    def record_departure(self, request: Request) -> None:
        adapter = adapter_of(request)
        if (skipped := self._skipped_adapters.get(adapter)) is not None:
            skipped.requests.discard(request)
            if not skipped.requests:
                del self._skipped_adapters[adapter]

    def open_adapters(self) -> Collection[int] | None:
        free = self.max_loras - len(self._running_requests)
        if self._overdue_adapter is None or free > 1:  # the overdue adapter needs a single slot
            return None if free > 0 else self._running_requests
        if free > 0:
            return self._running_requests.keys() | {self._overdue_adapter}
        return self._running_requests.keys() - {self._closed_adapter}

    def adapter_without_slot(self, request: Request) -> int:
        adapter = adapter_of(request)
        if not adapter:
            return 0
        admitted = self.open_adapters()
        return 0 if admitted is None or adapter in admitted else adapter


def adapter_of(request: Request) -> int:
    return 0 if request.lora_request is None else request.lora_request.lora_int_id
