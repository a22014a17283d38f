"""What an audit's end means: found, nothing found, nobody asked."""

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
FOUND, NOT_ASKED = 1, 3
ADVISORY = {"id": "PYSEC-1", "fix_versions": ["9.9"], "aliases": ["CVE-1"], "description": "d"}
# Writes what it is told to where pip-audit would, and ends as it does where it found something.
STAND_IN = (
    "import os, sys; said = os.environ['SAID']\n"
    "if said: open(sys.argv[sys.argv.index('--output') + 1], 'w').write(said)\n"
    "print('WARNING: something', file=sys.stderr)\n"
    "print('ERROR: Could not connect to the service', file=sys.stderr); sys.exit(1)"
)


def package(name: str, *vulns: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "version": "1.0", "vulns": list(vulns)}


def audit(said: object, *options: str) -> tuple[int, str]:
    """Run it before a stand-in for pip-audit."""
    by = shlex.join((sys.executable, "-c", STAND_IN))
    done = subprocess.run(
        [sys.executable, "scripts/audit.py", *options, "--by", by],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "SAID": "" if said is None else json.dumps(said)},
        check=False,
    )
    assert not done.stderr
    return done.returncode, done.stdout


@pytest.mark.parametrize("option", [(), ("--if-reachable",)])
def test_what_is_found_in_the_router_fails(option: tuple[str, ...]) -> None:
    said = {"dependencies": [package("orjson", ADVISORY), package("starlette")]}
    status, told = audit(said, *option)
    assert status == FOUND
    assert "the router: orjson 1.0: PYSEC-1, mended in 9.9" in told


def test_what_is_found_beside_it_is_told() -> None:
    said = {"dependencies": [package("torch", ADVISORY), package("orjson")]}
    status, told = audit(said)
    assert status == 0
    assert "beside it: torch 1.0: PYSEC-1" in told
    assert "no advisories" in told


@pytest.mark.parametrize(
    "said",
    [
        None,
        {"dependencies": [{"name": "orjson", "skip_reason": "not found"}, package("torch")]},
    ],
)
def test_that_nobody_could_be_asked_is_no_all_clear(said: object) -> None:
    status, told = audit(said)
    assert status == NOT_ASKED
    assert told.startswith("audit: NOT DONE")
    assert said is not None or "Could not connect to the service" in told
    status, again = audit(said, "--if-reachable")
    assert (status, again) == (0, told)


def test_ci_runs_it_so_that_it_can_fail() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert "scripts/audit.py --if-reachable\n" in script
    assert "||" not in script
