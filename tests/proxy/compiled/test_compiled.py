"""The compiled modules are held to what the plain ones are: the tests of the core and of the wire.

Compiling takes two minutes, and once for these sources: they stay where routers look for them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from proxy.compiled.places import SWITCH, hot
from vllm_sched.cli.main import main

ROOT = Path(__file__).parents[3]
LONGEST_S = 1200
SHOWN = """
import sys
from proxy.compiled.places import in_use
from proxy.processes import child
assert in_use()
plain = [name for name in sys.argv[1:] if sys.modules[name].__file__.endswith(".py")]
assert not plain, plain
"""


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Compile what is not yet."""
    assert main(["compile"]) == 0


def run(*command: str) -> str:
    """Run Python with compiled modules and return what it says."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=os.environ | {SWITCH: "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=LONGEST_S,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_a_router_runs_on_them() -> None:
    run("-c", SHOWN, *[".".join(path.relative_to(ROOT).with_suffix("").parts) for path in hot()])


@pytest.mark.parametrize("tests", ["core", "wire", "processes/test_router.py"])
def test_they_do_what_the_plain_ones_do(tests: str) -> None:
    told = run("-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path("tests/proxy", tests)))
    assert " passed" in told.splitlines()[-1]
