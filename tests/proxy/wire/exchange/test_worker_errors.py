"""Errors of workers in place of which the client gets the router's own."""

from __future__ import annotations

import json

import pytest

from tests.proxy.wire import scripts
from tests.proxy.wire.raw_client import request
from tests.proxy.wire.site import Site

NOT_FOUND = b'{"detail":"Not Found"}'
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
