"""Routes that are forwarded, refused, or answered by the router."""

from __future__ import annotations

import pytest

from tests.proxy.wire import scripts
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.raw_client import Client, chat, get, request
from tests.proxy.wire.site import Fake, Site

# The other paths are in tests/proxy/core/request/test_route_lookup.py.
POSTS = ["/v1/chat/completions", "/v1/messages/render", "/tokenize"]
OPERATOR_PATHS = ["/sleep", "/start_profile"]
TRICK_PATHS = [
    "//v1/chat/completions",
    "/v1/../sleep",
    "/v1/chat%2Fcompletions",
    "/V1/chat/completions",
    "/v1/responses//cancel",
    "/v1/chat/completions;x=/sleep",
    "/admin/workers",
]


@pytest.mark.parametrize("path", POSTS)
async def test_known_route_is_forwarded(site: Site, path: str) -> None:
    body = b'{"model": "tiny", "prompt": "x", "input": "x", "query": "x", "documents": ["y"]}'
    site.fake.always(scripts.answer(200, b'{"ok": 1}'))
    site.fake.always(scripts.answer(200, b'{"ok": 1}'), "/tokenize")
    answer = await site.ask(request(body, path=path + "?trace=1&a=%20b"))
    assert (answer.status, answer.body) == (200, b'{"ok": 1}')
    call = site.fake.calls[-1]
    assert (call.method, call.target) == (b"POST", path.encode() + b"?trace=1&a=%20b")
    assert call.body == body


@pytest.mark.parametrize("path", [*OPERATOR_PATHS, *TRICK_PATHS])
async def test_other_paths_are_404_and_reach_no_worker(site: Site, path: str) -> None:
    for data in (request(path=path), get(path)):
        answer = await site.ask(data)
        assert answer.status == 404
        assert answer.error()["type"] == "invalid_request_error"
    assert site.fake.calls == []


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/v1/chat/completions", b"POST"),
        ("OPTIONS", "/v1/chat/completions", b"POST"),
        ("POST", "/v1/models", b"GET, HEAD"),
        ("DELETE", "/v1/models/tiny", b"GET, HEAD"),
    ],
)
async def test_wrong_method_gets_405_with_allow(
    site: Site, method: str, path: str, allow: bytes
) -> None:
    answer = await site.ask(request(b"{}", path=path, method=method))
    assert (answer.status, answer.one(b"allow")) == (405, allow)
    assert answer.error()["param"] is None  # no parameter of the request is wrong
    assert site.fake.calls == []


MANY_MODELS = tuple(f"{n:04}-" + "\u00e9" * 195 for n in range(1000))


@pytest.mark.parametrize("all_up", [True, False])
async def test_error_names_only_a_few_of_many_models(start: Start, all_up: bool) -> None:
    """The length of the response does not grow with the fleet."""
    site = await start(Fake("w0"), *([] if all_up else [Fake("w1", up=False)]))
    site.fleet.roster.set_served("w0", MANY_MODELS, 65_536)
    for data in (get("/v1/models/x"), chat(model="x")):
        answer = await site.ask(data)
        assert answer.status == (404 if all_up else 503)
        message = answer.error()["message"]
        assert MANY_MODELS[0][:50] in message
        assert MANY_MODELS[10][:10] not in message
        assert " more" in message
        assert len(answer.body) < 4096


async def test_router_answers_its_own_paths(site: Site) -> None:
    client = await site.client()
    assert (await client.ask(get("/health"))).status == 200
    assert (await client.ask(get("/ready"))).status == 200
    answer = await client.ask(get("/metrics"))
    assert answer.status == 200
    assert b"proxy_" in answer.body
    assert answer.one(b"content-type").startswith(b"text/plain")
    answer = await client.ask(
        get("/metrics", b"Accept: application/openmetrics-text; version=1.0.0")
    )
    assert answer.body.endswith(b"# EOF\n")
    assert site.fake.calls == []


async def listed_models(client: Client) -> list[str]:
    answer = await client.ask(get("/v1/models"))
    assert answer.status == 200
    listed = answer.json()
    assert listed["object"] == "list"
    return sorted(card["id"] for card in listed["data"])


async def test_models_lists_models_of_live_workers(start: Start) -> None:
    site = await start(Fake("w0"), Fake("w1"), Fake("w2", model="other"))
    client = await site.client()
    assert await listed_models(client) == ["other", "tiny"]
    await site.fakes["w2"].die()
    site.down("w2")
    assert await listed_models(client) == ["tiny"]
    site.down("w0")
    assert await listed_models(client) == ["tiny"]
    site.down("w1")
    assert await listed_models(client) == []
    site.up("w2")
    assert await listed_models(client) == ["other"]


async def test_model_is_returned_by_name(start: Start) -> None:
    site = await start(Fake("w0"), Fake("w1", model="llama/8b", max_model_len=4096))
    site.fleet.roster.set_served(
        "w0", ("tiny", "adapter"), 16384, {"tiny": ("/t", None), "adapter": ("/a", "tiny")}
    )
    client = await site.client()
    listed = (await client.ask(get("/v1/models"))).json()["data"]
    for card in listed:
        assert (await client.ask(get(f"/v1/models/{card['id']}"))).json() == card
    assert [(card["root"], card["parent"]) for card in listed] == [
        ("/t", None),
        ("/a", "tiny"),
        ("llama/8b", None),  # the worker did not list it
    ]
    answer = await client.ask(get("/v1/models/llama%2F8b"))
    assert (answer.json()["id"], answer.json()["max_model_len"]) == ("llama/8b", 4096)
    for name in ("huge", "tiny/", "%ff%00", "../models/tiny"):
        answer = await client.ask(get(f"/v1/models/{name}"))
        assert (answer.status, answer.error()["code"]) == (404, "model_not_found"), name
    assert (await client.ask(get("/v1/models/"))).status == 404
    site.down("w1")
    answer = await client.ask(get("/v1/models/llama%2F8b"))
    assert (answer.status, answer.error()["code"]) == (503, "no_worker")
    assert not any(fake.calls for fake in site.fakes.values())
