"""Measure the share of small faults in the source that the tests catch.

    python -m benchmarks.mutants --count 440 --save out/mutants/found.json
    python -m benchmarks.mutants --again out/mutants/found.json    # only the survivors
    python -m benchmarks.mutants --areas proxy/core --count 100

The mutants are a sample of the router's core and wire and of the engine half's schedulers and
policies. The tests run once under coverage.py, and out/mutants/reach records the lines of each
test. Then the tests that run a mutant's line are run on it, first those of the module's own test
file. A mutant that no test fails on has survived.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path

from benchmarks.mutants import reach, trial
from benchmarks.mutants.cases import AREAS, ROOT, Case, cases, caught

PROGRESS_EVERY = 20
PLAIN = "not engine and not browser and not compiled"


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse_args(argv)
    folder = ROOT / "out" / "mutants"
    _measure_reach(folder / "reach", args.areas, args.jobs)
    lines, took = reach.read(folder / "reach"), reach.seconds(folder / "reach")
    drawn = list(cases(args.areas, args.count, args.seed, lines, took))
    if args.again:
        survived = set(json.loads(args.again.read_text())["survivors"])
        drawn = [case for case in drawn if str(case) in survived]
    judged: list[tuple[Case, bool]] = []
    for libraries, package in (
        (trial.LIBRARIES, "proxy"),
        (trial.LIBRARIES + trial.ENGINE_LIBRARIES, "vllm_sched"),
    ):
        of_package = [case for case in drawn if case.area.startswith(f"{package}/")]
        with ProcessPoolExecutor(
            args.jobs, multiprocessing.get_context("spawn"), trial.load, (libraries,)
        ) as pool:
            for case, was_caught in zip(
                of_package, pool.map(partial(caught, folder / "trees"), of_package), strict=True
            ):
                judged.append((case, was_caught))
                if len(judged) % PROGRESS_EVERY == 0:
                    print(f"{len(judged)} of {len(drawn)}", file=sys.stderr, flush=True)
                if not was_caught:
                    print(f"survived: {case}", flush=True)
    print(_table(judged))
    if args.save:
        survivors = [str(case) for case, was_caught in judged if not was_caught]
        args.save.write_text(json.dumps({"survivors": survivors, "count": len(judged)}, indent=1))
    return 0


def _measure_reach(folder: Path, areas: Sequence[str], jobs: int) -> None:
    """Run the tests of these areas that have no recorded lines yet."""
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


def _table(cases: Sequence[tuple[Case, bool]]) -> str:
    rows = []
    for area in (*AREAS, "all"):
        of_area = [was_caught for case, was_caught in cases if area in (case.area, "all")]
        if of_area:
            rows.append(
                f"{area:24} {len(of_area):5} {sum(of_area):5} {sum(of_area) / len(of_area):8.1%}"
            )
    return "\n".join([f"{'':24} {'all':>5} {'caught':>5} {'share':>8}", *rows])


def _parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--areas", nargs="+", choices=AREAS, default=list(AREAS))
    parser.add_argument("--count", type=int, default=440)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--save", type=Path)
    parser.add_argument("--again", type=Path, metavar="FILE", help="rerun the survivors of a run")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
