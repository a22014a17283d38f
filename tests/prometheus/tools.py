"""Debian's `prometheus` and `promtool`, downloaded where they are not installed."""

from __future__ import annotations

import functools
import os
import subprocess
from pathlib import Path
from typing import Any

import yaml

from tests.programs import fetched

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "deploy" / "prometheus"


def program(name: str) -> str:
    return str(Path(fetched("prometheus")) / name)


# Go's collector takes a third of the CPU time with its defaults.
GO = {"GOMAXPROCS": "1", "GOGC": "200"}


def promtool(*arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [program("promtool"), *arguments],
        capture_output=True,
        text=True,
        input=text,
        env=os.environ | GO,
    )


def check_case(folder: Path, case: dict[str, Any]) -> None:
    """Run a test case of promtool's, with intervals of a minute."""
    file = folder / "cases.yml"
    tests = [{"interval": "1m", **case}]
    file.write_text(yaml.safe_dump({"evaluation_interval": "1m", "tests": tests}))
    done = promtool("test", "rules", str(file))
    assert done.returncode == 0, done.stdout + done.stderr


@functools.cache
def groups(name: str) -> list[dict[str, Any]]:
    document = yaml.load((PROMETHEUS / name).read_text(), yaml.CSafeLoader)
    return list(document["groups"])


def rules(name: str) -> list[dict[str, Any]]:
    return [rule for group in groups(name) for rule in group["rules"]]


RECORDED = {rule["record"]: rule["expr"] for rule in rules("rules.yml")}
ALERTS = {rule["alert"]: rule for rule in rules("alerts.yml")}
