"""`vllm-sched`: find the command, run it, turn errors of the user's into a line each."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from io import TextIOWrapper

from proxy.errors import ProxyError
from vllm_sched import __version__
from vllm_sched.cli import (
    bench,
    calibrate,
    compiling,
    fleet,
    key,
    measure,
    plan,
    serve,
    simulate,
    sweep,
    threshold,
)
from vllm_sched.cli.load import INTERRUPTED
from vllm_sched.errors import VllmSchedError

BAD_USAGE = 2


def parser() -> argparse.ArgumentParser:
    """Describe all commands."""
    top = argparse.ArgumentParser(
        prog="vllm-sched",
        description="Keep short prompts fast when long ones arrive, inside vLLM and in front.",
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"vllm-sched {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    serve.add_serve(commands)
    measure.add_compare(commands)
    bench.add_bench(commands)
    sweep.add_sweep(commands)
    simulate.add_simulate(commands)
    plan.add_plan(commands)
    threshold.add_threshold(commands)
    calibrate.add_calibrate(commands)
    fleet.add_fleet(commands)
    key.add_key(commands)
    compiling.add_compile(commands)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if isinstance(sys.stdout, TextIOWrapper):
        # Any bytes name a file, and what came of one is told all the same; so stderr does it.
        sys.stdout.reconfigure(errors="backslashreplace")
    first = argv[1] if argv[:1] == ["serve"] and len(argv) > 1 else ""
    if first.startswith("-") and first not in ("-h", "--help"):
        # Else the value of a flag that only vLLM knows would pass for the model.
        print("vllm-sched serve: MODEL comes first, then the flags", file=sys.stderr)
        return BAD_USAGE
    arguments, rest = parser().parse_known_args(argv)
    if rest and arguments.command != "serve":
        parser().error(f"unrecognized arguments: {' '.join(rest)}")
    arguments.rest = rest
    try:
        return int(arguments.func(arguments))
    except VllmSchedError as error:
        print(f"vllm-sched {arguments.command}: {error}", file=sys.stderr)
        return BAD_USAGE
    except ProxyError as error:
        for line in str(error).splitlines():
            print(f"vllm-sched {arguments.command}: {line}", file=sys.stderr)
        return BAD_USAGE
    except KeyboardInterrupt:
        print(f"vllm-sched {arguments.command}: interrupted", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
