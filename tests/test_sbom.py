"""The router's software bill of materials."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
MAX_COMPONENTS = 45  # dependencies of the router
# Substrings of licences that need a decision first.
NOT_WANTED = ("AGPL", "GPL-", "GNU General", "unknown", "Proprietary")
HEAVY = {"vllm", "torch", "transformers", "numpy"}


@pytest.fixture(scope="module")
def listed() -> dict[str, Any]:
    """Return the document."""
    done = subprocess.run(
        [sys.executable, "scripts/sbom.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return dict(json.loads(done.stdout))


def test_sbom_lists_the_router_and_its_dependencies(listed: dict[str, Any]) -> None:
    assert (listed["bomFormat"], listed["specVersion"]) == ("CycloneDX", "1.6")
    assert listed["metadata"]["component"]["name"] == "vllm-sched"
    names = {part["name"] for part in listed["components"]}
    assert {"httptools", "orjson", "uvloop", "pydantic-core", "starlette"} <= names
    assert not names & HEAVY
    refs = {part["bom-ref"] for part in listed["components"]}
    refs.add(listed["metadata"]["component"]["bom-ref"])
    assert {part["ref"] for part in listed["dependencies"]} == refs
    assert all(set(part["dependsOn"]) <= refs for part in listed["dependencies"])


def test_dependencies_are_few_and_free(listed: dict[str, Any]) -> None:
    assert len(listed["components"]) <= MAX_COMPONENTS
    for part in listed["components"]:
        [licence] = part["licenses"]
        name = licence["license"]["name"]
        assert not any(word in name for word in NOT_WANTED), (part["name"], name)
        assert part["purl"] == f"pkg:pypi/{part['name']}@{part['version']}"


def test_sbom_is_reproducible(listed: dict[str, Any]) -> None:
    done = subprocess.run(
        [sys.executable, "scripts/sbom.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == listed
