"""The log of a router of two processes as started by users."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.proxy.running import DEADLINE_S, entry, write_fleet
from tests.proxy.wire import scripts
from tests.proxy.wire.fake_worker import FakeWorker
from tests.proxy.wire.raw_client import Client, chat

KEY = "key-of-this-worker-0123456789"


async def test_log_is_json_with_one_line_per_request(tmp_path: Path) -> None:
    fake = FakeWorker("w0")
    await fake.listen()
    fake.always(scripts.stream(4))
    router = {"processes": 2, "logs": {"format": "json", "requests": True}}
    source = write_fleet(tmp_path, entry(fake, api_key=KEY), router=router)
    command = [sys.executable, "-m", "vllm_sched.cli.main", "router", str(source)]
    router = await asyncio.create_subprocess_exec(
        *command, stderr=subprocess.PIPE, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    )
    assert router.stderr is not None
    entries: list[dict[str, Any]] = []
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not (any_contains(entries, "/v1") and any_contains(entries, "is up")):
                entries.append(json.loads(await router.stderr.readline()))
            [line] = [entry["message"] for entry in entries if "/v1" in entry.get("message", "")]
            client = await Client.connect(int(line.split("/v1")[0].rsplit(":", 1)[1]))
            answers = [await client.ask(chat("a private prompt", stream=True)) for _ in range(3)]
            assert [answer.status for answer in answers] == [200] * 3
            assert (await client.ask(chat(model="nope"))).status == 404
            client.close()
            router.send_signal(signal.SIGTERM)
            rest = await router.stderr.read()
            assert await router.wait() == 0
    finally:
        if router.returncode is None:
            router.kill()
        await router.communicate()
        await fake.stop()
    entries += [json.loads(text) for text in rest.splitlines()]
    requests = [entry for entry in entries if entry.get("event") == "request"]
    assert [entry["status"] for entry in requests] == [200, 200, 200, 404]
    assert {entry["id"] for entry in requests[:3]} == {
        answer.one(b"x-request-id").decode() for answer in answers
    }
    assert [entry["worker"] for entry in requests] == ["w0", "w0", "w0", None]
    assert requests[0]["output_tokens"] == 4
    assert requests[0]["sent_bytes"] > len(answers[0].body)
    text = json.dumps(entries)
    assert "a private prompt" not in text
    assert KEY not in text


def any_contains(entries: list[dict[str, Any]], text: str) -> bool:
    return any(text in entry.get("message", "") for entry in entries)
