"""Fuzz the HTTP parsers with mutated messages.

    python -m benchmarks.fuzz --requests 100000 --seed 1

Differences from the reference (see `tests/fuzz`) are printed with their numbers; the exit status is
1 if there are any.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

from proxy.compiled import locate
from tests.fuzz import judge
from tests.fuzz.judge import Tally
from tests.fuzz.mutate import Mutator

MAX_SHOWN, MAX_LINE = 20, 400
Judge = Callable[[list[bytes], list[bytes], Tally], None]


def fuzz(what: str, seed: int, minimum: int) -> tuple[Tally, list[str]]:
    """Compare streams of at least `minimum` messages; return counts and differences."""
    compare: Judge = {"requests": judge.requests, "answers": judge.answers}[what]
    tally, differ = Tally(), []
    number = 0
    while tally.messages < minimum:
        mutator = Mutator(seed, number)
        made = mutator.requests() if what == "requests" else mutator.answers()
        before = tally.messages
        try:
            compare(made, mutator.cuts(b"".join(made)), tally)
        except Exception as error:  # a difference must not end the run
            differ.append(f"{what} {seed}:{number}: {error!r}")
            tally.messages = before + len(made)
        number += 1
    return tally, differ


def main() -> int:
    """Fuzz requests and answers; return 1 if a difference was found."""
    options = argparse.ArgumentParser(prog="python -m benchmarks.fuzz", description=__doc__)
    options.add_argument("--requests", type=int, default=100_000, help="messages of each kind")
    options.add_argument("--seed", type=int, default=1)
    args = options.parse_args()
    print(f"modules: {locate.kind()}")
    bad = 0
    for what in ("requests", "answers"):
        began = time.perf_counter()
        tally, differ = fuzz(what, args.seed, args.requests)
        print(
            f"{what}: {tally.messages:,} in {tally.streams:,} streams, "
            f"{time.perf_counter() - began:.0f} s: {tally.taken:,} taken, {tally.refused:,} "
            f"streams refused in {len(tally.refusals)} ways, {tally.waiting:,} incomplete, "
            f"{len(differ)} differ from the reference"
        )
        for difference in differ[:MAX_SHOWN]:
            print(f"  {difference[:MAX_LINE]}")
        bad += len(differ)
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
