"""Measure routers that share their state against one router.

    python -m benchmarks.replicas cost [--routers 1 2 4] [--rounds 5] [--seconds 3]
    python -m benchmarks.replicas quality [--routers 1 2 4] [--seconds 20]

`cost`: processor time per request. `quality`: how well shares, limits and workers' limits are kept,
and the first tokens of short requests beside long ones. Everything runs on this machine.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.replicas import cost


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="replicas", description=__doc__.partition("\n")[0])
    parser.add_argument("part", choices=["cost", "quality"])
    parser.add_argument("--routers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="per window")
    given = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        cost.main(Path(folder), given.routers, given.rounds, given.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
