"""What share of small faults in the source the tests catch.

    python -m benchmarks.mutants --count 440 --save out/mutants/found.json
    python -m benchmarks.mutants --again out/mutants/found.json    # the survivors alone
    python -m benchmarks.mutants --areas proxy/core --count 100

A sample of mutants of the router's core and wire and of the engine half's schedulers and policies.
The tests run once under coverage.py, and out/mutants/reach keeps which lines each of them runs.
Then each mutant is shown to the tests that run its line, first to those of the module's own file
of tests. A mutant that no test fails on has survived.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

from benchmarks.mutants import reach, trial
from benchmarks.mutants.operators import Mutant, mutants_of

ROOT = Path(__file__).parents[2]
# The folders of source, and the tests that are to catch what is wrong in them.
ROUTER_TESTS = (
    "tests/proxy/wire", "tests/proxy/core", "tests/proxy/control", "tests/proxy/batches",
    "tests/proxy/transfer", "tests/proxy/processes", "tests/proxy/config", "tests/faults",
    "tests/fuzz",
)  # fmt: skip
ENGINE_TESTS = ("tests/engine", "tests/policies", "tests/cost", "tests/sim")
AREAS = {
    "proxy/core": ROUTER_TESTS,
    "proxy/wire": ROUTER_TESTS,
    "vllm_sched/engine": ENGINE_TESTS,
    "vllm_sched/policies": ENGINE_TESTS,
}
LEAST_LIMIT_S, LIMIT_FACTOR = 20.0, 5.0
PLAIN = "not engine and not browser and not compiled"
NEAR_FILES, NEAR_TESTS = 3, 60


@dataclass(frozen=True)
class Case:
    """One mutant, and the tests that run its line: those that are likely to fail come first."""

    area: str
    path: str
    mutant: Mutant
    near: tuple[str, ...]
    far: tuple[str, ...]
    limits_s: tuple[float, float]

    def __str__(self) -> str:
        lines = Path(ROOT, self.path).read_bytes()[: self.mutant.end].count(b"\n")
        old = Path(ROOT, self.path).read_bytes()[self.mutant.start : self.mutant.end].decode()
        changed = self.mutant.text if lines < self.mutant.line + 3 else "..."
        return f"{self.path}:{self.mutant.line}: {self.mutant.kind}: {old} -> {changed}"


def cases(
    areas: Sequence[str],
    count: int,
    seed: int,
    lines: dict[Path, dict[int, frozenset[str]]],
    took: dict[str, float],
) -> Iterator[Case]:
    """Draw an equal share of each area."""
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
                each for each in took if each.partition("::")[0].endswith(f"/test_{path.stem}.py")
            ]
            reached = lines.get(path, {}).get(mutant.line, frozenset())
            near, far = _ordered(set(own), set(reached), took)
            limits = (_limit_s(near, took), _limit_s(far, took))
            yield Case(area, name, mutant, near, far, limits)


def _ordered(
    own: set[str], reached: set[str], took: dict[str, float]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    by_file: dict[str, list[str]] = {}
    for each in sorted(reached - own, key=lambda each: took.get(each, 0.0)):
        by_file.setdefault(each.partition("::")[0], []).append(each)
    files = sorted(by_file, key=lambda file: sum(took.get(each, 0.0) for each in by_file[file]))
    quick = [each for file in files[:NEAR_FILES] for each in by_file[file][:NEAR_TESTS]]
    first = sorted(own & reached or own, key=lambda each: took.get(each, 0.0))
    near = (*first, *quick)
    left = [each for file in files for each in by_file[file] if each not in quick]
    return near, (*left, *sorted(own - set(first)))


def _limit_s(tests: Sequence[str], took: dict[str, float]) -> float:
    return LEAST_LIMIT_S + LIMIT_FACTOR * sum(took.get(each, 0.0) for each in tests)


def caught(trees: Path, case: Case) -> bool:
    """Tell whether a test fails on it, or never ends."""
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


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print a line per survivor and a table."""
    args = _arguments(argv)
    folder = ROOT / "out" / "mutants"
    _measure_reach(folder / "reach", args.areas, args.jobs)
    lines, took = reach.read(folder / "reach"), reach.seconds(folder / "reach")
    drawn = list(cases(args.areas, args.count, args.seed, lines, took))
    if args.again:
        survived = set(json.loads(args.again.read_text())["survivors"])
        drawn = [case for case in drawn if str(case) in survived]
    found: list[tuple[Case, bool]] = []
    for libraries, areas in (
        (trial.LIBRARIES, ("proxy/core", "proxy/wire")),
        (trial.LIBRARIES + trial.ENGINE_LIBRARIES, ("vllm_sched/engine", "vllm_sched/policies")),
    ):
        some = [case for case in drawn if case.area in areas]
        with ProcessPoolExecutor(
            args.jobs, multiprocessing.get_context("spawn"), trial.load, (libraries,)
        ) as pool:
            for case, was_caught in zip(
                some, pool.map(partial(caught, folder / "trees"), some), strict=True
            ):
                found.append((case, was_caught))
                if not was_caught:
                    print(f"survived: {case}", flush=True)
    print(_table(found))
    if args.save:
        survivors = [str(case) for case, was_caught in found if not was_caught]
        args.save.write_text(json.dumps({"survivors": survivors, "count": len(found)}, indent=1))
    return 0


def _measure_reach(folder: Path, areas: Sequence[str], jobs: int) -> None:
    """Run the tests of these areas that were not run yet, and note which lines each runs."""
    missing = [
        tests
        for tests in dict.fromkeys(chain.from_iterable(AREAS[area] for area in areas))
        if not (folder / tests.replace("/", "-")).exists()
    ]
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(partial(_measure, folder), missing))


def _measure(folder: Path, tests: str) -> None:
    place = folder / tests.replace("/", "-")
    unfinished = place.with_suffix(".unfinished")
    unfinished.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "benchmarks.mutants.reach", "-m", PLAIN]
    done = subprocess.run(
        [*command, tests], cwd=ROOT, env=os.environ | {reach.FOLDER: str(unfinished)}
    )
    if done.returncode:
        sys.exit(f"mutants: {tests} fails without a mutant")
    unfinished.rename(place)


def _table(found: Sequence[tuple[Case, bool]]) -> str:
    rows = []
    for area in (*AREAS, "all"):
        some = [was_caught for case, was_caught in found if area in (case.area, "all")]
        if some:
            rows.append(f"{area:24} {len(some):5} {sum(some):5} {sum(some) / len(some):8.1%}")
    return "\n".join([f"{'':24} {'all':>5} {'caught':>5} {'share':>8}", *rows])


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--areas", nargs="+", choices=AREAS, default=list(AREAS))
    parser.add_argument("--count", type=int, default=440)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--save", type=Path)
    parser.add_argument("--again", type=Path, metavar="FILE", help="the survivors of that run")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
