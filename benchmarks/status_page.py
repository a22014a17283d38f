"""Draw `docs/images/status.png`: the status page after a minute of simulated load.

    python -m benchmarks.status_page

A real router and a real Chromium run with fake workers that stream at an engine's pace, so the
picture shows no real performance.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
from pathlib import Path

import uvloop

from proxy.config import load
from proxy.setup.app import App
from tests.proxy.status_page.browser import browser
from tests.proxy.wire import scripts
from tests.proxy.wire.fake_worker import Call, FakeWorker
from tests.proxy.wire.raw_client import Client, chat

OUT = Path("docs/images/status.png")
ROLES = {
    "short-0": "short", "short-1": "short", "long-0": "long", "prefill-0": "prefill",
    "decode-0": "decode",
}  # fmt: skip
LOAD_S = 62.0
RATE = 2.4  # requests/s
LONG_SHARE = 0.18
PREFILL_TOKENS_PER_S = 6000
MIN_OUTPUT, MAX_OUTPUT = 20, 90  # tokens
CACHE_TOKENS = 100_000
PAGE = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="llama"}} {running}
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{engine="0",model_name="llama"}} {waiting}
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{engine="0",model_name="llama"}} {usage:.4f}
"""
BLOCKS = {
    "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "p", "tp_size": 1,
    "remote_block_ids": [1], "remote_request_id": "r", "remote_host": "127.0.0.1", "remote_port": 1,
}  # fmt: skip
FLEET = """
model: llama
workers:
{workers}
transfer: nixl
routing: {{short_limit: 4000, tokenize: false, disaggregate_above: 3000}}
router: {{port: 0, admin: {{port: 0}}, probe: {{interval_s: 0.2}}}}
"""


class Engine:
    """A fake worker that prefills at PREFILL_TOKENS_PER_S and then streams."""

    def __init__(self, fake: FakeWorker, rng: random.Random) -> None:
        self._rng = rng
        self._prefills = asyncio.Lock()
        self._running = self._waiting = 0
        self._held = 0.0  # tokens
        fake.always(self.serve)
        fake.always(self.page, "/metrics")

    async def page(self, call: Call) -> None:
        """Answer /metrics."""
        text = PAGE.format(
            running=self._running - self._waiting,
            waiting=self._waiting,
            usage=min(self._held / CACHE_TOKENS, 1.0),
        )
        await scripts.answer(body=text.encode(), content_type=b"text/plain")(call)

    async def serve(self, call: Call) -> None:
        """Answer one request, whose prompt takes KV cache until the end."""
        tokens = len(call.body) / 4
        self._running += 1
        self._held += tokens
        try:
            await self._answer(call, tokens / PREFILL_TOKENS_PER_S)
        finally:
            self._running -= 1
            self._held -= tokens

    async def _answer(self, call: Call, seconds: float) -> None:
        body = json.loads(call.body)
        transfer = body.get("kv_transfer_params") or {}
        if transfer.get("do_remote_prefill"):
            await asyncio.sleep(seconds / 5)  # the transfer
        else:
            self._waiting += 1
            async with self._prefills:
                self._waiting -= 1
                await asyncio.sleep(seconds)
        if transfer.get("do_remote_decode"):
            result = {"choices": [], "usage": scripts.usage(9, 1), "kv_transfer_params": BLOCKS}
            await scripts.answer(body=json.dumps(result).encode())(call)
            return
        if not body.get("stream"):
            await scripts.obey("fake")(call)
            return
        count, gap_s = self._rng.randint(MIN_OUTPUT, MAX_OUTPUT), self._rng.uniform(0.04, 0.12)
        await scripts.stream(count, gap_s=gap_s, with_usage=True)(call)


async def send(app: App, rng: random.Random) -> None:
    """Send one streamed request and read its response."""
    tokens = rng.randint(3500, 14_000) if rng.random() < LONG_SHARE else rng.randint(30, 900)
    model = "lama" if rng.random() < 0.02 else "llama"
    client = await Client.connect(app.wire.port)
    try:
        text = f"{rng.random():.8f}" * (2 * tokens // 5)
        await client.ask(chat(text, stream=True, model=model, max_tokens=MAX_OUTPUT), within=90.0)
    finally:
        client.close()


async def draw(scheme: str) -> bytes:
    """Run router, workers and load, and return the picture."""
    rng = random.Random(7)
    fakes = {name: FakeWorker(name, model="llama", max_model_len=131_072) for name in ROLES}
    for fake in fakes.values():
        await fake.listen()
        Engine(fake, rng)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "fleet.yaml"
        lines = [
            f"  - {{name: {name}, role: {role}, url: '{fakes[name].url}', max_requests: 8}}"
            for name, role in ROLES.items()
        ]
        source.write_text(FLEET.format(workers="\n".join(lines)))
        app = App(load(source), source)
        await app.start()
        async with browser() as page:
            await page.prefer(color_scheme=scheme)
            await page.goto(app.admin_url)
            await page.wait_until("statusPage.state === 'up'")
            requests = set()
            loop = asyncio.get_running_loop()
            end = loop.time() + LOAD_S
            while loop.time() < end:
                requests.add(asyncio.create_task(send(app, rng)))
                await asyncio.sleep(rng.expovariate(RATE))
            height = await page.run(
                "document.querySelector('#workers').getBoundingClientRect().bottom"
            )
            picture = await page.picture(x=0, y=0, width=1280, height=height + 24)
            print(await page.run("statusPage"))
            for request in requests:
                request.cancel()
            await asyncio.gather(*requests, return_exceptions=True)
        await app.stop()
    for fake in fakes.values():
        await fake.stop()
    return picture


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--scheme", choices=("light", "dark"), default="light")
    args = parser.parse_args()
    picture = uvloop.run(draw(args.scheme))
    args.out.write_bytes(picture)
    print(f"{args.out}: {len(picture) / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
