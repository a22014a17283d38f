"""The routing rules by name."""

from __future__ import annotations

from proxy.core.routing.adaptive import Adaptive
from proxy.core.routing.least_loaded import LeastLoaded
from proxy.core.routing.length import Length
from proxy.core.routing.round_robin import RoundRobin
from proxy.core.routing.view import Rule

RULES: dict[str, type[Rule]] = {
    rule.name: rule for rule in (Adaptive, Length, LeastLoaded, RoundRobin)
}


def rule(name: str) -> Rule:
    """Return a new rule; `ValueError` lists the valid names."""
    try:
        return RULES[name]()
    except KeyError:
        raise ValueError(
            f"unknown routing policy {name!r}; valid policies: {', '.join(sorted(RULES))}"
        ) from None
