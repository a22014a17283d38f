"""The list of the router's dependencies, and its limits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
MAX_PACKAGES = 45
# Parts of the names of licences that do not fit this project's.
REFUSED_LICENCES = ("AGPL", "GPL-", "GNU General", "unknown", "Proprietary")
HEAVY = {"vllm", "torch", "transformers", "numpy"}


def make_document() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "scripts/sbom.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return dict(json.loads(done.stdout))


@pytest.fixture(scope="module")
def listed() -> dict[str, Any]:
    return make_document()


def test_it_lists_the_router_and_all_it_needs(listed: dict[str, Any]) -> None:
    assert make_document() == listed  # the same every time
    assert (listed["bomFormat"], listed["specVersion"]) == ("CycloneDX", "1.6")
    assert listed["metadata"]["component"]["name"] == "vllm-sched"
    names = {each["name"] for each in listed["components"]}
    assert {"httptools", "orjson", "uvloop", "pydantic-core", "starlette"} <= names
    assert not names & HEAVY
    refs = {each["bom-ref"] for each in listed["components"]}
    refs.add(listed["metadata"]["component"]["bom-ref"])
    assert {each["ref"] for each in listed["dependencies"]} == refs
    assert all(set(each["dependsOn"]) <= refs for each in listed["dependencies"])


def test_it_is_little_and_free(listed: dict[str, Any]) -> None:
    assert len(listed["components"]) <= MAX_PACKAGES
    for each in listed["components"]:
        [licence] = each["licenses"]
        said = licence["license"]["name"]
        assert not any(word in said for word in REFUSED_LICENCES), (each["name"], said)
        assert each["purl"] == f"pkg:pypi/{each['name']}@{each['version']}"
