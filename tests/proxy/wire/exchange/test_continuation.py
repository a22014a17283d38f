"""Streams that go on from another worker after theirs has failed."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest

from proxy.core.request.continuable import DIFFERS, FIELD, NO_TOKENS, NO_WORKER, OTHER_OUTPUT
from proxy.http.sent_text import MAX_LAST_PIECES
from proxy.wire.exchange import owner
from proxy.wire.exchange.continuation import MAX_REPEATED_TOKENS
from proxy.wire.exchange.continuation_log import INTERVAL_S, MAX_LINES, ContinuationLog
from proxy.wire.exchange.request_record import RequestRecord
from tests.proxy.http import agent_streams
from tests.proxy.wire import scripts
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.exchange.engines import (
    ROLE,
    THREE,
    TOKENS,
    WORDS,
    Agents,
    Engines,
    TextEngines,
    check_broken,
    in_turn,
    journaled,
)
from tests.proxy.wire.raw_client import chat
from tests.proxy.wire.site import Fake, eventually

KINDS = {
    "chat": (Engines, "chat"),
    "completion": (Engines, "completions"),
    "agent's chat": (Agents, "chat"),
    "agent's message": (Agents, "messages"),
}


def engines_of(kind: str) -> Engines:
    of_kind, route = KINDS[kind]
    return of_kind(route=route)


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize(
    ("kind", "dies_after"),
    [(kind, number) for kind in KINDS for number in range(engines_of(kind).count())],
)
async def test_client_sees_one_stream(start: Start, kind: str, dies_after: int, ahead: int) -> None:
    site, engines = await journaled(start, engines=engines_of(kind))
    in_turn(site, engines.serve(dies_after=dies_after, ahead=ahead), engines.serve())
    engines.check(await site.ask(engines.request()), (dies_after,))
    # Without a byte of the response, the request is retried.
    is_retried = kind == "completion" and not dies_after
    assert sum(site.metrics.continuations.values()) == (not is_retried)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_stream_outlives_two_workers(start: Start, kind: str) -> None:
    site, engines = await journaled(start, *THREE, engines=engines_of(kind))
    dying = engines.serve(dies_after=3), engines.serve(dies_after=4, end="close")
    in_turn(site, *dying, engines.serve())
    engines.check(await site.ask(engines.request()), (3, 7))
    assert engines.asked[1:] == [
        {**engines.asked[0], "vllm_xargs": {"output_so_far": [*range(had)]}} for had in (3, 7)
    ]


@pytest.mark.parametrize("failures", [2, 3])
async def test_a_stream_returns_to_a_worker_until_it_has_used_its_attempts(
    start: Start, failures: int
) -> None:
    site, engines = await journaled(start)
    in_turn(site, *[engines.serve(dies_after=2)] * failures, engines.serve())
    client = await site.send(engines.request())
    if failures == 2:
        engines.check(await client.answer())
    else:  # router.retries.attempts: a request that kills workers must not kill all
        await check_broken(client)
    assert len(engines.asked) == 3


@pytest.mark.parametrize("by_text", [False, True])
async def test_a_long_stream_keeps_no_events(
    start: Start, monkeypatch: pytest.MonkeyPatch, by_text: bool
) -> None:
    monkeypatch.setattr(owner, "MAX_PIECES", MAX_LAST_PIECES)
    words = [200 * word for word in random.Random(3).choices(WORDS, k=600)]  # in several pieces
    engines = TextEngines(words) if by_text else Engines(words)
    site, _ = await journaled(start, engines=engines, wire={"continues_by_text": by_text})
    if by_text:
        site.fleet.roster.stream_tokens = lambda *_: None
    in_turn(site, engines.serve(dies_after=500, end="stall"), engines.serve())
    client = await site.send(engines.request(max_tokens=1000))
    await eventually(lambda: any(len(found) == 500 for found in engines.published.values()))
    await site.swept()
    [exchange] = site.wire.exchanges
    assert len(exchange.sent_text.pieces) == MAX_LAST_PIECES  # type: ignore[attr-defined]
    [busy] = [call for call in site.served() if not call.answered.is_set()]
    busy.reset()
    engines.check(await client.answer())


# Engines that fail under a living server

ENGINE_DIED = scripts.event({"error": {"message": "EngineCore encountered an issue", "code": 500}})
ABORTED = b'data: {"choices":[{"index":0,"delta":{"content":""},"finish_reason":"abort"}]}\n\n'
MESSAGE_FAILED = b"event: error\n" + scripts.event({"type": "error", "error": {"message": "no"}})
MESSAGE_ABORTED = b'event: message_delta\ndata: {"type":"message_delta","delta":' + (
    b'{"stop_reason":null,"stop_sequence":null},"usage":{"input_tokens":1,"output_tokens":2}}\n\n'
)
REPORTS = [
    ("chat", ENGINE_DIED),
    ("chat", ABORTED),
    ("agent's chat", ENGINE_DIED),
    ("agent's message", MESSAGE_FAILED),
    ("agent's message", MESSAGE_ABORTED),
]


@pytest.mark.parametrize(
    ("kind", "report"),
    REPORTS,
    ids=["died", "aborted", "agent died", "message error", "message end"],
)
@pytest.mark.parametrize("tokens", [0, 1, 6])
async def test_an_engine_that_fails_under_a_living_server(
    start: Start, kind: str, report: bytes, tokens: int
) -> None:
    site, engines = await journaled(start, engines=engines_of(kind))
    in_turn(site, engines.fail(tokens, report), engines.serve())
    engines.check(await site.ask(engines.request()), (tokens,))
    assert len(engines.asked) == 2
    # The first worker's: the other one has served the request.
    assert sum(not worker.breaker.has_no_failures for worker in site.fleet.roster) == 1


ROLE_EVENT = scripts.event({"choices": [{"index": 0, "delta": ROLE}]})


@pytest.mark.parametrize("journal", [True, False])
@pytest.mark.parametrize(
    ("route", "first"),
    [("completion", ENGINE_DIED), ("chat", ENGINE_DIED), ("chat", ROLE_EVENT + ENGINE_DIED)],
    ids=["completion", "chat", "chat with its role"],
)
async def test_an_engine_that_fails_before_the_first_event(
    start: Start, route: str, first: bytes, journal: bool
) -> None:
    site, engines = await journaled(start, engines=Engines(route=route))
    for worker in site.fleet.roster:
        worker.reports_prefixes = journal
    report = scripts.chunk(first) + scripts.chunk(scripts.DONE) + scripts.LAST_CHUNK
    in_turn(site, scripts.raw(scripts.STREAM_HEAD + report), engines.serve())
    engines.check(await site.ask(engines.request()))
    assert sum(site.metrics.retries.values()) == 1


async def test_a_request_at_fault_is_sent_once(start: Start) -> None:
    site, engines = await journaled(start, engines=Engines(route="completion"))
    error = scripts.event({"error": {"message": "no such grammar", "code": 400}})
    report = scripts.chunk(error) + scripts.chunk(scripts.DONE) + scripts.LAST_CHUNK
    in_turn(site, scripts.raw(scripts.STREAM_HEAD + report), engines.serve())
    assert b"no such grammar" in (await site.ask(engines.request())).body
    assert site.metrics.retries == {}


@pytest.mark.parametrize(("kind", "report"), [REPORTS[2], REPORTS[4]], ids=["chat", "message"])
@pytest.mark.parametrize("at", [3, 12, 60])
async def test_a_report_of_a_failure_arrives_in_two_pieces(
    start: Start, kind: str, report: bytes, at: int
) -> None:
    site, engines = await journaled(start, engines=engines_of(kind))
    in_turn(site, engines.fail(3, report[:at], report[at:]), engines.serve())
    engines.check(await site.ask(engines.request()), (3,))
    assert sum(site.metrics.continuations.values()) == 1


async def test_text_that_looks_like_a_failure_is_none(start: Start) -> None:
    site, engines = await journaled(start, engines=Agents())
    events = agent_streams.chat_events([("content", "a"), ("content", "event: error"), TOKENS[2]])
    at = events[2].index(b"event: error")
    pieces = [*events[:2], events[2][:at], events[2][at:], b"".join(events[3:])]
    script = scripts.raw(
        scripts.STREAM_HEAD, *map(scripts.chunk, pieces), scripts.LAST_CHUNK, gap_s=0.01
    )
    in_turn(site, script, engines.serve())
    answer = await site.ask(engines.request())
    assert agent_streams.read_chat(answer.body)[0] == [["content", "aevent: errorI"]]
    assert sum(site.metrics.continuations.values()) == 0


async def test_requests_that_fail_in_every_engine_open_no_breaker(start: Start) -> None:
    """A grammar that does not compile is an error after the role."""
    site, engines = await journaled(start)
    in_turn(site, *[engines.fail(0, ENGINE_DIED)] * 12)
    for _ in range(6):
        await check_broken(await site.send(engines.request()), b"EngineCore")
    assert len(engines.asked) == 12
    assert all(worker.breaker.closed for worker in site.fleet.roster)


async def test_an_engine_failure_passes_if_the_stream_cannot_go_on(start: Start) -> None:
    site, engines = await journaled(start, Fake("w0"))
    in_turn(site, engines.fail(1, ENGINE_DIED))
    assert b'"error"' in (await site.ask(engines.request())).body
    assert site.metrics.lost_streams == {NO_WORKER: 1}


@pytest.mark.parametrize("words", [0, 3])
async def test_a_second_engine_that_fails_is_no_end_of_the_text(start: Start, words: int) -> None:
    site, engines = await journaled(start)
    in_turn(site, engines.serve(dies_after=words), engines.fail(0, ENGINE_DIED))
    client = await site.send(engines.request())
    await eventually(lambda: len(site.served()) == 1)
    site.fleet.roster.drain(site.served()[0].connection.worker.name)
    answer = await client.answer()
    assert b'"not_continued"' in answer.body
    assert b"another worker failed: EngineCore encountered an issue" in answer.body
    assert site.metrics.continuations == {}
    assert site.metrics.lost_streams == {NO_WORKER: 1}


@pytest.mark.parametrize("second", ["fails", "dies"])
async def test_a_second_worker_may_fail_before_it_has_caught_up(start: Start, second: str) -> None:
    site, engines = await journaled(start, *THREE)
    catching_up = scripts.chunk(engines.steps([])[0])
    failing = {
        "fails": engines.fail(0, ENGINE_DIED),
        "dies": scripts.raw(scripts.STREAM_HEAD + catching_up, end="reset"),
    }[second]
    in_turn(site, engines.serve(dies_after=6), failing, engines.serve())
    engines.check(await site.ask(engines.request()))


# Streams whose tokens are not known

WITH_USAGE = {"temperature": 0, "stream_options": {"include_usage": True}}
# Tokens before the worker dies, whether they are known, fields of the request.
REPEATED: dict[str, tuple[int, bool, dict[str, Any]]] = {
    "greedy": (4, False, {"temperature": 0}),
    "nothing sent": (0, False, {}),
    "only the usage is missing": (len(WORDS), True, WITH_USAGE),
    "only the usage is missing, tokens unknown": (len(WORDS), False, WITH_USAGE),
}


@pytest.mark.parametrize("case", REPEATED)
async def test_streams_that_another_worker_repeats(start: Start, case: str) -> None:
    site, engines = await journaled(start)
    dies_after, knows_tokens, fields = REPEATED[case]
    if not knows_tokens:
        site.fleet.roster.stream_tokens = lambda *_: None
    in_turn(site, engines.serve(dies_after=dies_after), engines.serve())
    engines.check(await site.ask(engines.request(**fields)))
    assert all("vllm_xargs" not in body for body in engines.asked)


async def test_tokens_that_the_journal_has_late_are_sent_again(start: Start) -> None:
    """Without them, another worker samples other ones."""
    site, engines = await journaled(start)

    def tokens(_worker: object, request_id: str, _since: float) -> list[int]:
        return engines.published[request_id][: 2 if len(site.served()) == 1 else None]

    site.fleet.roster.stream_tokens = tokens
    other = Engines([*WORDS[:2], "anew", *WORDS[3:]])
    in_turn(site, engines.serve(dies_after=4), other.serve(), engines.serve())
    engines.check(await site.ask(engines.request()))
    bodies = *other.asked, engines.asked[1]
    assert [body["vllm_xargs"]["output_so_far"] for body in bodies] == [[0, 1], [0, 1, 2, 3]]
    assert sorted(why for _, why in site.metrics.retries) == ["late_tokens", "reset"]
    assert site.metrics.lost_streams == {}
    assert sum(site.metrics.continuations.values()) == 1
    first, second = site.served()[:2]
    assert site.worker(second.connection.worker.name).breaker.has_no_failures
    assert first.connection.worker is not second.connection.worker


async def test_late_tokens_go_to_a_worker_that_takes_tokens(start: Start) -> None:
    """A stream without tokens may go to any worker, but not its late tokens."""
    site, engines = await journaled(start, wire={"continues_by_text": True})
    site.worker("w1").reports_prefixes = False
    site.fleet.roster.drain("w1")

    def tokens(_worker: object, request_id: str, _since: float) -> list[int]:
        return engines.published[request_id][: 0 if len(site.served()) == 1 else None]

    site.fleet.roster.stream_tokens = tokens
    other, goes_on = Engines(["anew", *WORDS[1:]]), asyncio.Event()
    in_turn(site, engines.serve(dies_after=4, pause=goes_on), other.serve(), engines.serve())
    client = await site.send(engines.request())
    await eventually(lambda: bool(engines.published))
    site.fleet.roster.drain("w1", draining=False)
    goes_on.set()
    engines.check(await client.answer())
    assert [call.connection.worker.name for call in site.served()] == ["w0", "w1", "w0"]
    assert engines.asked[-1]["vllm_xargs"] == {"output_so_far": [0, 1, 2, 3]}


async def test_long_streams_of_unknown_tokens_are_not_repeated(start: Start) -> None:
    site, engines = await journaled(start, engines=Engines(["a"] * (MAX_REPEATED_TOKENS + 2)))
    site.fleet.roster.stream_tokens = lambda *_: None
    in_turn(site, engines.serve(dies_after=MAX_REPEATED_TOKENS + 1))
    await check_broken(await site.send(engines.request(temperature=0)))
    assert site.metrics.lost_streams == {NO_TOKENS: 1}


async def test_a_silent_stream_leaves_a_worker_that_is_down(start: Start) -> None:
    site, engines = await journaled(start)
    in_turn(site, engines.serve(dies_after=4, end="stall"), engines.serve())
    client = await site.send(engines.request())
    while len(engines.published.get(next(iter(engines.published), ""), ())) < 4:
        await site.swept()
    [busy] = [name for name, fake in site.fakes.items() if fake.served]
    site.down(busy)
    await site.swept()
    assert len(engines.asked) == 1
    await site.pass_time(11.0)
    site.skip(11.0)
    engines.check(await client.answer())


# Streams that do not go on

# Why a stream is counted as lost, if it is.
LOST = {
    "off": "",
    "no journal": "",
    "no tokens": NO_TOKENS,
    "no other worker": NO_WORKER,
    "the other worker refuses": NO_WORKER,
    "another text": DIFFERS,
    "a field": FIELD,
}


@pytest.mark.parametrize("case", LOST)
async def test_streams_that_cannot_go_on_end_with_an_error(start: Start, case: str) -> None:
    fakes = [Fake("w0")] if case == "no other worker" else []
    site, engines = await journaled(start, *fakes, wire={"continuation": case != "off"})
    second = []
    if case == "no journal":
        for name in site.fakes:
            site.worker(name).reports_prefixes = False
    elif case == "no tokens":
        site.fleet.roster.stream_tokens = lambda *_: None
    elif case == "the other worker refuses":
        second = [scripts.error(400)]
    elif case == "another text":
        second = [Engines(["Another", "text", "altogether", *WORDS[3:]]).serve()]
    in_turn(site, engines.serve(dies_after=4), *second, scripts.obey("well"))
    fields = {"seed": 1} if case == "a field" else {}
    client = await site.send(engines.request(**fields))
    if case == "no other worker":  # its own takes no requests
        await eventually(lambda: len(site.served()) == 1)
        site.fleet.roster.drain("w0")
    assert len(await check_broken(client)) == 5  # the role and four words
    assert site.metrics.continuations == {}
    assert site.metrics.lost_streams == ({LOST[case]: 1} if LOST[case] else {})
    assert (await client.ask(chat())).status in (200, 503)  # the connection is kept


@pytest.mark.parametrize("kind", ["agent's chat", "agent's message"])
async def test_other_output_of_an_agent_ends_with_an_error(start: Start, kind: str) -> None:
    site, engines = await journaled(start, engines=engines_of(kind))
    steps = agent_streams.message_steps if "message" in kind else agent_streams.chat_events
    other = steps([*TOKENS[:4], ("name", "unasked"), *TOKENS[5:]], 8)
    second = scripts.raw(scripts.STREAM_HEAD, *map(scripts.chunk, other))
    in_turn(site, engines.serve(dies_after=7), second)
    answer = await site.ask(engines.request())
    last = answer.body.split(b"\n\n")[-2]
    assert b'"error"' in last
    assert last.startswith(b"event: error" if "message" in kind else b"data: ")
    assert b"unasked" not in answer.body
    assert site.metrics.lost_streams == {DIFFERS: 1}


async def test_other_output_than_text_is_not_continued(start: Start) -> None:
    site, engines = await journaled(start)
    other = scripts.event({"choices": [{"index": 0, "delta": {}, "logprobs": {"content": [1]}}]})
    pieces = scripts.chunk(scripts.token("a") + other)
    site.always(scripts.raw(scripts.STREAM_HEAD + pieces, end="reset"))
    site.fleet.roster.stream_tokens = lambda *_: [0]
    why = b"No other worker can continue the stream: other_output 'logprobs'."
    await check_broken(await site.send(engines.request()), why)
    assert site.metrics.lost_streams == {OTHER_OUTPUT: 1}


async def test_a_client_that_leaves_meanwhile_ends_everything(start: Start) -> None:
    site, engines = await journaled(start)
    in_turn(site, engines.serve(dies_after=4), scripts.stall)
    client = await site.send(engines.request())
    await eventually(lambda: len(site.served()) == 2)
    client.close()
    await site.settled()


@pytest.mark.parametrize("where", [(), ("tcp://127.0.0.1:1",)], ids=["none", "not read"])
@pytest.mark.parametrize("other", [0, 1])
async def test_only_workers_with_a_journal_continue_a_stream(
    start: Start, where: tuple[str, ...], other: int
) -> None:
    """Another server ignores the tokens, and would generate another text."""
    site, engines = await journaled(start, *THREE)
    in_turn(site, engines.serve(dies_after=4), engines.serve())
    client = await site.send(engines.request())
    await eventually(lambda: len(site.served()) == 1)
    others = [name for name, fake in site.fakes.items() if not fake.served]
    without = site.worker(others.pop(other))
    without.reports_prefixes = False
    without.respecify(replace(without.spec, journal=where))
    engines.check(await client.answer())
    assert len(site.fakes[others[0]].served) == 1


async def test_a_stream_that_began_before_the_journal_was_read(start: Start) -> None:
    site, engines = await journaled(start)
    for worker in site.fleet.roster:
        worker.reports_prefixes = False
        worker.respecify(replace(worker.spec, journal=("tcp://127.0.0.1:1",)))
    in_turn(site, engines.serve(dies_after=4), engines.serve())
    engines.check(await site.ask(engines.request()))


async def test_a_stream_ends_at_once_without_another_journal(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    site, engines = await journaled(start)
    gate = asyncio.Event()
    in_turn(site, scripts.gated(gate, engines.serve(dies_after=4)))
    client = await site.send(engines.request())
    await eventually(lambda: len(site.served()) == 1)
    [spare] = [name for name, fake in site.fakes.items() if not fake.served]
    site.worker(spare).reports_prefixes = False
    for name in site.fakes.keys() - {spare}:
        site.fleet.roster.drain(name)
    gate.set()
    await check_broken(client)
    assert not site.fakes[spare].served
    assert site.metrics.lost_streams == {NO_WORKER: 1}
    assert "is not continued: no_worker" in caplog.text


async def test_each_stream_has_a_log_line(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "proxy.wire.exchange.continuation_log")
    site, engines = await journaled(start)
    in_turn(site, engines.serve(dies_after=3), engines.serve())
    trace = "0af7651916cd43dd8448eb211c80319c"
    headers = b"X-Request-Id: mine", b"traceparent: 00-%b-b7ad6b7169203331-01" % trace.encode()
    engines.check(await site.ask(engines.request(*headers)))
    first, second = [call.connection.worker.name for call in site.served()]
    assert caplog.messages == [
        f"request mine, trace {trace}: the stream of worker {first} continues on {second}"
    ]
    [recent] = site.metrics.recent.newest(1)
    assert (recent.worker, recent.left_workers) == (second, (first,))
    in_turn(site, engines.serve(dies_after=3))
    await site.ask(engines.request(frequency_penalty=0.5))
    assert caplog.messages[-1].endswith("is not continued: field 'frequency_penalty'")


async def test_streams_of_one_client_id_are_not_mixed_up(start: Start) -> None:
    site, engines = await journaled(start)
    in_turn(site, scripts.stall, engines.serve(dies_after=3))
    other = await site.send(chat("other", b"X-Request-Id: mine", stream=True))
    await eventually(lambda: len(site.served()) == 1)
    await check_broken(await site.send(engines.request(b"X-Request-Id: mine")))
    assert site.metrics.lost_streams == {NO_TOKENS: 1}
    other.close()
    await site.settled()


def test_a_worker_with_many_streams_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    log, record = ContinuationLog(), RequestRecord()
    for number in range(1000):
        log.log_lost(number / 1000, record, "w0", NO_WORKER)
    assert len(caplog.messages) == MAX_LINES
    log.log_lost(INTERVAL_S, record, "w0", NO_WORKER)
    assert caplog.messages[MAX_LINES].startswith(f"{1000 - MAX_LINES} lines")
    assert len(caplog.messages) == MAX_LINES + 2
