"""Metrics of clients that left without a token, and of responses without streaming."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.core.fleet.leases import Decision, HandoverDecision
from proxy.core.model.role import Role
from proxy.core.model.types import NONE, Reason
from proxy.metrics import no_first_token as unseen_module
from proxy.metrics.no_first_token import NoFirstToken
from proxy.metrics.registry import SHORT, Metrics
from proxy.wire.exchange.request_record import RequestRecord
from tests.proxy.core.making import make_info, router_of, spec, worker_of
from tests.proxy.metrics.finished import finished
from tests.proxy.metrics.scraped import scraped, shown

CHAT = "chat/completions"


def left_count(
    unseen: NoFirstToken, worker: str, kind: str = "count", more: str = ""
) -> float | None:
    """Return a sample of `proxy_left_seconds` for a worker's short streamed requests."""
    labels = f'worker="{worker}",pool="general",model="m",class="short",stream="true"{more}'
    return shown(unseen).get(f"proxy_left_seconds_{kind}{{{labels}}}")


@pytest.fixture
def metrics() -> Metrics:
    """Return a router's metrics, with two general workers, a prefill and a decode worker."""
    return Metrics(router_of(spec("a"), spec("b"), spec("p", Role.PREFILL), spec("d", Role.DECODE)))


def finish(
    metrics: Metrics,
    *,
    status: int,
    seconds: float,
    stream: bool = True,
    token_at: float | None = None,
    decision: Decision | None = None,
    prefilled_at: float | None = None,
    **fields: Any,
) -> None:
    """Finish a request on worker `a`."""
    record = RequestRecord()
    record.info = make_info(stream=stream, **fields)
    worker = worker_of(metrics.router, "a")
    record.decision = decision or Decision(worker, Reason.GENERAL_POOL)
    record.started, record.prefilled_at = 100.0, prefilled_at
    if token_at is not None:
        record.record_tokens(100.0 + token_at, metrics)
    record.close(100.0 + seconds, metrics, CHAT, status, None)


def test_leaving_without_a_token_is_timed(metrics: Metrics) -> None:
    for seconds in (0.1, 2.9, 3.0, 3.1, 70.0):
        finish(metrics, status=499, seconds=seconds)
    assert left_count(metrics.no_first_token, "a", "bucket", ',le="0.5"') == 1
    assert left_count(metrics.no_first_token, "a", "bucket", ',le="3.0"') == 3
    assert left_count(metrics.no_first_token, "a") == 5
    assert "proxy_left_seconds_bucket" in scraped(metrics)


def test_whole_responses_are_timed_without_streams_and_failures(metrics: Metrics) -> None:
    finish(metrics, status=499, seconds=9.0, token_at=1.0)
    finish(metrics, status=200, seconds=9.0, token_at=1.0)
    finish(metrics, status=200, seconds=9.0)
    finish(metrics, status=502, seconds=9.0, stream=False)
    finish(metrics, status=200, seconds=9.0, stream=False, generates=False, prompt=0)
    assert shown(metrics.no_first_token) == {}
    labels = 'pool="general",model="m",class="short"'
    finish(metrics, status=499, seconds=9.0, stream=False)  # has its own label
    assert shown(metrics.no_first_token)[f"proxy_whole_answer_seconds_count{{{labels}}}"] == 0
    finish(metrics, status=200, seconds=45.0, stream=False)
    found = shown(metrics.no_first_token)
    assert found[f'proxy_whole_answer_seconds_bucket{{{labels},le="40.0"}}'] == 0
    assert found[f'proxy_whole_answer_seconds_bucket{{{labels},le="60.0"}}'] == 1
    assert found[f"proxy_whole_answer_seconds_count{{{labels}}}"] == 1
    assert found[f'proxy_left_seconds_count{{worker="a",{labels},stream="false"}}'] == 1


@pytest.mark.parametrize(("prefilled_at", "worker"), [(None, "p"), (101.0, "d")])
def test_leaving_a_handover_counts_for_the_current_leg(
    metrics: Metrics, prefilled_at: float | None, worker: str
) -> None:
    prefill, decode = (worker_of(metrics.router, name) for name in "pd")
    handover = HandoverDecision(prefill, 0, 100, 0.1, 0.1)
    decision = Decision(decode, Reason.HANDOVER, handover=handover)
    finish(metrics, status=499, seconds=9.0, decision=decision, prefilled_at=prefilled_at)
    [key] = metrics.no_first_token.left
    assert key == (worker, {"p": "prefill", "d": "decode"}[worker], "m", "short", "true")


def test_leaving_the_queue_has_no_worker(metrics: Metrics) -> None:
    metrics.count_request(
        finished(CHAT, 499, Reason.FLEET_FULL, 5.0, model="m", size=SHORT, stream=True)
    )
    assert [key[0] for key in metrics.no_first_token.left] == [NONE]


def test_series_of_removed_workers_are_merged(
    metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unseen_module, "MAX_SERIES", 3)
    counts = metrics.no_first_token

    def leave(worker: str) -> None:
        counts.observe_disconnect(worker, "general", "m", SHORT, 5.0, stream=True)

    for worker in ("gone-0", "gone-1", "a", "b"):
        leave(worker)
    assert [key[0] for key in counts.left] == ["a", "b"]
    for worker in ("gone-2", "gone-3", "gone-4", NONE):
        leave(worker)
    assert [key[0] for key in counts.left] == ["a", "b", "gone-2", "other", NONE]
    assert left_count(counts, "other") == 2


def test_removed_models_leave_no_series(metrics: Metrics) -> None:
    finish(metrics, status=499, seconds=9.0)
    finish(metrics, status=200, seconds=9.0, stream=False)
    metrics.no_first_token.forget_models({"m"})
    assert shown(metrics.no_first_token) == {}
