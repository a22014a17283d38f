"""KV transfers to a fluid engine, one after another."""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_sched.sim.engines.kv_blocks import KvBlocks, Task
    from vllm_sched.sim.types import WorkerModel


class KvTransfers:
    """Decode legs that wait for KV room, and transfers under way."""

    __slots__ = ("_link_free", "_model", "_room", "under_way", "waiting")

    def __init__(self, model: WorkerModel, room: KvBlocks) -> None:
        self.under_way: list[tuple[float, int, Task]] = []  # heap by end time
        self.waiting: deque[Task] = deque()  # for KV room
        self._model = model
        self._room = room
        self._link_free = 0.0

    def start(self, now: float) -> None:
        room = self._room
        while self.waiting:
            task = self.waiting[0]
            if not task.gone:
                if not room.fits(task):
                    return
                room.take(task)
                cached = min(room.prefixes.held(task.job.shared), task.job.prompt_tokens)
                seconds = self._model.transfer_s(task.job.prompt_tokens - cached)
                self._link_free = max(self._link_free, now) + seconds
                task.fetching = True
                heappush(self.under_way, (self._link_free, task.number, task))
            self.waiting.popleft()

    def finish(self) -> Task:
        return heappop(self.under_way)[2]
