"""Streams that go on from the text that their client has."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from proxy.core.fleet.leases import Lease
from proxy.core.model.role import Role
from proxy.core.model.types import Outcome, Usage
from proxy.core.request.continuable import FIELD, NO_TOKENS, OTHER_OUTPUT
from tests.proxy.http import agent_streams
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.exchange.engines import (
    THREE,
    TWO,
    WORDS,
    Agents,
    Engines,
    TextEngines,
    check_broken,
    in_turn,
    journaled,
)
from tests.proxy.wire.exchange.test_moves import Paced, drain
from tests.proxy.wire.fake_worker import Call
from tests.proxy.wire.kv import Faults
from tests.proxy.wire.pairs import ask, chat_body, expected, pairs
from tests.proxy.wire.raw_client import chat
from tests.proxy.wire.site import Fake, Site

ROUTES = "chat", "completions"
ON = {"continues_by_text": True}


async def by_text(start: Start, *fakes: Fake, route: str = "chat") -> tuple[Site, TextEngines]:
    return await start(*(fakes or TWO), wire=ON), TextEngines(route=route)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("dies_after", range(len(WORDS)))
async def test_client_sees_one_stream(start: Start, route: str, dies_after: int) -> None:
    site, engines = await by_text(start, route=route)
    in_turn(site, engines.serve(dies_after=dies_after), engines.serve())
    engines.check(await site.ask(engines.request(max_tokens=50)))
    # Without a byte of the response, the request is retried.
    is_retried = route == "completions" and not dies_after
    assert sum(site.metrics.continuations.values()) == (not is_retried)
    limits = [each["max_tokens"] for each in engines.asked]
    # The space at the end of a chat's text is generated again.
    again = route == "chat" and dies_after > 0 and WORDS[dies_after - 1].isspace()
    assert limits == [50, 50 - dies_after + again]


@pytest.mark.parametrize("route", ROUTES)
async def test_a_stream_outlives_two_workers(start: Start, route: str) -> None:
    site, engines = await by_text(start, *THREE, route=route)
    dying = engines.serve(dies_after=3), engines.serve(dies_after=4, end="close")
    in_turn(site, *dying, engines.serve())
    engines.check(await site.ask(engines.request()))
    assert engines.behind == "".join(WORDS[:7]).rstrip("\n" if route == "chat" else "")


@pytest.mark.plain("replaces a method")
async def test_the_tenant_pays_for_each_token_once(start: Start) -> None:
    site, engines = await by_text(start)
    reported: list[Usage | None] = []
    finish = site.router.leases.finish

    def finished(
        lease: Lease, now: float, outcome: Outcome, usage: Usage | None = None, **failure: Any
    ) -> None:
        reported.append(usage)
        finish(lease, now, outcome, usage, **failure)

    site.router.leases.finish = finished  # type: ignore[method-assign]
    in_turn(site, engines.serve(dies_after=4), engines.serve())
    engines.check(await site.ask(engines.request()))
    assert reported == [None, Usage(7, len(WORDS))]


async def test_other_space_than_the_first_worker_s_is_no_error(start: Start) -> None:
    site, engines = await by_text(start)
    other = TextEngines(["Hello", "\n", "there"])
    in_turn(site, TextEngines(["Hello", "\n\n", "x"]).serve(dies_after=2), other.serve())
    answer = await site.ask(engines.request())
    [[kind, text]] = agent_streams.read_chat(answer.body)[0]
    assert (kind, text) == ("content", "Hello\n\nthere")


# Engines, tokens before the worker dies, fields of the request, and why the stream is lost.
LOST: dict[str, tuple[Engines, int, dict[str, Any], str]] = {
    "reasoning and calls": (Agents(route="chat"), 3, {}, OTHER_OUTPUT),
    "messages need a journal": (Agents(route="messages"), 3, {}, ""),
    "its limit is reached": (TextEngines(), 5, {"max_tokens": 5, "temperature": 1}, NO_TOKENS),
    "seed": (TextEngines(), 3, {"seed": 3}, FIELD),
    "response_format": (TextEngines(), 3, {"response_format": {"type": "json_object"}}, FIELD),
    "tool_choice": (
        TextEngines(), 3, {"tools": [{"type": "function"}], "tool_choice": "required"}, FIELD,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LOST)
async def test_streams_that_cannot_go_on_end_with_an_error(
    start: Start, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    engines, dies_after, fields, why = LOST[case]
    site = await start(*TWO, wire=ON)
    in_turn(site, engines.serve(dies_after=dies_after))
    await check_broken(await site.send(engines.request(**fields)))
    assert site.metrics.lost_streams == ({why: 1} if why else {})
    assert why != FIELD or repr(case) in caplog.text


async def test_a_server_that_reasons_anew_is_noticed(start: Start) -> None:
    site, engines = await by_text(start)
    anew = Agents(route="chat")
    in_turn(site, engines.serve(dies_after=3), anew.serve())
    await check_broken(await site.send(engines.request()), b"differs")


async def test_tokens_are_used_where_there_is_a_journal(start: Start) -> None:
    site, engines = await journaled(start, wire=ON)
    in_turn(site, engines.serve(dies_after=3), engines.serve())
    engines.check(await site.ask(engines.request()))
    assert engines.asked[1]["vllm_xargs"] == {"output_so_far": [0, 1, 2]}
    assert engines.asked[1]["messages"] == engines.asked[0]["messages"]


async def test_text_is_used_where_no_other_worker_takes_tokens(start: Start) -> None:
    site, engines = await journaled(start, engines=TextEngines(), wire=ON)

    async def first(call: Call) -> None:
        [idle] = [name for name, fake in site.fakes.items() if not fake.served]
        site.worker(idle).reports_prefixes = False
        await engines.serve(dies_after=3)(call)

    in_turn(site, first, engines.serve())
    engines.check(await site.ask(engines.request()))
    assert engines.behind == "".join(WORDS[:3])


@pytest.mark.parametrize("journals", [True, False])
async def test_a_silent_stream_leaves_a_worker_that_is_down(start: Start, journals: bool) -> None:
    site, engines = await by_text(start)
    if journals:
        site.fleet.roster.stream_tokens = engines.tokens

    async def first(call: Call) -> None:
        [busy] = [name for name, fake in site.fakes.items() if fake.served]
        site.worker(busy).reports_prefixes = journals
        await engines.serve(dies_after=4, end="stall")(call)

    in_turn(site, first, engines.serve())
    client = await site.send(engines.request())
    while len(engines.published.get(next(iter(engines.published), ""), ())) < 4:
        await site.swept()
    [busy] = [name for name, fake in site.fakes.items() if fake.served]
    site.down(busy)
    await site.pass_time(11.0)
    site.skip(11.0)
    engines.check(await asyncio.wait_for(client.answer(), 5))


@pytest.mark.parametrize("engines", [Engines(), Agents(route="chat")])
async def test_a_greedy_stream_that_has_no_usable_text_begins_anew(
    start: Start, engines: Engines
) -> None:
    site, engines = await journaled(start, engines=engines, wire=ON)
    site.fleet.roster.stream_tokens = lambda *_: None
    in_turn(site, engines.serve(dies_after=3), engines.serve())
    fields = {"response_format": {"type": "json_object"}, "temperature": 0}
    engines.check(await site.ask(engines.request(**fields)), [3])


@pytest.mark.parametrize(
    "fields", [{"max_completion_tokens": "abc"}, {"tools": 5}, {"tools": [{"function": None}]}, {}]
)
async def test_a_completion_s_ignored_fields_have_no_effect(
    start: Start, fields: dict[str, Any]
) -> None:
    site, engines = await by_text(start, route="completions")
    in_turn(site, engines.serve(dies_after=3), engines.serve())
    engines.check(await site.ask(engines.request(max_tokens=None, **fields)))
    assert engines.asked[1] == {**engines.asked[0], "prompt": 'hiHello "w', "max_tokens": 13}


async def test_a_drained_worker_s_streams_move(start: Start) -> None:
    site, engines = await by_text(start)
    streams = Paced(site, engines)
    await streams.begin(3, only_first=True)
    assert await drain(site, "w0") == (3, {})
    await streams.end()


async def test_prompt_of_the_request_is_unchanged_otherwise(start: Start) -> None:
    site, engines = await by_text(start)
    in_turn(site, engines.serve(dies_after=2), engines.serve())
    fields = {"stop": ["zz"], "tools": [{"type": "function"}], "min_tokens": 9}
    engines.check(await site.ask(chat("hi", stream=True, **fields)))
    first, second = engines.asked
    message = {"role": "assistant", "content": "Hello"}
    assert second == {
        **first, "messages": [*first["messages"], message], "min_tokens": 7,
        "continue_final_message": True, "add_generation_prompt": False,
        "max_tokens": first["max_tokens"] - 2,
    }  # fmt: skip


async def test_a_stream_after_a_hand_over_goes_on_as_a_whole(start: Start) -> None:
    here = await pairs(start, prefills=1, wire=ON)
    body = chat_body(stream=True, max_tokens=9)
    victim = here.victim(Role.DECODE, body)
    here.kv.inject(victim.name, Faults(cut=(2, "reset")))
    await ask(here, body)
    await here.settled()
    [other] = {"d0", "d1"} - {victim.name}
    assert here.legs() == ["prefill p0", f"decode {victim.name}", f"whole {other}"]
    [call] = here.site.fakes[other].served
    had = "".join(expected(body)[:2])
    assert call.json()["messages"][1:] == [{"role": "assistant", "content": had.rstrip()}]
    assert call.json()["continue_final_message"]
