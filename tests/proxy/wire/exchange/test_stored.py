"""A response that a worker stores: what refers to it is for that worker, be it up or down."""

from __future__ import annotations

import json

import pytest

from tests.proxy.wire import scripts
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.raw_client import Answer, get, request
from tests.proxy.wire.site import Fake, Site

PATH = "/v1/responses"


async def stored(start: Start) -> tuple[Site, str]:
    """Have a response stored; return who has it."""
    site = await start(Fake("w0"), Fake("w1"), router={"retry_budget": 1.0})
    for name, fake in site.fakes.items():
        body = json.dumps({"id": f"resp_{name}", "object": "response", "output": []}).encode()
        fake.always(scripts.answer(200, body))
    answer = await ask(site, {"input": "hello"})
    return site, answer.json()["id"].removeprefix("resp_")


async def ask(site: Site, fields: dict[str, object]) -> Answer:
    return await site.ask(request(json.dumps({"model": "tiny"} | fields).encode(), path=PATH))


async def go_on(site: Site, holder: str) -> Answer:
    """Refer to what a worker has stored."""
    return await ask(site, {"input": "go on", "previous_response_id": f"resp_{holder}"})


def asked(site: Site) -> dict[str, int]:
    return {name: len(fake.served) for name, fake in site.fakes.items()}


async def test_the_worker_that_has_it_is_asked_each_time(start: Start) -> None:
    site, holder = await stored(start)
    for _ in range(6):
        assert (await go_on(site, holder)).json()["id"] == f"resp_{holder}"
    assert (await site.ask(get(f"{PATH}/resp_{holder}"))).status == 200
    cancel = request(b"", path=f"{PATH}/resp_{holder}/cancel")
    assert (await site.ask(cancel)).status == 200
    assert asked(site)[holder] == sum(asked(site).values()) == 9
    assert site.fakes[holder].served[-1].path == f"{PATH}/resp_{holder}/cancel"


@pytest.mark.parametrize("retrieve", [False, True])
async def test_while_it_is_down_nobody_else_is_asked(start: Start, retrieve: bool) -> None:
    """Another would say 404: the client would take what it has for lost."""
    site, holder = await stored(start)
    site.down(holder)
    if retrieve:
        answer = await site.ask(get(f"{PATH}/resp_{holder}"))
    else:
        answer = await go_on(site, holder)
    assert (answer.status, answer.error()["code"]) == (503, "no_worker")
    assert answer.one(b"retry-after") == b"1"
    assert sum(asked(site).values()) == 1
    assert (await ask(site, {"input": "hello"})).status == 200  # others are served meanwhile
    site.up(holder)
    assert (await go_on(site, holder)).json()["id"] == f"resp_{holder}"


@pytest.mark.parametrize("second", ['"resp_other"', "null"])
async def test_a_body_that_names_two_responses_is_refused(start: Start, second: str) -> None:
    site, holder = await stored(start)
    names = f'"previous_response_id": "resp_{holder}", "previous_response_id": {second}'
    body = f'{{"model": "tiny", "input": "go on", {names}}}'.encode()
    answer = await site.ask(request(body, path=PATH))
    assert (answer.status, answer.error()["param"]) == (400, "previous_response_id")
    assert sum(asked(site).values()) == 1


async def test_one_that_drains_is_asked_still(start: Start) -> None:
    site, holder = await stored(start)
    site.fleet.roster.drain(holder)
    assert (await go_on(site, holder)).json()["id"] == f"resp_{holder}"


@pytest.mark.parametrize(
    "script",
    [scripts.error(500, "no"), scripts.error(503), scripts.raw(b"HTTP/1.1 200", end="reset")],
)
async def test_if_it_fails_no_other_is_tried(start: Start, script: scripts.Script) -> None:
    site, holder = await stored(start)
    site.fakes[holder].then(script)
    assert (await go_on(site, holder)).status in (500, 502, 503)
    other = "w1" if holder == "w0" else "w0"
    assert asked(site)[other] == 0


async def test_once_it_has_left_the_fleet_any_worker_says_that_there_is_none(start: Start) -> None:
    site, holder = await stored(start)
    site.fleet.roster.remove(holder)
    other = "w1" if holder == "w0" else "w0"
    site.fakes[other].then(scripts.error(404, "no such response"))
    assert (await go_on(site, holder)).status == 404
    assert asked(site)[other] == 1
