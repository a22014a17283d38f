"""Every route, answered by real workers, as a real Prometheus sees it.

Routes that no CPU worker answers are on a list with their reasons; the list is checked, too.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from proxy.core.model.route_table import BY_NAME, ROUTES, PromptFields
from tests.fleet.conftest import ALONE
from tests.fleet.test_router import PORTS, Router, port_of, routing
from tests.prometheus.server import Prometheus, retry_until_empty
from tests.prometheus.tools import program
from vllm_sched.workers.launch import Side, Worker, worker
from vllm_sched.workers.tiny_model import tiny_model

Json = dict[str, Any]
DEADLINE_S = 120.0
EMBEDS = "embeds"
HEARS = "needs an audio model"
# Routes that these two workers do not answer.
WITHOUT = {
    "/v1/audio/transcriptions": HEARS,
    "/v1/audio/translations": HEARS,
    "/classify": "needs a classification model",
    "/v1/systemone": "needs a model other than a Llama",
}
PROMPT: Json = {"prompt": "hi"}
CHAT: Json = {"messages": [{"role": "user", "content": "hi"}]}
RESPONSE: Json = {"input": "hi"}
SHORT: Json = {"max_tokens": 2}
IDS = [11, 12, 13]
TEXTS: Json = {"model": EMBEDS, "query": "hi", "documents": ["there", "here"]}
PAIR: Json = {"model": EMBEDS, "text_1": "hi", "text_2": "there"}
EMBEDDED: Json = {"model": EMBEDS, "input": "hi"}
BODIES: dict[str, Json] = {
    "/v1/chat/completions": CHAT | SHORT,
    "/v1/messages": CHAT | SHORT,
    "/cohere/v2/chat": CHAT,
    "/v1/chat/completions/batch": {"messages": [CHAT["messages"]] * 2} | SHORT,
    "/v1/completions": PROMPT | SHORT,
    "/v1/responses": RESPONSE | {"max_output_tokens": 2},
    "/inference/v1/generate": {"token_ids": IDS, "sampling_params": SHORT},
    "/v1/systemone": {
        "state": "hi",
        "questions": {"q": {"type": "choice", "instructions": "?", "criteria": {"a": None}}},
    },
    "/v1/embeddings": EMBEDDED,
    "/pooling": EMBEDDED,
    "/classify": EMBEDDED,
    "/v2/embed": {"model": EMBEDS, "texts": ["hi"], "embedding_types": ["float"]},
    "/score": PAIR,
    "/v1/score": PAIR,
    "/rerank": TEXTS,
    "/v1/rerank": TEXTS,
    "/v2/rerank": TEXTS,
    "/generative_scoring": {"query": "hi", "items": ["there", "here"], "label_token_ids": IDS},
    "/tokenize": PROMPT,
    "/detokenize": {"tokens": IDS},
    "/v1/messages/count_tokens": CHAT,
    "/v1/chat/completions/render": CHAT,
    "/v1/completions/render": PROMPT,
    "/v1/messages/render": CHAT | SHORT,
    "/v1/responses/render": RESPONSE,
    "/cohere/v2/chat/render": CHAT,
}
# Paths that a model lacks.
LACKED = [("tiny", "/v1/embeddings"), ("tiny", "/rerank"), (EMBEDS, "/v1/completions")]
# Bodies made from the answer of `/inference/v1/generate`.
DERENDERED = {
    "/v1/chat/completions/derender": lambda made: {
        "generate_response": made,
        "chat_request": {"model": "tiny", **CHAT},  # needed to find tools
    },
    "/v1/completions/derender": lambda made: {"generate_responses": [made]},
}


@pytest.fixture(scope="module")
def embeds() -> Iterator[Worker]:
    with worker(
        Side("default"),
        model=str(tiny_model()),
        flags=(
            "--max-model-len", "2048", "--served-model-name", EMBEDS,
            "--runner", "pooling", "--convert", "embed",
        ),
        env=ALONE,
        name=EMBEDS,
    ) as started:  # fmt: skip
        yield started


@pytest.fixture
def router(workers: dict[str, Worker], embeds: Worker, tmp_path: Path) -> Iterator[Router]:
    """Run a router with a generating and an embedding worker."""
    program("prometheus")
    fleet = [
        {"name": "writes", "url": workers["default"].url},
        {"name": EMBEDS, "url": embeds.url, "model": EMBEDS},
    ]
    batches = {"path": str(tmp_path / "batches")}
    with routing(tmp_path, fleet, {}, router={**PORTS, "batches": batches}) as running:
        yield running


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE_S)) as made:
        yield made


async def posted(session: aiohttp.ClientSession, url: str, **given: Any) -> tuple[int, Json]:
    async with session.post(url, **given) as answer:
        text = await answer.text()
        return answer.status, json.loads(text) if answer.status == 200 else {"said": text}


async def every_path(session: aiohttp.ClientSession, url: str) -> dict[str, tuple[int, Json]]:
    found = {}
    for path, body in BODIES.items():
        found[path] = await posted(session, url + path, json={"model": "tiny", **body})
    _, made = found["/inference/v1/generate"]
    for path, written in DERENDERED.items():
        found[path] = await posted(session, url + path, json={"model": "tiny", **written(made)})
    for path, route in ROUTES.items():
        if route.shape is PromptFields.FORM:
            form = aiohttp.FormData({"model": "tiny"})
            form.add_field("file", b"RIFF", filename="a.wav")
            found[path] = await posted(session, url + path, data=form)
    return found


async def stored_response(session: aiohttp.ClientSession, url: str) -> None:
    """Store and fetch a response, and cancel a background response."""
    url += "/v1/responses"
    body: Json = {"model": "tiny", "input": "hi", "store": True}
    _, kept = await posted(session, url, json=body | {"max_output_tokens": 2})
    async with session.get(f"{url}/{kept['id']}") as answer:
        assert answer.status == 200
        assert (await answer.json())["id"] == kept["id"]
    status, begun = await posted(
        session, url, json=body | {"max_output_tokens": 8000, "background": True}
    )
    assert status == 200, begun
    status, stopped = await posted(session, f"{url}/{begun['id']}/cancel")
    assert (status, stopped.get("status")) == (200, "cancelled"), stopped


async def whole_batch(session: aiohttp.ClientSession, url: str) -> None:
    path, body = "/v1/chat/completions", {"model": "tiny", **CHAT, **SHORT}
    line = {"method": "POST", "url": path, "body": body}
    lines = [json.dumps(line | {"custom_id": each}) for each in ("a", "b")]
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", "\n".join(lines).encode(), filename="night.jsonl")
    _, file = await posted(session, f"{url}/v1/files", data=form)
    batch_body = {"input_file_id": file["id"], "endpoint": path, "completion_window": "24h"}
    _, batch = await posted(session, f"{url}/v1/batches", json=batch_body)
    async with asyncio.timeout(DEADLINE_S):
        while batch["status"] != "completed":
            await asyncio.sleep(0.2)
            async with session.get(f"{url}/v1/batches/{batch['id']}") as answer:
                batch = await answer.json()
    assert batch["request_counts"] == {"total": 2, "completed": 2, "failed": 0}
    async with session.get(f"{url}/v1/files/{batch['output_file_id']}/content") as answer:
        results = [json.loads(line) for line in (await answer.text()).splitlines()]
    assert [each["response"]["status_code"] for each in results] == [200, 200]


async def test_every_route_is_answered_and_visible_in_prometheus(
    router: Router,
    workers: dict[str, Worker],
    embeds: Worker,
    session: aiohttp.ClientSession,
    tmp_path: Path,
) -> None:
    found = await every_path(session, router.url)
    assert found.keys() ^ ROUTES.keys() == set(), "BODIES has a request for each path"
    left = {path: answer for path, answer in found.items() if answer[0] != 200}
    details = "\n".join(f"{path}: {answer}" for path, answer in left.items())
    assert left.keys() == WITHOUT.keys(), details
    assert {status for status, _ in left.values()} <= {404, 501}, details
    for model, path in LACKED:
        status, answer = await posted(
            session, router.url + path, json=BODIES[path] | {"model": model}
        )
        assert status == 404, answer
        assert (
            f"`{model}` does not support {path}. This fleet serves: embeds, tiny." in answer["said"]
        )
    await stored_response(session, router.url)
    await whole_batch(session, router.url)

    without = {ROUTES[path].name for path in WITHOUT}
    queries = {name: f'proxy_requests_total{{route="{name}",status="200"}}' for name in BY_NAME}
    prometheus = Prometheus(tmp_path, session)
    async with AsyncExitStack() as stack:
        targets = {
            "router": [port_of(router.url)],
            "worker": [port_of(workers["default"].url), port_of(embeds.url)],
        }
        await prometheus.begin(stack, targets)
        seen = {queries[name]: f"route {name}" for name in BY_NAME.keys() - without}
        missing = await retry_until_empty(partial(prometheus.unanswered, seen))
        assert not missing, missing
        excuses = {queries[name]: f"route {name}" for name in without}
        assert await prometheus.unanswered(dict(excuses)) == excuses, "answered: no excuse"
        await prometheus.check_healthy()
