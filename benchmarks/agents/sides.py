"""The sides of the comparison: a routing rule, and the policies inside the workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

LONG_PROMPT: Final[Mapping[str, Any]] = {"long_prompt": {}}
DEADLINES: Final[Mapping[str, Any]] = {
    "lanes": {}, "long_prompt": {}, "chunk_budget": {"itl_ms": 1000}
}  # fmt: skip
SLOTS: Final = 16  # of a worker whose requests wait in the router


@dataclass(frozen=True, slots=True)
class Side:
    """A routing rule, ours unless `peer` names another, and the policies inside the workers."""

    routing: Mapping[str, Any] = field(default_factory=dict)
    policies: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    peer: str = ""
    sessions: bool = False  # requests name their session
    max_requests: int | None = None
    deadlines: bool = False  # requests bring their targets


ROUND_ROBIN, CACHE_AWARE, SCORES = "round robin", "cache_aware", "weighted scores"
OURS, SESSIONS = "ours", "with sessions"
TURN_PRIORITY, DEADLINE = "with turn priority", "with deadlines"
ROWS: Final[Mapping[str, Side]] = {
    ROUND_ROBIN: Side({"policy": "round_robin"}),
    CACHE_AWARE: Side(peer="cache_aware"),
    SCORES: Side(peer="weighted_scores"),
    OURS: Side(policies=LONG_PROMPT),
    SESSIONS: Side(policies=LONG_PROMPT, sessions=True),
    TURN_PRIORITY: Side(policies=LONG_PROMPT, sessions=True, max_requests=SLOTS),
    DEADLINE: Side(policies=DEADLINES, sessions=True, max_requests=SLOTS, deadlines=True),
}
# What each half does alone.
HALVES: Final[Mapping[str, Side]] = {
    "ours, vLLM's scheduler": Side(),
    "weighted scores, our scheduler": Side(policies=LONG_PROMPT, peer="weighted_scores"),
}
SIDES: Final = {**ROWS, **HALVES}
