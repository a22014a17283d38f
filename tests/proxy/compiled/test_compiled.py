"""Compiled modules in routers as started by users."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from proxy.compiled.locate import SWITCH, compiled_names
from proxy.core.model.role import Role
from proxy.core.model.specs import Gauges, Score, WorkerSpec
from tests.proxy.processes.router_group import RouterGroup
from tests.proxy.wire.fake_worker import FakeWorker
from tests.proxy.wire.raw_client import Client, chat
from vllm_sched.cli.main import main

pytestmark = pytest.mark.compiled

ROOT = Path(__file__).parents[3]
TIMEOUT_S = 1200
TRANSCRIPTS = {
    "requests": 3000, "answers": 3000, "bodies": 3000, "forms": 2000, "events": 3000,
    "sockets": 240,
}  # fmt: skip
CHECK_COMPILED = """
import sys
from importlib import import_module
from proxy.compiled.locate import in_use
assert in_use()
plain = [name for name in sys.argv[1:] if import_module(name).__file__.endswith(".py")]
assert not plain, plain
"""

# Unpickles and pickles records as another process does, and validates a score as `explain` does.
ROUND_TRIP = """
import pickle, sys
from pydantic import TypeAdapter
from proxy.compiled.locate import in_use
from proxy.core.model.specs import Score
assert in_use()
records = pickle.loads(bytes.fromhex(sys.argv[1]))
scores = TypeAdapter(list[Score])
assert scores.validate_json(scores.dump_json(records[-1:])) == records[-1:]
print(pickle.dumps(records).hex())
"""


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Compile if needed."""
    assert main(["compile"]) == 0


def run(*command: str, compiled: bool = True) -> str:
    """Run Python with compiled or plain modules; return its output."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=os.environ | {SWITCH: "1" if compiled else "0", "PYTHONHASHSEED": "0"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_hot_modules_are_compiled() -> None:
    run("-c", CHECK_COMPILED, *compiled_names())


async def test_router_reports_compiled_modules_and_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCH, "1")
    group = RouterGroup(tmp_path, ["a"], count=1)
    try:
        assert group.wait_for_line("/v1").rstrip().endswith("; its modules are compiled")
        worker = FakeWorker("a")
        worker.port = group.ports["a"]
        await worker.listen()
        await group.wait_until_up()
        client = await Client.connect(group.port)
        whole, stream = [await client.ask(chat(stream=stream)) for stream in (False, True)]
        client.close()
        await worker.stop()
    finally:
        group.close()
    assert (whole.status, stream.status) == (200, 200)
    assert b'"choices"' in whole.body
    assert stream.body.endswith(b"data: [DONE]\n\n")


def test_records_pickle_between_plain_and_compiled_processes() -> None:
    records = [
        WorkerSpec("w", "http://w", Role.SHORT, "m", api_key="key"),
        Gauges(at=1.0, running=2, kv_capacity_tokens=3, extra={"more": 4.0}),
        Score("w", 1.0, note="full"),
    ]
    output = run("-c", ROUND_TRIP, pickle.dumps(records).hex())
    assert pickle.loads(bytes.fromhex(output)) == records  # noqa: S301  # from the test's process


def test_compiled_modules_agree_with_plain_ones() -> None:
    command = ["-m", "tests.fuzz.transcript"]
    for part, count in TRANSCRIPTS.items():
        command += [part, str(count)]
    plain, compiled = (run(*command, compiled=compiled).splitlines() for compiled in (False, True))
    lines = Counter(line.partition(" ")[0] for line in plain)
    assert all(lines[part] > count / 2 for part, count in TRANSCRIPTS.items()), lines
    assert [pair for pair in zip(plain, compiled, strict=True) if pair[0] != pair[1]] == []
