"""The arrivals, served by the real engine with a journal, and what a reader of it gets."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from functools import partial
from typing import Any

import msgspec
import zmq
from vllm.v1.engine.llm_engine import LLMEngine

from tests.engine.arrivals import ARRIVALS
from tests.engine.served import serve
from vllm_sched.engine.journal.journal import StepMessage

SNAPSHOT = b"snapshot/reader"
TIMEOUT_MS = 60_000
MAX_QUEUED = 100_000  # the reader reads after the run


def serve_with_journal(engine: LLMEngine) -> dict[str, Any]:
    """Return the requests' output tokens, as the engine returned and as it published them."""
    with tempfile.TemporaryDirectory() as folder:
        endpoint = f"ipc://{folder}/journal"
        context = zmq.Context()
        socket = context.socket(zmq.SUB)
        socket.setsockopt(zmq.RCVHWM, MAX_QUEUED)
        socket.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
        for topic in (b"step", SNAPSHOT):
            socket.subscribe(topic)
        socket.connect(endpoint)
        policies = {"long_prompt": {}, "journal": {"endpoint": endpoint}}
        run = serve(engine, policies, before=partial(_connected, socket))
        published, reasons = _read(socket)
        context.destroy(linger=0)
        engine.engine_core.engine_core.scheduler._publisher.close()
    return {"returned": run["outputs"], "published": published, "reasons": reasons}


def _connected(socket: Any) -> None:
    while socket.recv_multipart()[0] != SNAPSHOT:
        pass


def _read(socket: Any) -> tuple[list[list[int]], list[str]]:
    """Return the tokens and end of each request, in the order of arrival."""
    tokens: defaultdict[int, list[int]] = defaultdict(list)
    reasons: dict[int, str] = {}
    while len(reasons) < len(ARRIVALS):
        message = StepMessage(*msgspec.msgpack.decode(socket.recv_multipart()[2]))
        begin = 0
        counts = message.counts or [1] * len(message.numbers)
        for number, count in zip(message.numbers, counts, strict=True):
            tokens[number] += message.tokens[begin : begin + count]
            begin += count
        reasons |= dict(message.ended)
    return [tokens[n] for n in sorted(tokens)], [reasons[n] for n in sorted(reasons)]
