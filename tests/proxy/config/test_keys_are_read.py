"""Keys of the fleet file are read by the code that they configure."""

from __future__ import annotations

import ast

import pytest

from proxy.config.fleet_file import RoutingConfig, TimeoutConfig
from proxy.config.reference import places
from proxy.config.tenants import AdmissionConfig, FairnessConfig, LimitsConfig
from tests.test_walls import MODULES, tree_of

# Blocks of which `proxy/setup/settings.py` passes on every key.
PASSED_WHOLE = AdmissionConfig, FairnessConfig, LimitsConfig, RoutingConfig, TimeoutConfig


def read_names() -> set[str]:
    """Return the attributes that the code reads, and its texts, by which it may read others."""
    found: set[str] = set()
    for node in (node for path in MODULES for node in ast.walk(tree_of(path))):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            found.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found


@pytest.mark.plain("reads sources")
def test_every_key_is_read() -> None:
    """A name that another object has too is not noticed."""
    names = read_names()
    unread = [
        f"{path}.{key}"
        for path, block in places()
        if not issubclass(block, PASSED_WHOLE)
        for key in block.model_fields
        if key not in names
    ]
    assert unread == [], "docs/extending.md lists where a key of the fleet file becomes a setting"
