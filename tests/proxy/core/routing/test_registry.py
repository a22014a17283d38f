"""The registry of routing rules."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from proxy.config import RoutingConfig
from proxy.core import routing
from proxy.core.routing.registry import RULES, rule

# Modules of the folder that are no rules.
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
    assert sorted(RULES) == sorted(files), "add the rule to RULES in proxy/core/routing/registry.py"
    assert all(rule(name).name == name for name in RULES)


def test_fleet_file_names_are_the_registered_rules() -> None:
    names = get_args(RoutingConfig.model_fields["policy"].annotation)
    assert sorted(names) == sorted(RULES), "add it to routing.policy in proxy/config/fleet_file.py"


@pytest.mark.plain("reads sources")
@pytest.mark.parametrize("name", RULES)
def test_every_rule_has_a_file_of_tests(name: str) -> None:
    assert Path(__file__).with_name(f"test_{name}.py").exists()


@pytest.mark.plain("reads sources")
def test_every_rule_documents_idea_cost_and_failure() -> None:
    for kind in RULES.values():
        text = __import__(kind.__module__, fromlist=["x"]).__doc__
        missing = [word for word in ("Idea:", "Cost:", "How it fails:") if word not in text]
        assert missing == [], f"the docstring of {kind.__module__}"


def test_unknown_rule_lists_the_valid_names() -> None:
    names = ", ".join(sorted(RULES))
    assert {"adaptive", "length", "least_loaded", "round_robin"} <= RULES.keys()
    with pytest.raises(ValueError, match=f"unknown routing policy 'x'; valid policies: {names}$"):
        rule("x")
