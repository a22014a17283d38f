"""Real vLLM workers that are killed under load, one after the other, and started again by `up`.

    python -m benchmarks.soak_engines --minutes 5 --kill-every 60

Two workers with the tiny model on this machine's processors. What has to hold: each request has one
end, what is whole has all its tokens, and at the end both workers serve and nothing is in flight.
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

READY_S, CALM_S, PATIENCE_S = 600.0, 300.0, 240.0
UP = ("up", "resting")
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


def judged(answer: Answer, _: list[str]) -> str:
    """Say whether an answer of a real worker is whole, or says that it is not."""
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


def listener(port: int) -> int | None:
    """Find the process that was told to serve a port."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if b"--port" in words and words[words.index(b"--port") + 1] == b"%d" % port:
                return int(folder.name)
    return None


async def workers(admin: int) -> dict[str, dict[str, object]]:
    """Ask the router how its workers are."""
    with suppress(aiohttp.ClientError):
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://127.0.0.1:{admin}/admin/workers") as answer,
        ):
            return {each["name"]: each for each in await answer.json()}
    return {}


async def both_up(admin: int, within_s: float) -> bool:
    """Wait until both serve."""
    give_up = time.monotonic() + within_s
    while time.monotonic() < give_up:
        found = await workers(admin)
        if len(found) == 2 and all(each["state"] in UP for each in found.values()):
            return True
        await asyncio.sleep(0.5)
    return False


async def soak(given: argparse.Namespace) -> int:
    """Run it all, and print what came of it."""
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
            if not await both_up(admin, READY_S):
                print((folder / "up.log").read_text()[-3000:])
                return 1
            return await _play(given, port, admin, {"w0": first, "w1": second})
        finally:
            if up.returncode is None:
                up.terminate()
                await up.wait()


async def _play(given: argparse.Namespace, port: int, admin: int, ports: dict[str, int]) -> int:
    dice = random.Random(given.seed)
    crowd = ClientLoad(port, given.seed, sizes=(10, 200, 2000, 8000), timeout_s=PATIENCE_S)
    crowd.judge = judged
    until = time.monotonic() + given.minutes * 60
    over = lambda: time.monotonic() > until  # noqa: E731
    kills: list[float] = []

    async def kill() -> None:
        while True:
            await asyncio.sleep(given.kill_every)
            if over():
                return
            victim = dice.choice(sorted(ports))
            if (pid := listener(ports[victim])) is None:
                continue
            os.killpg(os.getpgid(pid), signal.SIGKILL)
            began = time.monotonic()
            await asyncio.sleep(3.0)
            if await both_up(admin, READY_S):
                kills.append(time.monotonic() - began)
            print(f"{victim} was killed: {json.dumps(crowd.outcomes)}", flush=True)

    await asyncio.gather(kill(), *(crowd.play(n, over) for n in range(given.clients)))
    ready = await both_up(admin, CALM_S)
    give_up = time.monotonic() + CALM_S
    while True:
        found = await workers(admin)
        busy = {name: each["requests"] for name, each in found.items() if each["requests"]}
        if not busy or time.monotonic() > give_up:
            break
        await asyncio.sleep(0.5)
    back = ", ".join(f"{each:.0f} s" for each in kills)
    print(f"{crowd.sent} sent: {json.dumps(crowd.outcomes)}; slowest {crowd.slowest_s:.1f} s")
    print(f"killed {len(kills)} times, both up again after {back or 'never'}")
    print(f"both up at the end: {ready}; in flight: {busy or 'nothing'}; wrong: {crowd.wrong}")
    return 1 if crowd.wrong or busy or not ready else 0


if __name__ == "__main__":
    options = argparse.ArgumentParser(prog="python -m benchmarks.soak_engines", description=__doc__)
    options.add_argument("--minutes", type=float, default=5.0)
    options.add_argument("--kill-every", type=float, default=60.0)
    options.add_argument("--clients", type=int, default=6)
    options.add_argument("--seed", type=int, default=1)
    raise SystemExit(asyncio.run(soak(options.parse_args())))
