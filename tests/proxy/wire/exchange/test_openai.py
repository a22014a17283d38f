"""Responses as the official OpenAI client reads them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from tests.proxy.wire import scripts
from tests.proxy.wire.site import Site

MESSAGES: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def client(site: Site) -> AsyncIterator[AsyncOpenAI]:
    """Return the official client without retries."""
    url = f"http://127.0.0.1:{site.port}/v1"
    async with AsyncOpenAI(base_url=url, api_key="theirs", max_retries=0, timeout=60) as client:
        yield client


async def test_chat_with_openai_client(site: Site, client: AsyncOpenAI) -> None:
    chat = await client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0.7)
    assert chat.choices[0].message.content == "w0"
    assert chat.usage is not None
    [call] = site.fake.served
    assert call.all(b"authorization") == [b"Bearer theirs"]
    assert b"0.7" in call.body


async def test_stream_with_openai_client(site: Site, client: AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
    text = "".join(
        [event.choices[0].delta.content or "" async for event in stream if event.choices]
    )
    assert text == "tok 0tok 1tok 2"
    assert len(site.fake.served) == 1


async def test_completions_embeddings_and_models(site: Site, client: AsyncOpenAI) -> None:
    choice = {"index": 0, "text": "yes", "logprobs": None, "finish_reason": "stop"}
    body = {"id": "c", "object": "text_completion", "created": 1, "model": "tiny",
            "choices": [choice]}  # fmt: skip
    site.fake.then(scripts.answer(200, json.dumps(body).encode()))
    chat = await client.completions.create(model="tiny", prompt=[1, 2, 3], max_tokens=1)
    assert chat.choices[0].text == "yes"
    vector = {"object": "embedding", "index": 0, "embedding": [0.5, -1.0]}
    body = {"object": "list", "model": "tiny", "data": [vector],
            "usage": {"prompt_tokens": 1, "total_tokens": 1}}  # fmt: skip
    site.fake.then(scripts.answer(200, json.dumps(body).encode()))
    embeddings = await client.embeddings.create(model="tiny", input="x", encoding_format="float")
    assert embeddings.data[0].embedding == [0.5, -1.0]
    assert [model.id async for model in client.models.list()] == ["tiny"]
    assert (await client.models.retrieve("tiny")).id == "tiny"
    with pytest.raises(openai.NotFoundError, match="serves: tiny"):
        await client.models.retrieve("org/huge")


@pytest.mark.parametrize("end", ["close", "reset"])
async def test_broken_stream_raises(site: Site, client: AsyncOpenAI, end: str) -> None:
    site.fake.then(scripts.stream(3, end=end))
    stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
    for number in range(3):
        assert (await anext(stream)).choices[0].delta.content == f"tok {number}"
    with pytest.raises(openai.APIError, match="worker"):
        await anext(stream)


async def test_broken_body_raises(site: Site, client: AsyncOpenAI) -> None:
    head = scripts.head(200, (b"content-type", b"application/json"), (b"content-length", b"99"))
    site.fake.then(scripts.raw(head, b'{"id": ', gap_s=0.02, end="reset"))
    with pytest.raises(openai.APIConnectionError):
        await client.chat.completions.create(model="tiny", messages=MESSAGES)


async def test_errors_map_to_openai_exceptions(site: Site, client: AsyncOpenAI) -> None:
    async def caught(model: str = "tiny", text: str = "hi") -> openai.APIStatusError:
        messages = [{"role": "user", "content": text}]
        with pytest.raises(openai.APIStatusError) as error:
            await client.chat.completions.create(model=model, messages=messages, max_tokens=1)
        return error.value

    assert isinstance(missing := await caught("huge"), openai.NotFoundError)
    assert missing.code == "model_not_found"
    assert isinstance(long := await caught(text="word " * 60_000), openai.BadRequestError)
    assert long.code == "context_length_exceeded"
    site.fake.then(scripts.error(400, "theirs"))
    assert isinstance(bad_request := await caught(), openai.BadRequestError)
    assert "theirs" in bad_request.message
    site.fake.then(scripts.error(500, "ill"))
    assert isinstance(await caught(), openai.InternalServerError)
    site.down("w0")
    gone = await caught()
    assert gone.status_code == 503
    assert int(gone.response.headers["retry-after"]) >= 1
