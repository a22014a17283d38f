"""Errors in the format of each API, checked with the API's own clients."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import openai
import pytest
from anthropic import AsyncAnthropic
from anthropic.types.shared import ErrorResponse
from openai import AsyncOpenAI
from openai.types.responses import ResponseErrorEvent

from proxy.core.model.types import Reason, Refusal
from proxy.http.error_formats import error, error_for
from tests.proxy.wire import scripts
from tests.proxy.wire.raw_client import request
from tests.proxy.wire.site import Site

MESSAGES: Any = [{"role": "user", "content": "hi"}]
SSE_HEAD = scripts.STREAM_HEAD


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (404, "invalid_request_error"),
        (429, "rate_limit_error"),
        (499, "invalid_request_error"),
        (500, "server_error"),
        (502, "server_error"),
        (505, "invalid_request_error"),  # a retry would fail again
    ],
)
def test_openai_error_format(status: int, kind: str) -> None:
    body = json.loads(error(status, "why", "c", "p"))
    assert body == {"error": {"message": "why", "type": kind, "param": "p", "code": "c"}}


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens", "/v1/messages/x"])
@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (502, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
        (505, "invalid_request_error"),
    ],
)
def test_anthropic_error_format(path: str, status: int, kind: str) -> None:
    body = json.loads(error_for(path, refusal(status), b"id-1"))
    expected = {"type": kind, "message": "why"}
    assert body == {"type": "error", "error": expected, "request_id": "id-1"}
    if status != 413:  # its client has no name for 413
        assert ErrorResponse.model_validate(body, strict=True).error.type == kind


@pytest.mark.parametrize("path", ["/cohere/v2/chat", "/cohere/v2/chat/render", "/cohere/nowhere"])
def test_cohere_error_format(path: str) -> None:
    assert json.loads(error_for(path, refusal(400), b"id-1")) == {"message": "why", "id": "id-1"}
    assert json.loads(error_for(path, refusal(400), b"")) == {"message": "why"}


@pytest.mark.parametrize("path", ["", "/v1/messagesx", "/coherent", "/v1/responses", "/v2/embed"])
def test_other_paths_use_the_openai_format(path: str) -> None:
    assert error_for(path, refusal(404), b"id-1") == error(404, "why", "c", "p")


def refusal(status: int) -> Refusal:
    return Refusal(status, Reason.BAD_REQUEST, "why", "c", "p")


# On the wire


@pytest.fixture
async def client(site: Site) -> AsyncIterator[AsyncAnthropic]:
    """Return Anthropic's client without automatic retries."""
    url = f"http://127.0.0.1:{site.port}"
    async with AsyncAnthropic(base_url=url, api_key="x", max_retries=0, timeout=60) as client:
        yield client


async def refused(
    client: AsyncAnthropic, model: str = "tiny", text: str = "hi", **options: Any
) -> anthropic.APIStatusError:
    messages: Any = [{"role": "user", "content": text}]
    with pytest.raises(anthropic.APIStatusError) as error:
        await client.messages.create(model=model, max_tokens=1, messages=messages, **options)
    return error.value


def kind_of(error: anthropic.APIStatusError) -> str:
    body: Any = error.body
    return str(body["error"]["type"])


async def test_anthropic_client_reads_refusals(site: Site, client: AsyncAnthropic) -> None:
    missing = await refused(client, "huge")
    assert (type(missing), kind_of(missing)) == (anthropic.NotFoundError, "not_found_error")
    assert "does not exist" in missing.message
    long = await refused(client, text="word " * 60_000)
    assert (type(long), kind_of(long)) == (anthropic.BadRequestError, "invalid_request_error")
    odd = await refused(client, extra_body={"kv_transfer_params": {"a": 1}})
    assert (type(odd), kind_of(odd)) == (anthropic.BadRequestError, "invalid_request_error")
    site.down("w0")
    gone = await refused(client)
    assert (gone.status_code, kind_of(gone)) == (503, "overloaded_error")
    assert int(gone.response.headers["retry-after"]) >= 1


async def test_anthropic_client_raises_on_a_broken_stream(
    site: Site, client: AsyncAnthropic
) -> None:
    message = {"id": "m", "type": "message", "role": "assistant", "content": [], "model": "tiny"}
    start = {"type": "message_start", "message": message}
    first_event = b"event: message_start\ndata: %b\n\n" % json.dumps(start).encode()
    site.fake.then(scripts.raw(SSE_HEAD + scripts.chunk(first_event), end="reset"))
    stream = await client.messages.create(
        model="tiny", max_tokens=1, messages=MESSAGES, stream=True
    )
    assert (await anext(aiter(stream))).type == "message_start"
    with pytest.raises(anthropic.APIStatusError, match="worker failed") as error:
        await anext(aiter(stream))
    assert kind_of(error.value) == "api_error"


def numbered(kind: str, number: int, **options: Any) -> bytes:
    data = json.dumps({"type": kind, "sequence_number": number, **options})
    return scripts.chunk(f"event: {kind}\ndata: {data}\n\n".encode())


async def test_openai_client_raises_on_a_broken_response(site: Site) -> None:
    """The event has the documented format, and the client raises it."""
    events = numbered("response.created", 0, response={"id": "resp_1", "output": []})
    events += numbered("response.in_progress", 1, response={"id": "resp_1", "output": []})
    events += numbered("response.output_text.delta", 2, delta="a", item_id="m")
    site.fake.always(scripts.raw(SSE_HEAD + events, end="reset"))
    url = f"http://127.0.0.1:{site.port}/v1"
    async with AsyncOpenAI(base_url=url, api_key="x", max_retries=0, timeout=60) as client:
        stream = await client.responses.create(model="tiny", input="hi", stream=True)
        seen = [(await anext(stream)).type for _ in range(3)]
        with pytest.raises(openai.APIError, match="worker failed") as error:
            await anext(stream)
    assert error.value.code == "worker_reset"
    assert seen[-1] == "response.output_text.delta"
    answer = await site.ask(request(b'{"model": "tiny", "input": "hi", "stream": true}',
                                    path="/v1/responses"))  # fmt: skip
    name, data = answer.body.split(b"\n\n")[-2].split(b"\n")
    assert name == b"event: error"
    event = ResponseErrorEvent.model_validate_json(data.removeprefix(b"data: "), strict=True)
    assert (event.type, event.code, event.param) == ("error", "worker_reset", None)
    assert (event.sequence_number, event.message) == (3, "The worker failed during the response.")
