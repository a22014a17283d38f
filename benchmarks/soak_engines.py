"""Kill real vLLM workers under load, one after the other; `vllm-sched up` restarts them.

    python -m benchmarks.soak_engines --minutes 5 --kill-every 60

Two workers run the tiny model on this machine's processors. Each request must have one end, a
complete response all its tokens; at the end both workers are up and nothing is in flight.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import aiohttp

from tests.faults.clients import REFUSALS, REFUSED, TORN, WHOLE, ClientLoad, WrongAnswerError
from tests.proxy.wire import scripts
from tests.proxy.wire.raw_client import Answer
from vllm_sched.workers.launch import free_port

READY_TIMEOUT_S, DRAIN_TIMEOUT_S, REQUEST_TIMEOUT_S = 600.0, 300.0, 240.0
UP_STATES = ("up", "resting")
FLEET = """\
model: tiny
workers:
  - name: w0
    url: http://127.0.0.1:{first}
    launch:
      args: [--max-model-len=16384, --max-num-batched-tokens=512, --num-gpu-blocks-override=1024]
      policies: {{long_prompt: {{}}, lanes: {{}}}}
  - name: w1
    url: http://127.0.0.1:{second}
    launch:
      args: [--max-model-len=16384, --max-num-batched-tokens=512, --num-gpu-blocks-override=1024]
router:
  port: {port}
  admin: {{port: {admin}}}
  timeouts: {{first_byte_s: 120, idle_s: 60}}
"""


def classify(answer: Answer, _: list[str]) -> str:
    """Return the outcome of a request by the response of a real worker."""
    if answer.status in REFUSALS and b"error" in answer.body:
        return REFUSED
    if answer.status != 200:
        raise WrongAnswerError(answer)
    if not answer.one(b"content-type").startswith(b"text/event-stream"):
        if answer.json()["choices"][0]["finish_reason"] not in ("length", "stop"):
            raise WrongAnswerError(answer)
        return WHOLE
    if answer.body.endswith(scripts.DONE):
        return WHOLE
    if b'"error"' in answer.body.rpartition(b"data: ")[2]:
        return TORN
    raise WrongAnswerError(answer)


def find_worker(port: int) -> int | None:
    """Return the process that was started with `--port` and this port."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if b"--port" in words and words[words.index(b"--port") + 1] == b"%d" % port:
                return int(folder.name)
    return None


async def fetch_workers(admin: int) -> dict[str, dict[str, object]]:
    with suppress(aiohttp.ClientError):
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://127.0.0.1:{admin}/admin/workers") as answer,
        ):
            return {worker["name"]: worker for worker in await answer.json()}
    return {}


async def wait_both_up(admin: int, timeout_s: float) -> bool:
    """Return whether both workers are up within the timeout."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        workers = await fetch_workers(admin)
        if len(workers) == 2 and all(worker["state"] in UP_STATES for worker in workers.values()):
            return True
        await asyncio.sleep(0.5)
    return False


async def soak(args: argparse.Namespace) -> int:
    """Run the fleet under load, print a summary and return the exit status."""
    first, second, port, admin = (free_port() for _ in range(4))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fleet = folder / "fleet.yaml"
        fleet.write_text(FLEET.format(first=first, second=second, port=port, admin=admin))
        with (folder / "up.log").open("wb") as log:
            up = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "vllm_sched.cli.main", "up", str(fleet),
                "--log-dir", str(folder), stdout=log, stderr=log,
            )  # fmt: skip
        try:
            if not await wait_both_up(admin, READY_TIMEOUT_S):
                print((folder / "up.log").read_text()[-3000:])
                return 1
            return await _run(args, port, admin, {"w0": first, "w1": second})
        finally:
            if up.returncode is None:
                up.terminate()
                await up.wait()


async def _run(args: argparse.Namespace, port: int, admin: int, ports: dict[str, int]) -> int:
    rng = random.Random(args.seed)
    load = ClientLoad(port, args.seed, sizes=(10, 200, 2000, 8000), timeout_s=REQUEST_TIMEOUT_S)
    load.judge = classify
    until = time.monotonic() + args.minutes * 60
    is_over = lambda: time.monotonic() > until  # noqa: E731
    recovered_s: list[float] = []

    async def kill_workers() -> None:
        while True:
            await asyncio.sleep(args.kill_every)
            if is_over():
                return
            name = rng.choice(sorted(ports))
            if (pid := find_worker(ports[name])) is None:
                continue
            os.killpg(os.getpgid(pid), signal.SIGKILL)
            killed = time.monotonic()
            await asyncio.sleep(3.0)
            if await wait_both_up(admin, READY_TIMEOUT_S):
                recovered_s.append(time.monotonic() - killed)
            print(f"{name} was killed: {json.dumps(load.outcomes)}", flush=True)

    await asyncio.gather(kill_workers(), *(load.play(n, is_over) for n in range(args.clients)))
    ready = await wait_both_up(admin, DRAIN_TIMEOUT_S)
    deadline = time.monotonic() + DRAIN_TIMEOUT_S
    while True:
        workers = await fetch_workers(admin)
        busy = {name: worker["requests"] for name, worker in workers.items() if worker["requests"]}
        if not busy or time.monotonic() > deadline:
            break
        await asyncio.sleep(0.5)
    times = ", ".join(f"{seconds:.0f} s" for seconds in recovered_s)
    print(f"{load.sent} sent: {json.dumps(load.outcomes)}; slowest {load.slowest_s:.1f} s")
    print(f"killed {len(recovered_s)} times, both up again after {times or 'never'}")
    print(f"both up at the end: {ready}; in flight: {busy or 'nothing'}; wrong: {load.wrong}")
    return 1 if load.wrong or busy or not ready else 0


if __name__ == "__main__":
    options = argparse.ArgumentParser(prog="python -m benchmarks.soak_engines", description=__doc__)
    options.add_argument("--minutes", type=float, default=5.0)
    options.add_argument("--kill-every", type=float, default=60.0)
    options.add_argument("--clients", type=int, default=6)
    options.add_argument("--seed", type=int, default=1)
    raise SystemExit(asyncio.run(soak(options.parse_args())))
