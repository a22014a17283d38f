"""Numbers of workers that are the same in all processes of all hosts."""

from __future__ import annotations

from xxhash import xxh3_64_intdigest

from proxy.core.fleet.worker import Worker
from proxy.processes.shared.process_sheet import LENGTH_BITS


class WorkerMarks:
    def __init__(self) -> None:
        self._marks: dict[Worker, int] = {}
        self._workers: dict[int, Worker] = {}

    def add(self, worker: Worker) -> None:
        mark = xxh3_64_intdigest(f"{worker.name} {worker.url}".encode()) >> LENGTH_BITS or 1
        self._marks[worker], self._workers[mark] = mark, worker

    def remove(self, worker: Worker) -> None:
        mark = self._marks.pop(worker, 0)
        if self._workers.get(mark) is worker:
            del self._workers[mark]

    def mark_of(self, worker: Worker) -> int:
        """Return a worker's number; 0 without a row."""
        return self._marks.get(worker, 0)

    def worker_of(self, mark: int) -> Worker | None:
        return self._workers.get(mark)
