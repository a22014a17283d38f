"""Clients that left with nothing, and answers that are not streamed, as a scrape shows them."""

from __future__ import annotations

from typing import Any

import pytest

from grafana.boards import fleet as board
from proxy.core.fleet.leases import Decision, HandoverDecision
from proxy.core.model.role import Role
from proxy.core.model.types import NONE, Reason
from proxy.metrics import no_first_token as unseen_module
from proxy.metrics.histogram import DURATION_BOUNDS, LEFT_BOUNDS, TTFT_BOUNDS
from proxy.metrics.no_first_token import NoFirstToken
from proxy.metrics.registry import SHORT, Metrics
from proxy.wire.exchange.request_record import RequestRecord
from tests.proxy.core.making import ask, router_of, spec
from tests.proxy.metrics.finished import finished
from tests.proxy.metrics.scraped import scraped, shown

CHAT = "chat/completions"


def left(unseen: NoFirstToken, worker: str, kind: str = "count", more: str = "") -> float | None:
    """Return how many left that worker's shorts, which were to be streamed."""
    labels = f'worker="{worker}",pool="general",model="m",class="short",stream="true"{more}'
    return shown(unseen).get(f"proxy_left_seconds_{kind}{{{labels}}}")


@pytest.fixture
def metrics() -> Metrics:
    """Make a router's, with two workers for everything and two for hand-overs."""
    return Metrics(router_of(spec("a"), spec("b"), spec("p", Role.PREFILL), spec("d", Role.DECODE)))


def close(
    metrics: Metrics,
    *,
    status: int,
    seconds: float,
    stream: bool = True,
    token_at: float | None = None,
    decision: Decision | None = None,
    prefilled_at: float | None = None,
    **of_ask: Any,
) -> None:
    """Have a request of worker `a`'s end."""
    worker = metrics.router.fleet.roster.get("a")
    assert worker is not None
    record = RequestRecord()
    record.ask = ask(stream=stream, **of_ask)
    record.decision = decision or Decision(worker, Reason.GENERAL_POOL)
    record.started, record.prefilled_at = 100.0, prefilled_at
    if token_at is not None:
        record.saw_tokens(100.0 + token_at, metrics)
    record.close(100.0 + seconds, metrics, CHAT, status, None)


def test_who_leaves_with_nothing_has_waited_so_long(metrics: Metrics) -> None:
    for seconds in (0.1, 2.9, 3.0, 3.1, 70.0):
        close(metrics, status=499, seconds=seconds)
    assert left(metrics.unseen, "a", "bucket", ',le="0.5"') == 1
    assert left(metrics.unseen, "a", "bucket", ',le="3.0"') == 3
    assert left(metrics.unseen, "a") == 5
    assert "proxy_left_seconds_bucket" in scraped(metrics)


def test_who_leaves_with_a_part_of_it_has_had_a_first_token(metrics: Metrics) -> None:
    close(metrics, status=499, seconds=9.0, token_at=1.0)
    assert shown(metrics.unseen) == {}


def test_whole_answers_have_a_time_and_streams_and_failures_none(metrics: Metrics) -> None:
    close(metrics, status=200, seconds=9.0, token_at=1.0)
    close(metrics, status=200, seconds=9.0)
    close(metrics, status=502, seconds=9.0, stream=False)
    close(metrics, status=200, seconds=9.0, stream=False, generates=False, prompt=0)
    assert shown(metrics.unseen) == {}
    close(metrics, status=200, seconds=45.0, stream=False)
    found = shown(metrics.unseen)
    labels = 'pool="general",model="m",class="short"'
    assert found[f'proxy_whole_answer_seconds_bucket{{{labels},le="40.0"}}'] == 0
    assert found[f'proxy_whole_answer_seconds_bucket{{{labels},le="60.0"}}'] == 1


def test_clients_that_leave_before_a_whole_answer_are_told_apart(metrics: Metrics) -> None:
    close(metrics, status=499, seconds=9.0, stream=False)
    found = shown(metrics.unseen)
    labels = 'pool="general",model="m",class="short"'
    assert found[f'proxy_left_seconds_count{{worker="a",{labels},stream="false"}}'] == 1
    assert found[f"proxy_whole_answer_seconds_count{{{labels}}}"] == 0


@pytest.mark.parametrize(("prefilled_at", "waited_for"), [(None, "p"), (101.0, "d")])
def test_of_a_hand_over_it_is_the_worker_whose_leg_it_was(
    metrics: Metrics, prefilled_at: float | None, waited_for: str
) -> None:
    prefill, decode = (metrics.router.fleet.roster.get(name) for name in "pd")
    assert prefill is not None
    assert decode is not None
    handover = HandoverDecision(prefill, 0, 100, 0.1, 0.1)
    decision = Decision(decode, Reason.HANDOVER, handover=handover)
    close(metrics, status=499, seconds=9.0, decision=decision, prefilled_at=prefilled_at)
    [key] = metrics.unseen.left
    assert key == (waited_for, {"p": "prefill", "d": "decode"}[waited_for], "m", "short", "true")


def test_who_waits_in_the_router_waits_for_nobody(metrics: Metrics) -> None:
    metrics.request_done(
        finished(CHAT, 499, Reason.FLEET_FULL, 5.0, model="m", size=SHORT, stream=True)
    )
    assert [key[0] for key in metrics.unseen.left] == [NONE]


def test_series_of_old_workers_go(metrics: Metrics, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unseen_module, "MAX_SERIES", 3)
    counts = metrics.unseen

    def go(worker: str) -> None:
        counts.gone(worker, "general", "m", SHORT, 5.0, stream=True)

    for worker in ("gone-0", "gone-1", "a", "b"):
        go(worker)
    assert [key[0] for key in counts.left] == ["a", "b"]
    for worker in ("gone-2", "gone-3", "gone-4", NONE):
        go(worker)
    assert [key[0] for key in counts.left] == ["a", "b", "gone-2", "other", NONE]
    assert left(counts, "other") == 2


def test_of_models_that_are_no_more_nothing_stays(metrics: Metrics) -> None:
    close(metrics, status=499, seconds=9.0)
    close(metrics, status=200, seconds=9.0, stream=False)
    metrics.unseen.forget_models({"m"})
    assert shown(metrics.unseen) == {}


def test_each_target_that_the_board_offers_is_a_bound() -> None:
    (variable,) = (each for each in board.BOARD.variables if each.name == "ttft_slo")
    assert {*map(float, variable.values)} <= {*LEFT_BOUNDS} & {*TTFT_BOUNDS}
    assert {3.0, 10.0} <= {*LEFT_BOUNDS}  # the rules'
    assert 60.0 in DURATION_BOUNDS
