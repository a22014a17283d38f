"""The exit statuses of `scripts/audit.py`."""

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
FOUND, UNREACHABLE = 1, 3
ADVISORY = {"id": "PYSEC-1", "fix_versions": ["9.9"], "aliases": ["CVE-1"], "description": "d"}
# Writes $REPORT to pip-audit's output file, and ends like pip-audit with advisories.
PIP_AUDIT = (
    "import os, sys; report = os.environ['REPORT']\n"
    "if report: open(sys.argv[sys.argv.index('--output') + 1], 'w').write(report)\n"
    "print('WARNING: something', file=sys.stderr)\n"
    "print('ERROR: Could not connect to the service', file=sys.stderr); sys.exit(1)"
)


def package(name: str, *vulns: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "version": "1.0", "vulns": list(vulns)}


def audit(report: object, *options: str) -> tuple[int, str]:
    """Run the script with a fake pip-audit."""
    by = shlex.join((sys.executable, "-c", PIP_AUDIT))
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
def test_what_is_found_in_the_router_fails(option: tuple[str, ...]) -> None:
    report = {"dependencies": [package("orjson", ADVISORY), package("starlette")]}
    status, output = audit(report, *option)
    assert status == FOUND
    assert "router: orjson 1.0: PYSEC-1, fixed in 9.9" in output


def test_advisories_of_other_packages_are_only_printed() -> None:
    report = {"dependencies": [package("torch", ADVISORY), package("orjson")]}
    status, output = audit(report)
    assert status == 0
    assert "other: torch 1.0: PYSEC-1" in output
    assert "no advisories" in output


@pytest.mark.parametrize(
    "report",
    [None, {"dependencies": [{"name": "orjson", "skip_reason": "not found"}, package("torch")]}],
)
def test_an_unreachable_service_is_reported(report: object) -> None:
    status, output = audit(report)
    assert status == UNREACHABLE
    assert output.startswith("audit: NOT DONE")
    assert report is not None or "Could not connect to the service" in output
    status, again = audit(report, "--if-reachable")
    assert (status, again) == (0, output)


def test_ci_runs_it_so_that_it_can_fail() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert "scripts/audit.py --if-reachable\n" in script
    assert "||" not in script
