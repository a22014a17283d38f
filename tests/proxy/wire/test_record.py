"""What is told of a request once it is over."""

from __future__ import annotations

import pytest

from proxy.control.metrics import Metrics
from proxy.core.types import Decision, Reason
from proxy.wire.record import Record
from tests.proxy.core.making import ask
from tests.proxy.wire import scripts
from tests.proxy.wire.client import chat
from tests.proxy.wire.site import Site, eventually


@pytest.fixture
def metrics(site: Site) -> Metrics:
    return site.metrics


async def test_the_mean_time_between_tokens_counts_tokens_not_events(
    site: Site, metrics: Metrics
) -> None:
    record = Record()
    record.ask = ask()
    record.decision = Decision(site.worker(), Reason.ONLY_CHOICE)
    record.started = 1.0
    for now, tokens in ((2.0, 1), (2.5, 1), (4.0, 3)):  # speculated ones come together
        record.saw_tokens(now, metrics, tokens)
    record.close(5.0, metrics, "completions", 200, None)
    [tpot] = metrics.tpot.values()
    [ttft] = metrics.ttft.values()
    [gaps] = metrics.gaps.values()
    assert (tpot.total, tpot.cumulative()[-1]) == (0.5, 1)
    assert ttft.total == 1.0
    assert (gaps.total, gaps.cumulative()[-1]) == (2.0, 2)


async def test_one_token_has_no_time_between(metrics: Metrics) -> None:
    record = Record()
    record.ask = ask()
    record.saw_tokens(2.0, metrics, 1)
    record.close(5.0, metrics, "completions", 200, None)
    [tpot] = metrics.tpot.values()
    assert tpot.cumulative()[-1] == 0


async def test_a_stream_shows_in_the_metrics(site: Site, metrics: Metrics) -> None:
    site.always(scripts.stream(3, gap_s=0.02))
    assert (await site.ask(chat(stream=True))).status == 200
    await site.settled()
    assert sum(each.cumulative()[-1] for each in metrics.tpot.values()) == 1
    assert {key[2] for key in metrics.ttft} == {"short"}


async def test_how_late_the_loop_is_is_asked_all_the_time(metrics: Metrics) -> None:
    await eventually(lambda: metrics.loop_lag.cumulative()[-1] >= 2)
