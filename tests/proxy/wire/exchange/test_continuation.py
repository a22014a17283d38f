"""Streams that go on from another worker after theirs has failed."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from proxy.core.fleet.worker import Worker
from proxy.core.request.continuable import FIELD, NO_TOKENS, NO_WORKER, OTHER_OUTPUT
from proxy.wire.exchange.continuation import MAX_REPEATED_TOKENS
from proxy.wire.exchange.continuation_log import INTERVAL_S, MAX_LINES, ContinuationLog
from proxy.wire.exchange.owner import MAX_PIECES
from proxy.wire.exchange.request_record import RequestRecord
from tests.proxy.wire import scripts
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.fake_worker import Call, Script
from tests.proxy.wire.raw_client import Client, chat, request
from tests.proxy.wire.site import Fake, Site, eventually

# Escapes, several bytes a character, repetitions.
WORDS = ["Hel", "lo", ' "w', "\\", "ö", "rld", "\n\n", "a", "a", "a", "😀", " data: [DONE]", "end"]
ROLE = {"role": "assistant", "content": ""}


class Engines:
    """Workers that generate the same text, and the journals of their tokens."""

    def __init__(self, words: Sequence[str] = WORDS, *, route: str = "chat") -> None:
        self.words = list(words)
        self.route = route
        self.published: dict[str, list[int]] = {}  # by X-Request-Id; a token is its word's number
        self.asked: list[dict[str, Any]] = []

    def serve(
        self,
        *,
        dies_after: int | None = None,
        end: str = "reset",
        ahead: int = 0,
        pause: asyncio.Event | None = None,
    ) -> Script:
        """Return a script; the worker dies after that many tokens of its own.

        `ahead`: further tokens that the engine published and the client did not get. `pause`: the
        second token comes after this event.
        """

        async def run(call: Call) -> None:
            body = call.json()
            self.asked.append(body)
            request_id = call.all(b"x-request-id")[0].decode()
            so_far = list(body.get("vllm_xargs", {}).get("output_so_far", ()))
            await call.send(scripts.STREAM_HEAD)
            if self.route == "chat":
                await call.send(scripts.chunk(self.event(ROLE)))
            tokens = list(so_far)
            repeated = "".join(self.words[number] for number in so_far)
            for own, number in enumerate(range(len(so_far), len(self.words))):
                if own == dies_after:
                    ahead_to = min(number + ahead, len(self.words) - 1)
                    self.published[request_id] = [*tokens, *range(number, ahead_to)]
                    await scripts.finish(call, end)
                    return
                if own == 1 and pause is not None:
                    await pause.wait()
                tokens.append(number)
                self.published[request_id] = list(tokens)
                text, repeated = repeated + self.words[number], ""
                last = number + 1 == len(self.words)
                await call.send(scripts.chunk(self.event(self.piece(text), last=last)))
            usage = scripts.usage_event(7, len(tokens))
            await call.send(scripts.chunk(usage) + scripts.chunk(scripts.DONE) + scripts.LAST_CHUNK)

        return run

    def piece(self, text: str) -> dict[str, str]:
        return {"content": text} if self.route == "chat" else {"text": text}

    def event(self, piece: dict[str, str], *, last: bool = False) -> bytes:
        body = {"delta": piece} if self.route == "chat" else piece
        choice = {"index": 0, **body, "logprobs": None, "finish_reason": "stop" if last else None}
        whole = {"id": "c", "object": "chunk", "created": 1, "model": "tiny", "choices": [choice]}
        return f"data: {json.dumps(whole, ensure_ascii=False)}\n\n".encode()

    def tokens(self, worker: Worker, request_id: str) -> list[int] | None:
        assert worker.can_continue
        return self.published.get(request_id)


def with_journals(site: Site, engines: Engines) -> None:
    site.fleet.roster.stream_tokens = engines.tokens
    for name in site.fakes:
        site.worker(name).reports_prefixes = True


async def journaled(
    start: Start, engines: Engines | None = None, *, workers: int = 2
) -> tuple[Site, Engines]:
    """Start a router before workers with journals."""
    site = await start(*(Fake(f"w{number}") for number in range(workers)))
    engines = engines or Engines()
    with_journals(site, engines)
    return site, engines


def in_turn(site: Site, *turns: Script) -> None:
    """Answer the calls to all workers with these scripts, in order."""
    left = list(turns)

    async def serve(call: Call) -> None:
        await left.pop(0)(call)

    site.always(serve)


async def text_of(client: Client) -> tuple[str, list[Any]]:
    """Return the text of a stream, and its events without [DONE]."""
    answer = await client.answer()
    assert answer.status == 200
    *events, done = [each.removeprefix(b"data: ") for each in answer.body.split(b"\n\n")[:-1]]
    assert done == b"[DONE]", done
    parsed = [json.loads(event) for event in events]
    pieces = [choice for event in parsed for choice in event["choices"]]
    texts = [piece.get("text") or piece.get("delta", {}).get("content", "") for piece in pieces]
    return "".join(texts), parsed


def completion(**fields: Any) -> bytes:
    body = {"model": "tiny", "prompt": "hi", "max_tokens": 50, "stream": True, **fields}
    return request(json.dumps(body).encode(), path="/v1/completions")


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("dies_after", range(len(WORDS)))
@pytest.mark.parametrize("route", ["chat", "completions"])
async def test_client_sees_one_stream(
    start: Start, route: str, dies_after: int, ahead: int
) -> None:
    site, engines = await journaled(start, Engines(route=route))
    in_turn(site, engines.serve(dies_after=dies_after, ahead=ahead), engines.serve())
    client = await site.send(chat(stream=True) if route == "chat" else completion())
    text, events = await text_of(client)
    assert text == "".join(WORDS)
    finished = [c["finish_reason"] for e in events for c in e["choices"] if c["finish_reason"]]
    assert finished == ["stop"]
    assert events[-1]["usage"] == scripts.usage(7, len(WORDS))
    assert sum(bool(c.get("delta", {}).get("role")) for e in events for c in e["choices"]) == (
        route == "chat"
    )
    # Without a byte of the response, the request is retried.
    is_retried = route == "completions" and not dies_after
    assert sum(site.metrics.continuations.values()) == (not is_retried)
    await site.settled()


async def test_a_stream_outlives_two_workers(start: Start) -> None:
    site, engines = await journaled(start, workers=3)
    in_turn(
        site,
        engines.serve(dies_after=3),
        engines.serve(dies_after=4, end="close"),
        engines.serve(),
    )
    text, _ = await text_of(await site.send(chat(stream=True)))
    assert text == "".join(WORDS)
    assert [body.get("vllm_xargs", {}).get("output_so_far") for body in engines.asked] == [
        None, [0, 1, 2], [0, 1, 2, 3, 4, 5, 6],
    ]  # fmt: skip
    assert {key: value for key, value in engines.asked[2].items() if key != "vllm_xargs"} == (
        engines.asked[0]
    )
    await site.settled()


@pytest.mark.parametrize("failures", [2, 3])
async def test_a_stream_returns_to_a_worker_until_it_has_used_its_attempts(
    start: Start, failures: int
) -> None:
    site, engines = await journaled(start)
    in_turn(site, *[engines.serve(dies_after=2)] * failures, engines.serve())
    client = await site.send(chat(stream=True))
    if failures == 2:
        assert (await text_of(client))[0] == "".join(WORDS)
    else:  # router.retries.attempts: a request that kills workers must not kill all
        assert b'"error"' in (await client.answer()).body.split(b"\n\n")[-2]
    assert len(engines.asked) == 3
    await site.settled()


async def test_a_long_stream_keeps_no_events(start: Start) -> None:
    words = random.Random(3).choices(WORDS, k=600)
    site, engines = await journaled(start, Engines(words))
    in_turn(site, engines.serve(dies_after=500, end="stall"), engines.serve())
    client = await site.send(chat(stream=True))
    await site.swept()
    await site.swept()
    [exchange] = site.wire.exchanges
    assert len(exchange.sent_text.pieces) <= MAX_PIECES  # type: ignore[attr-defined]
    [busy] = [call for call in site.served() if not call.answered.is_set()]
    busy.reset()
    text, _ = await text_of(client)
    assert text == "".join(engines.words)
    await site.settled()


def failing(engines: Engines, failure: bytes, words: int = 1) -> Script:
    """Return a server that lives on after its engine has failed."""

    async def run(call: Call) -> None:
        engines.asked.append(call.json())
        engines.published[call.all(b"x-request-id")[0].decode()] = [*range(words)]
        events = [engines.event(ROLE), *(engines.event(engines.piece(w)) for w in WORDS[:words])]
        await call.send(scripts.STREAM_HEAD + b"".join(map(scripts.chunk, events)))
        await asyncio.sleep(0.03)  # so that the failure is a piece of its own
        await call.send(scripts.chunk(failure))
        await call.send(scripts.chunk(scripts.DONE) + scripts.LAST_CHUNK)

    return run


ENGINE_DIED = scripts.event({"error": {"message": "EngineCore encountered an issue", "code": 500}})
ABORTED = b'data: {"choices":[{"index":0,"delta":{"content":""},"finish_reason":"abort"}]}\n\n'


@pytest.mark.parametrize("failure", [ENGINE_DIED, ABORTED], ids=["died", "aborted"])
@pytest.mark.parametrize("words", [0, 1, 5])
async def test_an_engine_that_fails_under_a_living_server(
    start: Start, failure: bytes, words: int
) -> None:
    site, engines = await journaled(start)
    in_turn(site, failing(engines, failure, words), engines.serve())
    text, _ = await text_of(await site.send(chat(stream=True)))
    assert text == "".join(WORDS)
    assert len(engines.asked) == 2
    # The first worker's: the other one has served the request.
    assert sum(not worker.breaker.has_no_failures for worker in site.fleet.roster) == 1
    await site.settled()


async def test_requests_that_fail_in_every_engine_open_no_breaker(start: Start) -> None:
    """A grammar that does not compile is an error after the role."""
    site, engines = await journaled(start)
    in_turn(site, *[failing(engines, ENGINE_DIED, 0) for _ in range(12)])
    for _ in range(6):
        answer = await (await site.send(chat(stream=True))).answer()
        assert b'"error"' in answer.body
    assert len(engines.asked) == 12
    assert all(worker.breaker.closed for worker in site.fleet.roster)
    await site.settled()


async def test_an_engine_failure_passes_if_the_stream_cannot_go_on(start: Start) -> None:
    site, engines = await journaled(start, workers=1)
    in_turn(site, failing(engines, ENGINE_DIED))
    answer = await (await site.send(chat(stream=True))).answer()
    assert b'"error"' in answer.body
    assert site.metrics.lost_streams == {NO_WORKER: 1}
    await site.settled()


@pytest.mark.parametrize("words", [0, 3])
async def test_a_second_engine_that_fails_is_no_end_of_the_text(start: Start, words: int) -> None:
    site, engines = await journaled(start)
    in_turn(site, engines.serve(dies_after=words), failing(engines, ENGINE_DIED, 0))
    client = await site.send(chat(stream=True))
    await eventually(lambda: len(site.served()) == 1)
    site.fleet.roster.drain(site.served()[0].connection.worker.name)
    answer = await client.answer()
    assert b'"not_continued"' in answer.body
    assert b"another worker failed: EngineCore encountered an issue" in answer.body
    assert site.metrics.continuations == {}
    assert site.metrics.lost_streams == {NO_WORKER: 1}
    await site.settled()


async def test_after_a_second_engine_that_fails_a_stream_goes_on_from_a_third(
    start: Start,
) -> None:
    site = await start(Fake("w0"), Fake("w1"), Fake("w2"))
    engines = Engines()
    with_journals(site, engines)
    in_turn(site, engines.serve(dies_after=3), failing(engines, ENGINE_DIED, 0), engines.serve())
    assert (await text_of(await site.send(chat(stream=True))))[0] == "".join(WORDS)
    await site.settled()


UNKNOWN: dict[str, dict[str, Any]] = {
    "greedy": {"dies_after": 4, "temperature": 0},
    "nothing sent": {"dies_after": 0},
}


@pytest.mark.parametrize("case", UNKNOWN)
async def test_streams_of_unknown_tokens_that_another_worker_repeats(
    start: Start, case: str
) -> None:
    site = await start(Fake("w0"), Fake("w1"))
    engines, fields = Engines(), {**UNKNOWN[case]}
    with_journals(site, engines)
    site.fleet.roster.stream_tokens = lambda *_: None
    in_turn(site, engines.serve(dies_after=fields.pop("dies_after")), engines.serve())
    assert (await text_of(await site.send(chat(stream=True, **fields))))[0] == "".join(WORDS)
    assert all("vllm_xargs" not in body for body in engines.asked)
    await site.settled()


async def test_long_streams_of_unknown_tokens_are_not_repeated(start: Start) -> None:
    site = await start(Fake("w0"), Fake("w1"))
    engines = Engines(["a"] * (MAX_REPEATED_TOKENS + 2))
    with_journals(site, engines)
    site.fleet.roster.stream_tokens = lambda *_: None
    in_turn(site, engines.serve(dies_after=MAX_REPEATED_TOKENS + 1))
    answer = await (await site.send(chat(stream=True, temperature=0))).answer()
    assert b'"error"' in answer.body
    assert site.metrics.lost_streams == {NO_TOKENS: 1}
    await site.settled()


@pytest.mark.parametrize("knows_tokens", [True, False])
async def test_a_worker_that_dies_between_the_last_text_and_the_usage(
    start: Start, *, knows_tokens: bool
) -> None:
    site = await start(Fake("w0"), Fake("w1"))
    engines = Engines()
    with_journals(site, engines)
    if not knows_tokens:
        site.fleet.roster.stream_tokens = lambda *_: None

    async def dies(call: Call) -> None:
        engines.asked.append(call.json())
        engines.published[call.all(b"x-request-id")[0].decode()] = [*range(len(WORDS))]
        pieces = [engines.event(engines.piece(word)) for word in WORDS[:-1]]
        pieces.append(engines.event(engines.piece(WORDS[-1]), last=True))
        await call.send(scripts.STREAM_HEAD + b"".join(map(scripts.chunk, pieces)))
        await scripts.finish(call, "reset")

    in_turn(site, dies, engines.serve())
    text, events = await text_of(await site.send(chat(stream=True, temperature=0)))
    assert text == "".join(WORDS)
    ends = [c["finish_reason"] for event in events for c in event["choices"] if c["finish_reason"]]
    assert ends == ["stop"]
    assert events[-1]["usage"] == scripts.usage(7, len(WORDS))
    await site.settled()


async def test_a_worker_that_refuses_is_counted(start: Start) -> None:
    site, engines = await journaled(start)
    in_turn(site, engines.serve(dies_after=2), scripts.error(400))
    answer = await (await site.send(chat(stream=True))).answer()
    assert b'"not_continued"' in answer.body
    assert site.metrics.lost_streams == {NO_WORKER: 1}
    assert site.metrics.continuations == {}
    await site.settled()


async def test_a_silent_stream_leaves_a_worker_that_is_down(start: Start) -> None:
    site, engines = await journaled(start)
    in_turn(site, engines.serve(dies_after=4, end="stall"), engines.serve())
    client = await site.send(chat(stream=True))
    while len(engines.published.get(next(iter(engines.published), ""), ())) < 4:
        await site.swept()
    [busy] = [name for name, fake in site.fakes.items() if fake.served]
    site.down(busy)
    await site.swept()
    assert len(engines.asked) == 1
    site.skip(11.0)
    await site.swept()
    site.skip(11.0)
    text, _ = await text_of(client)
    assert text == "".join(WORDS)
    await site.settled()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "seed": ({"seed": 1}, FIELD),
    "penalty": ({"frequency_penalty": 0.5}, FIELD),
    "xargs": ({"vllm_xargs": {"lane": "urgent"}}, FIELD),
    "unknown": ({"new_field": 1}, FIELD),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_requests_that_depend_on_more_end_with_an_error(start: Start, name: str) -> None:
    site, engines = await journaled(start)
    site.always(engines.serve(dies_after=3))
    fields, why = REFUSED[name]
    answer = await (await site.send(chat(stream=True, **fields))).answer()
    assert b'"error"' in answer.body
    assert site.metrics.lost_streams == {why: 1}
    assert len(engines.asked) == 1
    await site.settled()


async def test_greedy_requests_with_a_seed_are_continued(start: Start) -> None:
    site, engines = await journaled(start)
    in_turn(site, engines.serve(dies_after=3), engines.serve())
    client = await site.send(chat(stream=True, seed=1, temperature=0, frequency_penalty=0))
    assert (await text_of(client))[0] == "".join(WORDS)


@pytest.mark.parametrize("case", ["no journal", "no tokens", "one worker", "off", "differs"])
async def test_streams_that_cannot_go_on_end_with_an_error(start: Start, case: str) -> None:
    fakes = [Fake("w0")] if case == "one worker" else [Fake("w0"), Fake("w1")]
    site = await start(*fakes, wire={"continuation": case != "off"})
    engines = Engines()
    with_journals(site, engines)
    other = Engines(["Another", "text", "altogether"])
    well = scripts.obey("well")
    in_turn(
        site, engines.serve(dies_after=4), *([other.serve()] if case == "differs" else []), well
    )
    if case == "no journal":
        for name in site.fakes:
            site.worker(name).reports_prefixes = False
    if case == "no tokens":
        site.fleet.roster.stream_tokens = lambda *_: None
    if case == "differs":
        other.words += WORDS[3:]  # the tokens of the first worker exist
    client = await site.send(chat(stream=True))
    if case == "one worker":  # which takes no requests
        await eventually(lambda: len(site.served()) == 1)
        site.fleet.roster.drain("w0")
    answer = await client.answer()
    *tokens, last = answer.body.split(b"\n\n")[:-1]
    assert len(tokens) == 5  # the role and four words
    assert b'"error"' in last
    assert site.metrics.continuations == {}
    assert (await client.ask(chat())).status in (200, 502, 503)  # the connection is kept
    await site.settled()


async def test_the_other_worker_may_fail_before_it_has_caught_up(start: Start) -> None:
    site, engines = await journaled(start, workers=3)
    catching_up = scripts.chunk(engines.event(ROLE))
    in_turn(
        site,
        engines.serve(dies_after=6),
        scripts.raw(scripts.STREAM_HEAD + catching_up, end="reset"),
        engines.serve(),
    )
    text, _ = await text_of(await site.send(chat(stream=True)))
    assert text == "".join(WORDS)
    await site.settled()


async def test_a_client_that_leaves_meanwhile_ends_everything(start: Start) -> None:
    site, engines = await journaled(start)
    in_turn(site, engines.serve(dies_after=4), scripts.stall)
    client = await site.send(chat(stream=True))
    while len(site.served()) < 2:
        await site.swept()
    client.close()
    await site.settled()


async def test_other_output_than_text_is_not_continued(start: Start) -> None:
    site, _ = await journaled(start)
    other = scripts.event({"choices": [{"index": 0, "delta": {}, "logprobs": {"content": [1]}}]})
    site.always(
        scripts.raw(scripts.STREAM_HEAD + scripts.chunk(scripts.token("a") + other), end="reset")
    )
    site.fleet.roster.stream_tokens = lambda *_: [0]
    answer = await (await site.send(chat(stream=True))).answer()
    assert b'"error"' in answer.body
    assert site.metrics.lost_streams == {OTHER_OUTPUT: 1}


async def test_only_workers_with_a_journal_continue_a_stream(start: Start) -> None:
    """Another server ignores the tokens, and would generate another text."""
    site, engines = await journaled(start, workers=3)
    in_turn(site, engines.serve(dies_after=4), engines.serve())
    client = await site.send(chat(stream=True))
    await eventually(lambda: len(site.served()) == 1)
    others = [name for name, fake in site.fakes.items() if not fake.served]
    site.worker(others[0]).reports_prefixes = False
    text, _ = await text_of(client)
    assert text == "".join(WORDS)
    assert len(site.fakes[others[1]].served) == 1
    await site.settled()


async def test_a_stream_that_began_before_the_journal_was_read(start: Start) -> None:
    site = await start(Fake("w0"), Fake("w1"))
    engines = Engines()
    site.fleet.roster.stream_tokens = engines.tokens
    for worker in site.fleet.roster:
        worker.respecify(replace(worker.spec, journal=("tcp://127.0.0.1:1",)))
    in_turn(site, engines.serve(dies_after=4), engines.serve())
    assert (await text_of(await site.send(chat(stream=True))))[0] == "".join(WORDS)
    await site.settled()


async def test_a_stream_ends_at_once_without_another_journal(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    site, engines = await journaled(start)
    gate = asyncio.Event()
    in_turn(site, scripts.gated(gate, engines.serve(dies_after=4)))
    client = await site.send(chat(stream=True))
    await eventually(lambda: len(site.served()) == 1)
    [spare] = [name for name, fake in site.fakes.items() if not fake.served]
    site.worker(spare).reports_prefixes = False
    for name in site.fakes.keys() - {spare}:
        site.fleet.roster.drain(name)
    gate.set()
    answer = await client.answer()
    assert b'"error"' in answer.body
    assert not site.fakes[spare].served
    assert site.metrics.lost_streams == {NO_WORKER: 1}
    assert "is not continued: no_worker" in caplog.text
    await site.settled()


async def test_each_stream_has_a_log_line(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "proxy.wire.exchange.continuation_log")
    site, engines = await journaled(start)
    in_turn(site, engines.serve(dies_after=3), engines.serve())
    trace = "0af7651916cd43dd8448eb211c80319c"
    headers = b"X-Request-Id: mine", b"traceparent: 00-%b-b7ad6b7169203331-01" % trace.encode()
    await text_of(await site.send(chat("hi", *headers, stream=True)))
    first, second = [call.connection.worker.name for call in site.served()]
    assert caplog.messages == [
        f"request mine, trace {trace}: the stream of worker {first} continues on {second}"
    ]
    [recent] = site.metrics.recent.newest(1)
    assert (recent.worker, recent.left_workers) == (second, (first,))
    in_turn(site, engines.serve(dies_after=3))
    await (await site.send(chat("hi", stream=True, frequency_penalty=0.5))).answer()
    assert caplog.messages[-1].endswith("is not continued: field 'frequency_penalty'")
    await site.settled()


async def test_streams_of_one_client_id_are_not_mixed_up(start: Start) -> None:
    site, engines = await journaled(start)
    in_turn(site, scripts.stall, engines.serve(dies_after=3))
    other = await site.send(chat("other", b"X-Request-Id: mine", stream=True))
    await eventually(lambda: len(site.served()) == 1)
    answer = await (await site.send(chat("hi", b"X-Request-Id: mine", stream=True))).answer()
    assert b'"error"' in answer.body
    assert site.metrics.lost_streams == {NO_TOKENS: 1}
    other.close()
    await site.settled()


def test_a_worker_with_many_streams_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    log, record = ContinuationLog(), RequestRecord()
    for number in range(1000):
        log.lost(number / 1000, record, "w0", NO_WORKER, "")
    assert len(caplog.messages) == MAX_LINES
    log.lost(INTERVAL_S, record, "w0", NO_WORKER, "")
    assert caplog.messages[MAX_LINES].startswith(f"{1000 - MAX_LINES} lines")
    assert len(caplog.messages) == MAX_LINES + 2
