"""Debian's Prometheus: `prometheus` and `promtool`, fetched where they are not installed."""

from __future__ import annotations

import functools
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "deploy" / "prometheus"


@functools.cache
def folder() -> Path | str:
    """Return where the programs are, or why they are nowhere."""
    script = ROOT / "scripts" / "prometheus.sh"
    done = subprocess.run([script], capture_output=True, text=True)
    return Path(done.stdout.strip()) if not done.returncode else done.stderr.strip()


def program(name: str) -> str:
    """Return a program's path; without it the test is skipped, unless somebody counts on it."""
    found = folder()
    if isinstance(found, Path):
        return str(found / name)
    if os.environ.get("CI"):
        pytest.fail(found)
    pytest.skip(found)


def promtool(*told: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run it."""
    return subprocess.run([program("promtool"), *told], capture_output=True, text=True, input=text)


def groups(name: str) -> list[dict[str, Any]]:
    """Read a file of rules."""
    document = yaml.safe_load((PROMETHEUS / name).read_text())
    return list(document["groups"])


def rules(name: str) -> list[dict[str, Any]]:
    """List the rules of a file."""
    return [rule for group in groups(name) for rule in group["rules"]]


RECORDED = {rule["record"]: rule["expr"] for rule in rules("rules.yml")}
ALERTS = {rule["alert"]: rule for rule in rules("alerts.yml")}
