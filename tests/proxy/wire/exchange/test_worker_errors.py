"""Errors of workers in place of which the client gets the router's own."""

from __future__ import annotations

import json

import pytest

from proxy.core.tenants.tenants import TenantSpec
from tests.proxy.wire import scripts
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.raw_client import chat, request
from tests.proxy.wire.site import Fake, Site

NOT_FOUND = b'{"detail":"Not Found"}'
KEY = "sk-vs-aaaaaaaaaaaaaaaa"
BODY = {"model": "tiny", "input": "a", "query": "a", "documents": ["b"]}


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank"])
@pytest.mark.parametrize("framing", ["length", "chunked", "close"])
async def test_path_that_the_model_lacks_gets_the_list_of_models(
    site: Site, path: str, framing: str
) -> None:
    site.always(scripts.answer(404, NOT_FOUND, framing=framing))
    answer = await site.ask(request(json.dumps(BODY).encode(), path=path))
    assert answer.status == 404
    says = f"A worker of the model `tiny` does not support {path}. This fleet serves: tiny."
    assert answer.error() == {
        "message": says,
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_supported",
    }
    assert len(site.served()) == 1
    assert site.worker("w0").breaker.has_no_failures


@pytest.mark.parametrize("body", [b'{"detail":"Gone"}', b"", NOT_FOUND + b"."])
async def test_other_404_passes_unchanged(site: Site, body: bytes) -> None:
    site.always(scripts.answer(404, body))
    answer = await site.ask(request(json.dumps(BODY).encode(), path="/v1/embeddings"))
    assert (answer.status, answer.body) == (404, body)


@pytest.mark.parametrize("api_key", [None, "old"])
async def test_refused_key_of_the_router_is_a_failure_of_the_worker(
    start: Start, api_key: str | None
) -> None:
    """The client's key never reaches the worker, so the client cannot have the wrong one."""
    site = await start(Fake("w0", api_key=api_key), Fake("w1"))
    site.set_tenants(TenantSpec("a"), a=KEY)
    site.fakes["w0"].always(scripts.answer(401, b'{"error":"Unauthorized"}'))
    key = b"Authorization: Bearer " + KEY.encode()
    assert [(await site.ask(chat("hi", key))).status for _ in range(12)] == [200] * 12
    assert not site.worker("w0").breaker.closed
    site.down("w1")
    assert (await site.ask(chat("hi", key))).status == 502


async def test_refused_key_of_the_client_goes_to_the_client(site: Site) -> None:
    site.always(scripts.answer(401, b'{"error":"Unauthorized"}'))
    assert (await site.ask(chat("hi"))).status == 401
    assert site.worker("w0").breaker.has_no_failures
