"""A file of requests that is run while everything goes wrong: each line has one result."""

from __future__ import annotations

import json
import random
import ssl
from collections import Counter
from typing import Any

import httpx
from openai import AsyncOpenAI
from openai.types import Batch

from tests.faults.crowd import said
from tests.faults.troupe import MODEL, NIGHTS_KEY
from tests.proxy.batches.harness import ACTIVE
from tests.proxy.wire.kv import CHAT, answer_to, prompts_of

LINES = 80
# What a line may have come to: a worker failed it three times, or broke its answer off.
FAILED = {None, 500, 502, 504}


class Night:
    """Who has the file run."""

    def __init__(self, url: str, seed: int, tls: ssl.SSLContext) -> None:
        self._http = httpx.AsyncClient(verify=tls)
        self._client = AsyncOpenAI(
            base_url=f"{url}/v1", api_key=NIGHTS_KEY, max_retries=0, http_client=self._http
        )
        dice = random.Random(seed)
        self._bodies = {
            f"line {n}": body(f"{n} " + "x" * dice.randrange(2000), dice.choice((1, 5, 30)))
            for n in range(LINES)
        }
        self._batch: Batch

    async def begin(self) -> None:
        """Hand the file in."""
        lines = [
            json.dumps({"custom_id": name, "method": "POST", "url": CHAT, "body": asked})
            for name, asked in self._bodies.items()
        ]
        file = await self._client.files.create(
            file=("night.jsonl", "\n".join(lines).encode()), purpose="batch"
        )
        self._batch = await self._client.batches.create(
            input_file_id=file.id, endpoint=CHAT, completion_window="24h"
        )

    async def over(self) -> bool:
        """Whether all lines have been run."""
        self._batch = await self._client.batches.retrieve(self._batch.id)
        return self._batch.status not in ACTIVE

    async def judge(self) -> None:
        """Hold each line's result against what its worker would answer."""
        assert self._batch.status == "completed"
        good = await self._lines(self._batch.output_file_id)
        bad = await self._lines(self._batch.error_file_id)
        found = Counter(each["custom_id"] for each in (*good, *bad))
        assert found == dict.fromkeys(self._bodies, 1)
        for each in good:
            asked = self._bodies[each["custom_id"]]
            text = said(each["response"]["body"]["choices"][0])
            assert text == "".join(answer_to(prompts_of(asked)[0], asked["max_tokens"]))
        assert {each["response"] and each["response"]["status_code"] for each in bad} <= FAILED

    async def _lines(self, file_id: str | None) -> list[Any]:
        if file_id is None:
            return []
        content = await self._client.files.content(file_id)
        return [json.loads(line) for line in content.text.splitlines()]

    async def leave(self) -> None:
        """Hang up."""
        await self._client.close()
        await self._http.aclose()


def body(text: str, tokens: int) -> dict[str, Any]:
    """Return what a line asks."""
    messages = [{"role": "user", "content": text}]
    return {"model": MODEL, "max_tokens": tokens, "messages": messages}
