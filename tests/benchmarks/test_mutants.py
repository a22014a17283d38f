"""Mutants: the edits of a source, and the detection of failing tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.mutants.cases import cases
from benchmarks.mutants.operators import mutants_of

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("source", "edited"),
    [
        ("x = a < b", {"x = (a <= b)"}),
        ("x = a and b", {"x = (a or b)"}),
        ("x = not a", {"x = (a)"}),
        ("x = a - 3", {"x = (a + 3)", "x = a - (4)"}),
        ("x = True", {"x = (False)"}),
        ("x = min(a, b)", {"x = (max)(a, b)"}),
        ("x = a if b else c", {"x = (c if b else a)"}),
        ("if a:\n    b()", {"if (not a):\n    b()", "if a:\n    pass"}),
        ("for a in b:\n    break", {"for a in b:\n    continue"}),
        ("x += y", {"x -= y"}),
        ("def f(a: int = 1) -> None: ...", {"def f(a: int = (2)) -> None: ..."}),
        ('logger.info("%d", 1)', set()),
        ('x = f"{a + b}"', set()),
        ('"""Text."""', set()),
        ("if TYPE_CHECKING:\n    import a", set()),
    ],
)
def test_mutants_of_a_source(source: str, edited: set[str]) -> None:
    assert {each.apply(source.encode()).decode() for each in mutants_of(source.encode())} == edited


TRIAL = """
import sys
from pathlib import Path
from benchmarks.mutants import trial
trial.load(["pytest"])
tree = Path(sys.argv[1])
for name in ("passes", "fails", "hangs"):
    print(name, trial.run(tree, [f"test_one.py::test_{name}"], 2.0 if name == "hangs" else 60.0))
"""
TESTS = """
import time
def test_passes(): pass
def test_fails(): assert False
def test_hangs(): time.sleep(60)
"""


def test_failing_and_hanging_tests_are_detected(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(TESTS)
    done = subprocess.run(
        [sys.executable, "-c", TRIAL, str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout.splitlines() == ["passes True", "fails False", "hangs False"], done.stderr


def test_line_at_import_is_tried_on_the_tests_of_its_area_those_of_its_folder_first() -> None:
    path, runs = "proxy/core/fleet/charges.py", "tests/proxy/processes/test_a.py::test"
    core, fleet = "tests/proxy/core/test_a.py::test", "tests/proxy/core/fleet/test_a.py::test"
    took = {runs: 0.1, core: 0.2, fleet: 0.3, "tests/proxy/wire/test_a.py::test": 0.1}
    lines = dict.fromkeys(range(1, 1000), frozenset([runs]))
    drawn = list(cases(["proxy/core"], 100_000, 1, {ROOT / path: lines}, took))
    found = {(*case.near, *case.far) for case in drawn if case.path == path}
    assert found == {(runs,), (fleet, runs, core)}
    [at_import] = {case.near for case in drawn if case.path == "proxy/core/fleet/worker_load.py"}
    assert at_import == (fleet, core)
