"""The log of a router as its users run it, of one process and of two."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.proxy.wire import scripts
from tests.proxy.wire.fake_worker import FakeWorker
from tests.proxy.wire.raw_client import Client, chat

DEADLINE_S = 60.0
KEY = "key-of-this-worker-0123456789"


@pytest.mark.parametrize("processes", [1, 2])
async def test_every_line_is_json_and_each_request_has_one(tmp_path: Path, processes: int) -> None:
    fake = FakeWorker("w0")
    await fake.listen()
    fake.always(scripts.stream(4))
    source = tmp_path / "fleet.yaml"
    source.write_text(
        f"model: tiny\nworkers: [{{name: w0, url: '{fake.url}', api_key: {KEY}}}]\n"
        f"router: {{port: 0, admin: {{port: 0}}, processes: {processes}, probe: {{interval_s: "
        "0.05}, logs: {format: json, requests: true}}\n"
    )
    command = [sys.executable, "-m", "vllm_sched.cli.main", "router", str(source)]
    router = await asyncio.create_subprocess_exec(
        *command, stderr=subprocess.PIPE, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    )
    assert router.stderr is not None
    said: list[dict[str, Any]] = []
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not (any_says(said, "/v1") and any_says(said, "is up")):
                said.append(json.loads(await router.stderr.readline()))
            [line] = [each["message"] for each in said if "/v1" in each.get("message", "")]
            client = await Client.connect(int(line.split("/v1")[0].rsplit(":", 1)[1]))
            answers = [await client.ask(chat("a secret of mine", stream=True)) for _ in range(3)]
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
    said += [json.loads(each) for each in rest.splitlines()]
    requests = [each for each in said if each.get("event") == "request"]
    assert [each["status"] for each in requests] == [200, 200, 200, 404]
    assert {each["id"] for each in requests[:3]} == {
        answer.one(b"x-request-id").decode() for answer in answers
    }
    assert [each["worker"] for each in requests] == ["w0", "w0", "w0", None]
    assert requests[0]["output_tokens"] == 4
    assert requests[0]["sent_bytes"] > len(answers[0].body)
    text = json.dumps(said)
    assert "a secret of mine" not in text
    assert KEY not in text


def any_says(said: list[dict[str, Any]], text: str) -> bool:
    """Whether one of the lines has it."""
    return any(text in each.get("message", "") for each in said)
