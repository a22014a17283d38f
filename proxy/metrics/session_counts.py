"""The metrics of sessions."""

from __future__ import annotations

from collections import Counter

from proxy.core.learned.sessions import TURNS
from proxy.metrics.exposition import MetricsPage, counter, gauge
from proxy.metrics.registry import Metrics

SESSIONS = gauge("proxy_sessions", "Sessions with a turn in the last hour, at most.")
TURNS_SERVED = counter(
    "proxy_session_turns",
    "Turns of sessions that workers served: new, stayed on the worker of the turn before, moved to "
    "a worker that costs less, or displaced because the worker could not take the turn.",
    ("model", "turn"),
)


def show(page: MetricsPage, metrics: Metrics) -> None:
    sessions, roster = metrics.router.fleet.roster.sessions, metrics.router.fleet.roster
    page.values(SESSIONS, [((), len(sessions))])
    turns = Counter({(metrics.model_label(m), t): 0 for m in roster.models() for t in TURNS})
    for (model, turn), count in sessions.turns.items():
        turns[metrics.model_label(model), turn] += count
    page.values(TURNS_SERVED, turns.items())
