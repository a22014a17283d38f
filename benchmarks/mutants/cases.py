"""The cases of a run: a sample of mutants, each with the tests that may catch it."""

from __future__ import annotations

import ast
import multiprocessing
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path

from benchmarks.mutants import trial
from benchmarks.mutants.operators import Mutant, mutants_of

ROOT = Path(__file__).parents[2]
# Source folders and the tests that should catch their faults.
ROUTER_TESTS = (
    "tests/proxy/wire", "tests/proxy/core", "tests/proxy/http", "tests/proxy/metrics",
    "tests/proxy/batches", "tests/proxy/transfer", "tests/proxy/processes", "tests/proxy/config",
    "tests/proxy/setup", "tests/proxy/telemetry", "tests/faults", "tests/fuzz",
)  # fmt: skip
ENGINE_TESTS = ("tests/engine", "tests/policies", "tests/sim")
AREAS = {
    "proxy/core": ROUTER_TESTS,
    "proxy/http": ROUTER_TESTS,
    "proxy/wire": ROUTER_TESTS,
    "vllm_sched/engine": ENGINE_TESTS,
    "vllm_sched/policies": ENGINE_TESTS,
}
MIN_LIMIT_S, LIMIT_FACTOR = 20.0, 5.0
# Total time of the far tests, the quickest others, which run if the near tests pass.
MAX_FAR_S = 60.0
NEAR_FILES, NEAR_TESTS = 3, 60


@dataclass(frozen=True)
class Case:
    """One mutant and the tests that run its line; `near` tests are most likely to fail."""

    area: str
    path: str
    mutant: Mutant
    near: tuple[str, ...]
    far: tuple[str, ...]
    limits_s: tuple[float, float]

    def __str__(self) -> str:
        return f"{self.path}:{self.mutant}"


def cases(
    areas: Sequence[str],
    count: int,
    seed: int,
    lines: dict[Path, dict[int, frozenset[str]]],
    took: dict[str, float],
) -> Iterator[Case]:
    """Draw the same number of mutants from each area."""
    for area in areas:
        rng = random.Random(f"{seed} {area}")
        every = [
            (path, mutant)
            for path in sorted(Path(ROOT, area).rglob("*.py"))
            for mutant in mutants_of(path.read_bytes())
        ]
        for path, mutant in rng.sample(every, min(len(every), count // len(areas))):
            name = str(path.relative_to(ROOT))
            own = [
                test for test in took if test.partition("::")[0].endswith(f"/test_{path.stem}.py")
            ]
            of_module = lines.get(path, {})
            reached = frozenset().union(*of_module.values())
            if mutant.line in _lines_of_functions(path):
                reached = of_module.get(mutant.line) or reached
            else:  # it runs at import, so any test of the area may catch it
                reached |= {test for test in took if test.startswith(_test_folder(area))}
            near, far = _ordered(
                set(own), set(reached), took, _test_folder(name.rpartition("/")[0])
            )
            limits = (_limit_s(near, took), _limit_s(far, took))
            yield Case(area, name, mutant, near, far, limits)


def _test_folder(folder: str) -> str:
    """Return the folder with the tests of a source folder."""
    return f"tests/{folder.removeprefix('vllm_sched/')}/"


@cache
def _lines_of_functions(path: Path) -> frozenset[int]:
    return frozenset(
        line
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for line in range(node.body[0].lineno, (node.end_lineno or node.lineno) + 1)
    )


def _ordered(
    own: set[str], reached: set[str], took: dict[str, float], folder: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    by_file: dict[str, list[str]] = {}
    for test in sorted(reached - own, key=lambda test: took.get(test, 0.0)):
        by_file.setdefault(test.partition("::")[0], []).append(test)
    seconds = {file: sum(took.get(test, 0.0) for test in by_file[file]) for file in by_file}
    # A fault is most likely seen by the tests of its folder.
    files = sorted(by_file, key=lambda file: (not file.startswith(folder), seconds[file]))
    quick = dict.fromkeys(
        test for file in files[:NEAR_FILES] for test in by_file[file][:NEAR_TESTS]
    )
    first = sorted(own & reached or own, key=lambda test: took.get(test, 0.0))
    near = (*first, *quick)
    left = [test for file in files for test in by_file[file] if test not in quick]
    ends = accumulate(took.get(test, 0.0) for test in left)
    far = [test for test, end in zip(left, ends, strict=True) if end <= MAX_FAR_S]
    return near, (*far, *sorted(own - set(first)))


def _limit_s(tests: Sequence[str], took: dict[str, float]) -> float:
    return MIN_LIMIT_S + LIMIT_FACTOR * sum(took.get(test, 0.0) for test in tests)


def caught(trees: Path, case: Case) -> bool:
    """Return whether a test fails on the mutant or times out."""
    tree = trees / str(multiprocessing.current_process().pid)
    if not tree.exists():
        trial.copy_tree(ROOT, tree)
    path = tree / case.path
    source = path.read_bytes()
    try:
        path.write_bytes(case.mutant.apply(source))
        return any(
            tests and not trial.run(tree, tests, limit_s)
            for tests, limit_s in zip((case.near, case.far), case.limits_s, strict=True)
        )
    finally:
        path.write_bytes(source)
