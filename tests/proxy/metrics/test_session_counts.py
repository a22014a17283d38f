"""The metrics of sessions."""

from __future__ import annotations

from proxy.core.learned.sessions import Turn
from proxy.metrics.registry import Metrics
from tests.proxy.core.making import router_of, spec
from tests.proxy.metrics.scraped import scraped


def test_turns_are_counted_from_zero() -> None:
    router = router_of(spec("w"))
    sessions = router.fleet.roster.sessions
    sessions.get_or_create(1, 0.0)
    sessions.count("m", Turn.STAYED)
    page = scraped(Metrics(router))
    assert "\nproxy_sessions 1" in page
    assert 'proxy_session_turns_total{model="m",turn="stayed"} 1' in page
    assert 'proxy_session_turns_total{model="m",turn="moved"} 0' in page
