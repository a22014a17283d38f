"""A batch of requests under faults: each line has one result."""

from __future__ import annotations

import json
import random
import ssl
from collections import Counter
from typing import Any

import httpx
from openai import AsyncOpenAI
from openai.types import Batch

from tests.faults.clients import text_of
from tests.faults.faulty_fleet import BATCH_KEY, MODEL
from tests.proxy.batches.harness import ACTIVE
from tests.proxy.wire.kv import CHAT, answer_to, prompts_of

LINES = 80
# Possible errors of a line: three failed attempts, or a broken answer.
FAILED = {None, 500, 502, 504}


class BatchRun:
    def __init__(self, url: str, seed: int, tls: ssl.SSLContext | bool) -> None:
        self._http = httpx.AsyncClient(verify=tls)
        self._client = AsyncOpenAI(
            base_url=f"{url}/v1", api_key=BATCH_KEY, max_retries=0, http_client=self._http
        )
        dice = random.Random(seed)
        self._bodies = {
            f"line {n}": line_body(f"{n} " + "x" * dice.randrange(2000), dice.choice((1, 5, 30)))
            for n in range(LINES)
        }
        self._batch: Batch

    async def begin(self) -> None:
        lines = [
            json.dumps({"custom_id": name, "method": "POST", "url": CHAT, "body": body})
            for name, body in self._bodies.items()
        ]
        file = await self._client.files.create(
            file=("batch.jsonl", "\n".join(lines).encode()), purpose="batch"
        )
        self._batch = await self._client.batches.create(
            input_file_id=file.id, endpoint=CHAT, completion_window="24h"
        )

    async def is_done(self) -> bool:
        self._batch = await self._client.batches.retrieve(self._batch.id)
        return self._batch.status not in ACTIVE

    async def judge(self) -> None:
        """Check each line's result against the worker's expected answer."""
        assert self._batch.status == "completed"
        good = await self._lines(self._batch.output_file_id)
        bad = await self._lines(self._batch.error_file_id)
        found = Counter(entry["custom_id"] for entry in (*good, *bad))
        assert found == dict.fromkeys(self._bodies, 1)
        for entry in good:
            body = self._bodies[entry["custom_id"]]
            text = text_of(entry["response"]["body"]["choices"][0])
            assert text == "".join(answer_to(prompts_of(body)[0], body["max_tokens"]))
        assert {entry["response"] and entry["response"]["status_code"] for entry in bad} <= FAILED

    async def _lines(self, file_id: str | None) -> list[Any]:
        if file_id is None:
            return []
        content = await self._client.files.content(file_id)
        return [json.loads(line) for line in content.text.splitlines()]

    async def close(self) -> None:
        await self._client.close()
        await self._http.aclose()


def line_body(text: str, tokens: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": MODEL, "max_tokens": tokens, "messages": messages}
