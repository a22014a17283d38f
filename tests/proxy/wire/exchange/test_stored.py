"""Requests that refer to a stored response go to the worker that stores it."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.proxy.wire import scripts
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.raw_client import Answer, Client, get, request
from tests.proxy.wire.site import Fake, Site, eventually

PATH = "/v1/responses"


async def store_response(start: Start) -> tuple[Site, str]:
    """Store a response; return the name of its worker."""
    site = await start(Fake("w0"), Fake("w1"), router={"retry_budget": 1.0})
    for name, fake in site.fakes.items():
        body = json.dumps({"id": f"resp_{name}", "object": "response", "output": []}).encode()
        fake.always(scripts.answer(200, body))
    answer = await ask(site, {"input": "hello"})
    return site, answer.json()["id"].removeprefix("resp_")


async def ask(site: Site, fields: dict[str, object]) -> Answer:
    """Send a request to /v1/responses."""
    return await site.ask(request(json.dumps({"model": "tiny"} | fields).encode(), path=PATH))


async def continue_response(site: Site, holder: str) -> Answer:
    """Send a request that refers to a worker's stored response."""
    return await ask(site, {"input": "go on", "previous_response_id": f"resp_{holder}"})


def request_counts(site: Site) -> dict[str, int]:
    return {name: len(fake.served) for name, fake in site.fakes.items()}


async def test_stored_response_is_requested_from_its_worker(start: Start) -> None:
    site, holder = await store_response(start)
    for _ in range(6):
        assert (await continue_response(site, holder)).json()["id"] == f"resp_{holder}"
    assert (await site.ask(get(f"{PATH}/resp_{holder}"))).status == 200
    cancel = request(b"", path=f"{PATH}/resp_{holder}/cancel")
    assert (await site.ask(cancel)).status == 200
    assert request_counts(site)[holder] == sum(request_counts(site).values()) == 9
    assert site.fakes[holder].served[-1].path == f"{PATH}/resp_{holder}/cancel"


@pytest.mark.parametrize("kind", ["retrieve", "continue", "large"])
async def test_owner_that_another_process_reports_late_is_waited_for(
    start: Start, kind: str
) -> None:
    site, holder = await store_response(start)
    site.wire.router.report_stored_response = lambda *_: None  # there are other processes
    name = f"resp_{holder}_late"
    fields = {"input": "go on", "previous_response_id": name, "metadata": {"a": ""}}
    if kind == "large":
        fields["metadata"] = {"a": "x" * 300_000}
    asked = site.ask(get(f"{PATH}/{name}")) if kind == "retrieve" else ask(site, fields)
    answer = asyncio.create_task(asked)
    await eventually(lambda: site.wire.short_waits)
    site.wire.router.learn_remote_response(name, holder, "")
    assert (await answer).status == 200
    assert request_counts(site)[holder] == sum(request_counts(site).values()) == 2
    assert not site.wire.short_waits


async def test_unknown_owner_is_waited_for_once(start: Start) -> None:
    site, _ = await store_response(start)
    site.wire.router.report_stored_response = lambda *_: None
    assert (await site.ask(get(f"{PATH}/resp_none"))).status == 200  # any worker may know it
    client = await Client.connect(site.port)
    await client.send(get(f"{PATH}/resp_none"))
    await eventually(lambda: site.wire.short_waits)
    client.writer.close()
    await eventually(lambda: not site.wire.short_waits)
    await site.settled()
    assert sum(request_counts(site).values()) == 2


@pytest.mark.parametrize("retrieve", [False, True])
async def test_stored_response_of_a_down_worker_gets_503(start: Start, retrieve: bool) -> None:
    """Another worker's 404 would look as if the response were lost."""
    site, holder = await store_response(start)
    site.down(holder)
    if retrieve:
        answer = await site.ask(get(f"{PATH}/resp_{holder}"))
    else:
        answer = await continue_response(site, holder)
    assert (answer.status, answer.error()["code"]) == (503, "no_worker")
    assert answer.one(b"retry-after") == b"1"
    assert sum(request_counts(site).values()) == 1
    assert (await ask(site, {"input": "hello"})).status == 200  # other requests are served
    site.up(holder)
    assert (await continue_response(site, holder)).json()["id"] == f"resp_{holder}"


@pytest.mark.parametrize(
    "script", [scripts.error(500, "no"), scripts.raw(b"HTTP/1.1 200", end="reset")]
)
async def test_failed_request_for_a_stored_response_is_not_retried(
    start: Start, script: scripts.Script
) -> None:
    site, holder = await store_response(start)
    site.fakes[holder].then(script)
    assert (await continue_response(site, holder)).status in (500, 502)
    other = "w1" if holder == "w0" else "w0"
    assert request_counts(site)[other] == 0


@pytest.mark.parametrize("by", ["header", "response"])
async def test_turns_of_a_session_are_known_and_its_id_passes(start: Start, by: str) -> None:
    site, holder = await store_response(start)
    fields = {"model": "tiny", "input": "word " * 2000}
    if by == "response":
        fields["previous_response_id"] = f"resp_{holder}"
    headers = [b"X-Explain: 1", *([b"X-Session-Id: a"] if by == "header" else [])]
    found = []
    for _ in range(2):
        answer = await site.ask(request(json.dumps(fields).encode(), *headers, path=PATH))
        found.append(answer.one(b"x-route").split(b"; ")[1])
    first = b"session=new" if by == "header" else b"session=stayed"
    assert found == [first, b"session=stayed"]
    heads = [call.head for fake in site.fakes.values() for call in fake.served]
    assert sum(b"\r\nX-Session-Id: a\r\n" in head for head in heads) == (2 if by == "header" else 0)
