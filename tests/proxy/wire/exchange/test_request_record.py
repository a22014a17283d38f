"""Metrics of a finished request."""

from __future__ import annotations

import pytest

from proxy.core.fleet.leases import Decision, HandoverDecision
from proxy.core.model.types import Reason
from proxy.metrics.registry import Metrics
from proxy.wire.exchange.request_record import RequestRecord
from tests.proxy.core.making import make_info
from tests.proxy.wire import scripts
from tests.proxy.wire.raw_client import chat, get, request
from tests.proxy.wire.site import Site, eventually


@pytest.fixture
def metrics(site: Site) -> Metrics:
    return site.metrics


async def test_time_per_token_counts_tokens_not_events(site: Site, metrics: Metrics) -> None:
    record = RequestRecord()
    record.info = make_info()
    record.decision = Decision(site.worker(), Reason.ONLY_CHOICE)
    record.started = 1.0
    for now, tokens in ((2.0, 1), (2.5, 1), (4.0, 3)):  # three speculative tokens in one event
        record.record_tokens(now, metrics, tokens)
    record.close(5.0, metrics, "completions", 200, None)
    [tpot] = metrics.tpot.values()
    [ttft] = metrics.ttft.values()
    [gaps] = metrics.gaps.values()
    assert (tpot.total, tpot.cumulative()[-1]) == (0.5, 1)
    assert ttft.total == 1.0
    assert (gaps.total, gaps.cumulative()[-1]) == (2.0, 2)


async def test_single_token_has_no_time_per_token(metrics: Metrics) -> None:
    record = RequestRecord()
    record.info = make_info()
    record.record_tokens(2.0, metrics, 1)
    record.close(5.0, metrics, "completions", 200, None)
    [tpot] = metrics.tpot.values()
    assert tpot.cumulative()[-1] == 0


async def test_real_and_predicted_ttft_start_at_arrival(site: Site, metrics: Metrics) -> None:
    record = RequestRecord()
    record.info = make_info()
    record.started = 1.0
    record.queue_s = 0.5
    for placed in (1.5, 3.0):  # the first leg failed
        record.place(placed, Decision(site.worker(), Reason.ONLY_CHOICE, 0.25))
    record.record_tokens(3.5, metrics)
    record.close(5.0, metrics, "completions", 200, None)
    [real], [predicted] = metrics.ttft.values(), metrics.predicted.values()
    assert (real.total, predicted.total) == (2.5, 2.25)


def phases(metrics: Metrics) -> dict[str, float]:
    """Return the total time of each phase."""
    found: dict[str, float] = {}
    for phase in metrics.phases.values():
        for name, seen in phase.seen.items():
            found[name] = found.get(name, 0.0) + seen.total
    return found


def stream_record(
    site: Site, handover: HandoverDecision | None = None, *, placed: float = 1.0
) -> RequestRecord:
    """Return the record of a stream that came at 1, had its first token at 5, and ends at 12."""
    record = RequestRecord()
    record.info = make_info()
    record.started = 1.0
    record.place(placed, Decision(site.worker(), Reason.ONLY_CHOICE, 0.25, handover=handover))
    if handover is not None:
        record.prefilled_at = 3.5
    record.record_tokens(5.0, site.metrics)
    return record


@pytest.mark.parametrize(
    ("tokens", "wanted"),
    [
        (None, {"queue": 0.0, "prefill": 4.0, "decode": 7.0}),
        (700, {"queue": 0.0, "prefill_leg": 2.5, "transfer": 1.5, "decode": 7.0}),
        # Nothing was fetched: the decode worker prefilled the whole prompt.
        (0, {"queue": 0.0, "prefill_leg": 2.5, "prefill": 1.5, "decode": 7.0}),
    ],
)
async def test_phases_of_a_stream_sum_to_its_duration(
    site: Site, metrics: Metrics, tokens: int | None, wanted: dict[str, float]
) -> None:
    handover = None if tokens is None else HandoverDecision(site.worker(), 0, tokens, 0.4, 0.2)
    stream_record(site, handover).close(12.0, metrics, "completions", 200, None)
    assert phases(metrics) == wanted
    [ttft], [duration] = metrics.ttft.values(), metrics.durations.values()
    assert sum(wanted.values()) == duration.total
    assert sum(wanted.values()) - wanted["decode"] == ttft.total


async def test_time_on_failed_workers_is_a_retry_phase(site: Site, metrics: Metrics) -> None:
    record = stream_record(site, placed=4.0)
    record.queue_s = 1.0
    record.close(12.0, metrics, "completions", 200, None)
    assert phases(metrics) == {"queue": 1.0, "retry": 2.0, "prefill": 1.0, "decode": 7.0}


@pytest.mark.parametrize("count", [1, 2, 9])
@pytest.mark.parametrize("with_usage", [False, True])
@pytest.mark.parametrize("gap_s", [0.0, 0.01])
async def test_last_events_of_a_stream_count_no_tokens(
    site: Site, metrics: Metrics, count: int, gap_s: float, *, with_usage: bool
) -> None:
    tokens: list[int] = []
    metrics.at_end = (lambda seen, *_: tokens.append(seen.output_tokens),)
    site.always(scripts.stream(count, gap_s=gap_s, with_usage=with_usage))
    assert (await site.ask(chat(stream=True))).status == 200
    await site.settled()
    assert tokens == [count]
    assert sum(series.cumulative()[-1] for series in metrics.gaps.values()) <= count - 1
    if count == 1:
        assert sum(series.cumulative()[-1] for series in metrics.tpot.values()) == 0


async def test_sent_bytes_are_counted_for_refusals_too(site: Site) -> None:
    sent: list[int] = []
    site.metrics.at_end = (lambda seen, *_: sent.append(seen.sent_bytes),)
    close = b"Connection: close"
    refused = chat("hi", close, model="nope"), get("/v1/nothing", close), b"nonsense\r\n\r\n"
    for data in (chat("hi", close), *refused):
        client = await site.send(data)
        got = await client.closed()
        assert got
        assert sent.pop() == len(got)
    assert sent == []


@pytest.mark.parametrize("given", ["", "X-Request-Id: mine\r\n"])
async def test_record_of_a_request_refused_unread_has_the_id_of_its_response(
    site: Site, given: str
) -> None:
    ids: list[str] = []
    site.metrics.at_end = (lambda seen, *_: ids.append(seen.id),)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\n{given}Content-Length: 99999999999\r\n\r\n"
    client = await site.send(head.encode())
    answer = await client.answer()
    assert answer.status == 413
    assert ids == [answer.one(b"x-request-id").decode()]
    assert (ids == ["mine"]) == bool(given)


@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_an_embedding_teaches_the_prefill_pace(site: Site, framing: str) -> None:
    site.fake.always(scripts.answer(framing=framing))
    body = b'{"model": "tiny", "input": "hi"}'
    assert (await site.ask(request(body, path="/v1/embeddings"))).status == 200
    assert site.worker().pace.prefills == 1.0


async def test_loop_lag_is_measured_continuously(metrics: Metrics) -> None:
    await eventually(lambda: metrics.loop_lag.cumulative()[-1] >= 2)
