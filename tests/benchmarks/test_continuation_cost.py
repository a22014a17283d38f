"""The benchmark of streams that can be continued."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import zmq

from benchmarks import continuation_cost
from benchmarks.continuation_cost import OFF, ON, PLAIN, MockJournal, costs, router
from benchmarks.router.measure import Sample
from proxy.config import load
from proxy.journal.subscriber import JournalSubscriber
from tests.proxy.wire.site import eventually
from vllm_sched.workers.launch import free_port


def sample(side: str, cpu_s: float) -> Sample:
    return Sample("chunks", side, 1, 3.0, 0, 1000, cpu_s, None, None, 64)


def test_costs_are_per_piece() -> None:
    samples = [sample(PLAIN, 0.03), sample(OFF, 0.04), sample(ON, 0.041), sample(ON, 0.05)]
    found = costs(samples)
    assert found[PLAIN] == pytest.approx([30.0])
    assert found[ON] == pytest.approx([41.0, 50.0])


@pytest.mark.parametrize("name", [PLAIN, OFF, ON])
def test_routers_differ_in_journal_and_continuation(tmp_path: Path, name: str) -> None:
    made = router(tmp_path, name, "http://127.0.0.1:9001", "tcp://127.0.0.1:9002")
    fleet = load(Path(made.command[2]))
    assert bool(fleet.workers[0].journal) == (name != PLAIN)
    assert fleet.router.continuation == (name == ON)


async def test_the_mock_publishes_its_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(continuation_cost, "STEP_S", 0.001)
    port = free_port()
    journal, context = MockJournal(port), zmq.Context()
    running = asyncio.create_task(journal.run())
    reader = JournalSubscriber(
        context, f"tcp://127.0.0.1:{port}", "w0", key=None, clock=lambda: 0.0
    )
    await eventually(lambda: reader.journal.exact)
    number = journal.arrive(b"mine")
    for _ in range(3):
        journal.add_token(number)
    await eventually(lambda: reader.journal.streams("mine"))
    [request] = reader.journal.streams("mine")
    await eventually(lambda: [*request.tokens] == [7, 7, 7])
    journal.end(number)
    await eventually(lambda: not reader.journal.requests)
    running.cancel()
    reader.close()
    context.destroy(linger=0)
    journal.close()
