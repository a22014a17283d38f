"""What the router is made of, listed; and that it stays little."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
MOST = 45  # that the router may bring with it, all told
# By substring: what may not be passed on under our licence would have to be talked about first.
NOT_WANTED = ("AGPL", "GPL-", "GNU General", "unknown", "Proprietary")
HEAVY = {"vllm", "torch", "transformers", "numpy"}


@pytest.fixture(scope="module")
def listed() -> dict[str, Any]:
    """Make the document."""
    done = subprocess.run(
        [sys.executable, "scripts/sbom.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return dict(json.loads(done.stdout))


def test_it_lists_the_router_and_all_it_needs(listed: dict[str, Any]) -> None:
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
    assert len(listed["components"]) <= MOST
    for each in listed["components"]:
        [licence] = each["licenses"]
        said = licence["license"]["name"]
        assert not any(word in said for word in NOT_WANTED), (each["name"], said)
        assert each["purl"] == f"pkg:pypi/{each['name']}@{each['version']}"


def test_it_is_the_same_every_time(listed: dict[str, Any]) -> None:
    done = subprocess.run(
        [sys.executable, "scripts/sbom.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == listed
