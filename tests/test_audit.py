"""Outcomes of the audit: found, nothing found, not done."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
FOUND, NOT_DONE = 1, 3
ADVISORY = {"id": "PYSEC-1", "fix_versions": ["9.9"], "aliases": ["CVE-1"], "description": "d"}
# Writes $REPORT where pip-audit would, and exits as after findings.
STAND_IN = (
    "import os, sys; report = os.environ['REPORT']\n"
    "if report: open(sys.argv[sys.argv.index('--output') + 1], 'w').write(report)\n"
    "print('WARNING: something', file=sys.stderr)\n"
    "print('ERROR: Could not connect to the service', file=sys.stderr); sys.exit(1)"
)


def package(name: str, *vulns: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "version": "1.0", "vulns": list(vulns)}


def audit(report: object, *options: str) -> tuple[int, str]:
    """Run the audit with a fake pip-audit; return its exit code and output."""
    by = shlex.join((sys.executable, "-c", STAND_IN))
    done = subprocess.run(
        [sys.executable, "scripts/audit.py", *options, "--by", by],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "REPORT": "" if report is None else json.dumps(report)},
        check=False,
    )
    assert not done.stderr
    return done.returncode, done.stdout


@pytest.mark.parametrize("option", [(), ("--if-reachable",)])
def test_advisory_of_the_router_fails_the_audit(option: tuple[str, ...]) -> None:
    report = {"dependencies": [package("orjson", ADVISORY), package("starlette")]}
    status, output = audit(report, *option)
    assert status == FOUND
    assert "the router: orjson 1.0: PYSEC-1, mended in 9.9" in output


def test_advisory_of_another_package_is_reported() -> None:
    report = {"dependencies": [package("torch", ADVISORY), package("orjson")]}
    status, output = audit(report)
    assert status == 0
    assert "beside it: torch 1.0: PYSEC-1" in output
    assert "no advisories" in output


@pytest.mark.parametrize(
    "report",
    [
        None,
        {"dependencies": [{"name": "orjson", "skip_reason": "not found"}, package("torch")]},
    ],
)
def test_unreachable_service_is_not_a_pass(report: object) -> None:
    status, output = audit(report)
    assert status == NOT_DONE
    assert output.startswith("audit: NOT DONE")
    assert report is not None or "Could not connect to the service" in output
    status, again = audit(report, "--if-reachable")
    assert (status, again) == (0, output)


def test_ci_fails_with_the_audit() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert "scripts/audit.py --if-reachable\n" in script
    assert "||" not in script
