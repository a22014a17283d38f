"""Measure what the journal adds to a step with 256 decodes, and what reading it costs the router.

Two schedulers take the same steps in turns, one with a journal that a socket reads. The figures are
medians of processor time. The engine's thread is timed by itself: others encode and send while it
waits for the GPU. The sum is compared with the fastest published GPU step of that
shape. The reader decodes and applies the published messages.

    python -m benchmarks.journal_cost [--rounds 3] [--steps 200]
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from typing import Any, NamedTuple

import zmq
from rich.console import Console
from rich.table import Table

from benchmarks.seen_cost import whole_step_s
from benchmarks.step_cost import RUNNING
from proxy.journal.engine_state import EngineJournal
from proxy.journal.messages import decode_step, read_position
from proxy.journal.snapshot import SnapshotReader
from tests.engine.schedulers import BLOCK, answer, make_request, make_scheduler
from vllm_sched import PolicyScheduler

WARM_UP_STEPS = 20
LAST_MESSAGES_S = 0.3
OUTPUT_TOKENS = 4000
ENGINE_TARGET, READER_TARGET_S = 0.01, 2e-6


class Cost(NamedTuple):
    """Seconds of one round."""

    step_s: float  # of the scheduler without a journal
    thread_s: float  # more in the engine's thread, per step
    process_s: float  # more in all threads, per step
    reader_s: float  # to decode and apply a message


class Connection:
    """A socket that reads the journal and keeps the messages."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, 100_000)
        self._socket.connect(endpoint)
        for topic in (b"snapshot/x", b"step"):
            self._socket.subscribe(topic)

    def until_snapshot(self) -> list[bytes]:
        while (frames := self._socket.recv_multipart())[0] == b"step":
            pass
        return frames

    def pending(self) -> list[list[bytes]]:
        messages = []
        while self._socket.poll(200):
            messages.append(self._socket.recv_multipart())
        return messages

    def close(self) -> None:
        self._context.destroy(linger=0)


def loaded(journal: dict[str, object]) -> Any:
    scheduler = make_scheduler(
        {"long_prompt": {}, **journal},
        scheduler_cls=PolicyScheduler,
        budget=8192,
        max_model_len=8192,
        max_num_seqs=RUNNING,
        num_blocks=RUNNING * (OUTPUT_TOKENS + 100) // BLOCK,
        prefix_caching=True,
    )
    for _ in range(RUNNING):
        scheduler.add_request(make_request(8, output=OUTPUT_TOKENS))
    while len(scheduler.running) < RUNNING:
        step_s(scheduler)
    return scheduler


def step_s(scheduler: Any) -> float:
    """Take a step; return the seconds of its scheduling in this thread."""
    begun = time.thread_time()
    output = scheduler.schedule()
    took = time.thread_time() - begun
    answered = answer(scheduler, output)
    begun = time.thread_time()
    scheduler.update_from_output(output, answered)
    return took + time.thread_time() - begun


def measure(steps: int, folder: str) -> Cost:
    endpoint = f"ipc://{folder}/journal"
    plain, journaled = loaded({}), loaded({"journal": {"endpoint": endpoint}})
    connection = Connection(endpoint)
    snapshot = connection.until_snapshot()
    times: tuple[list[float], list[float]] = ([], [])
    others_s = time.thread_time() - time.process_time()
    for number in range(WARM_UP_STEPS + steps):
        for side in (0, 1) if number % 2 else (1, 0):
            times[side].append(step_s((plain, journaled)[side]))
    time.sleep(LAST_MESSAGES_S)
    others_s = (time.process_time() - time.thread_time() + others_s) / len(times[1])
    messages = connection.pending()
    connection.close()
    journaled.shutdown()
    alone_s, beside_s = (statistics.median(side[WARM_UP_STEPS:]) for side in times)
    thread_s = beside_s - alone_s
    return Cost(alone_s, thread_s, thread_s + others_s, reader_s(snapshot, messages))


def reader_s(snapshot: list[bytes], messages: list[list[bytes]]) -> float:
    """Return the median seconds of a step's message."""
    journal = EngineJournal()
    reader = SnapshotReader(read_position(snapshot[1]), snapshot[2], journal.max_tokens)
    reader.read()
    journal.apply_snapshot(reader)
    times = []
    for _, position, payload in messages:
        begun = time.thread_time()
        journal.apply_step(read_position(position), decode_step(payload))
        times.append(time.thread_time() - begun)
    assert journal.exact
    return statistics.median(times[WARM_UP_STEPS:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    gc.disable()
    rounds = []
    for _ in range(arguments.rounds):
        with tempfile.TemporaryDirectory() as folder:
            rounds.append(measure(arguments.steps, folder))
        gc.collect()
    cost = Cost(*(statistics.median(values) for values in zip(*rounds, strict=True)))
    gpu_s = whole_step_s()
    table = Table(f"{RUNNING} decodes", "us per step", "share", "target")
    table.add_row("scheduler without a journal", f"{cost.step_s * 1e6:.0f}")
    table.add_row(
        "journal, engine's thread",
        f"{cost.thread_s * 1e6:.0f}",
        f"{cost.thread_s / gpu_s:.2%} of a GPU step of {gpu_s * 1e3:.1f} ms, "
        f"{cost.thread_s / cost.step_s:.1%} of the scheduler",
        f"{ENGINE_TARGET:.0%} of a step: {_verdict(cost.thread_s <= ENGINE_TARGET * gpu_s)}",
    )
    table.add_row("journal, all threads", f"{cost.process_s * 1e6:.0f}")
    table.add_row(
        "router, decode and apply",
        f"{cost.reader_s * 1e6:.0f}",
        f"{cost.reader_s / RUNNING * 1e6:.2f} us per stream",
        f"{READER_TARGET_S * 1e6:.0f} us per stream: "
        f"{_verdict(cost.reader_s / RUNNING <= READER_TARGET_S)}",
    )
    Console().print(table)


def _verdict(met: bool) -> str:
    return "met" if met else "MISSED"


if __name__ == "__main__":
    main()
