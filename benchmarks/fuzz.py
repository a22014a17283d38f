"""Messages made wrong, as many as one likes, against the readers of HTTP.

    python -m benchmarks.fuzz --requests 100000 --seed 1

What differs from the reference is printed with its number; the exit status says whether any did.
See `tests/fuzz` for what is compared.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

from proxy.compiled import locate
from tests.fuzz import judge
from tests.fuzz.judge import Tally
from tests.fuzz.mutate import Mutator

SHOWN, WIDEST = 20, 400
Judge = Callable[[list[bytes], list[bytes], Tally], None]


def play(what: str, seed: int, least: int) -> tuple[Tally, list[str]]:
    """Judge streams of requests or answers until so many messages were made."""
    compare: Judge = {"requests": judge.requests, "answers": judge.answers}[what]
    tally, differ = Tally(), []
    number = 0
    while tally.messages < least:
        mutator = Mutator(seed, number)
        made = mutator.requests() if what == "requests" else mutator.answers()
        before = tally.messages
        try:
            compare(made, mutator.cuts(b"".join(made)), tally)
        except Exception as error:  # whatever it is, the rest is still of interest
            differ.append(f"{what} {seed}:{number}: {error!r}")
            tally.messages = before + len(made)
        number += 1
    return tally, differ


def main() -> int:
    """Play both, and print what came of them."""
    options = argparse.ArgumentParser(prog="python -m benchmarks.fuzz", description=__doc__)
    options.add_argument("--requests", type=int, default=100_000, help="so many messages of each")
    options.add_argument("--seed", type=int, default=1)
    given = options.parse_args()
    print(f"modules: {locate.kind()}")
    bad = 0
    for what in ("requests", "answers"):
        began = time.perf_counter()
        tally, differ = play(what, given.seed, given.requests)
        print(
            f"{what}: {tally.messages:,} in {tally.streams:,} streams, "
            f"{time.perf_counter() - began:.0f} s: {tally.taken:,} taken, {tally.refused:,} "
            f"streams refused in {len(tally.refusals)} ways, {tally.waiting:,} not whole, "
            f"{len(differ)} read otherwise than by the reference"
        )
        for each in differ[:SHOWN]:
            print(f"  {each[:WIDEST]}")
        bad += len(differ)
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
