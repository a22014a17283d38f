"""The registry of routing rules."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxy.core import routing
from proxy.core.routing.registry import RULES, rule

OTHER_MODULES = {
    "registry",
    "view",
    "placer",
    "cached_tokens",
    "candidates",
    "handover_cost",
    "__init__",
}


@pytest.mark.plain("reads sources")
def test_every_rule_is_one_file_in_the_registry() -> None:
    files = {path.stem for path in Path(routing.__path__[0]).glob("*.py")} - OTHER_MODULES
    assert set(RULES) == files
    assert all(rule(name).name == name for name in RULES)


@pytest.mark.plain("reads sources")
def test_every_rule_documents_idea_cost_and_failure() -> None:
    for kind in RULES.values():
        text = __import__(kind.__module__, fromlist=["x"]).__doc__
        assert all(word in text for word in ("Idea:", "Cost:", "How it fails:"))


def test_unknown_rule_lists_the_valid_names() -> None:
    names = ", ".join(sorted(RULES))
    assert {"adaptive", "length", "least_loaded", "round_robin"} <= RULES.keys()
    with pytest.raises(ValueError, match=f"unknown routing policy 'x'; valid policies: {names}$"):
        rule("x")
