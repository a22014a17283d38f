"""A fake endpoint in another thread, and a command in another process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.bench.fake_openai import FakeOpenAI, serving


@contextmanager
def running(fake: FakeOpenAI) -> Iterator[FakeOpenAI]:
    """Serve in another thread, because the command blocks this one."""
    ready, loop = threading.Event(), asyncio.new_event_loop()
    done = asyncio.Event()

    async def serve() -> None:
        async with serving(fake):
            ready.set()
            await done.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(10)
    try:
        yield fake
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join(10)
        loop.close()


def run_until_stopped(
    fake: FakeOpenAI, signal_number: int, ready: Callable[[], object], *words: object
) -> tuple[str, str]:
    """Run a command until `ready()`, interrupt it with the signal, and return its output."""
    program = [sys.executable, "-m", "vllm_sched.cli.main", *map(str, words), "--url", fake.url]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        waited = threading.Event()
        for _ in range(600):
            if ready():
                break
            waited.wait(0.05)
        assert ready()
        process.send_signal(signal_number)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, err
    return out, err
