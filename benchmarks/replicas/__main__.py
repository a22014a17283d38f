"""Measure routers that share their state against one router.

    python -m benchmarks.replicas cost [--routers 1 2 4] [--rounds 5]
    python -m benchmarks.replicas quality [--routers 1 2 4]
    python -m benchmarks.replicas latency

`cost`: processor time per request of one router, beside others that get as many requests.
`quality`: how far shares of two equal tenants differ, by how much a tenant exceeds its limit, how
many requests too many a worker has, and the first tokens of short requests beside long ones.
`latency`: the time until the server has decided a request of a tenant near its limit. Everything
runs on this machine.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.replicas import cost, latency, quality


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="replicas", description=__doc__.partition("\n")[0])
    parser.add_argument("part", choices=["cost", "quality", "latency"])
    parser.add_argument("--routers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, help="per window; default: 3, of quality 20")
    parser.add_argument("--rate", type=float, default=1000.0, help="requests/s to each router")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        if args.part == "cost":
            window = cost.Window(args.seconds or 3.0, args.rate)
            cost.main(Path(folder), args.routers, args.rounds, window)
        elif args.part == "latency":
            latency.main(Path(folder), args.seconds or 5.0)
        else:
            quality.main(Path(folder), args.routers, args.seconds or 20.0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
