"""`vllm-sched`: find the command, run it, and print the user's errors without a traceback."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import IO, cast

from proxy.errors import ProxyError
from vllm_sched.cli.exits import (
    BAD_USAGE,
    CLOSED_OUTPUT,
    INTERRUPTED,
    OutputError,
    StandardOutput,
    hangup_waits,
    lost_output,
    signals_as_interrupt,
)
from vllm_sched.errors import VllmSchedError
from vllm_sched.version import __version__

# Commands that measure. The others handle signals themselves or are short.
MEASURING_COMMANDS = frozenset(
    ("compare", "bench", "sweep", "simulate", "plan", "threshold", "calibrate", "demo")
)
DISK_ERRORS = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EIO))
# Of standard output: also if its reader has ended. A closed terminal has EIO.
OUTPUT_ERRORS = DISK_ERRORS | {errno.EPIPE}
# The module of each command, in the order of --help.
MODULES = {
    "serve": "serve",
    "compare": "bench.compare",
    "bench": "bench.bench",
    "sweep": "bench.sweep",
    "simulate": "model.simulate",
    "plan": "model.plan",
    "threshold": "model.threshold",
    "calibrate": "model.calibrate",
    "profiles": "model.profiles",
    "router": "fleet.fleet",
    "check": "fleet.fleet",
    "up": "fleet.up",
    "demo": "fleet.demo",
    "explain": "fleet.explain",
    "drain": "fleet.drain",
    "key": "fleet.key",
    "batches": "fleet.batches",
    "compile": "fleet.compile",
}


def parser(command: str = "") -> argparse.ArgumentParser:
    """Return the parser of one command or of all, because imports for all take seconds."""
    top = argparse.ArgumentParser(
        prog="vllm-sched",
        description="Keep short prompts fast when long ones arrive, inside vLLM and in front.",
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"vllm-sched {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    every = [] if command == "--version" else dict.fromkeys(MODULES.values())
    for name in [MODULES[command]] if command in MODULES else every:
        import_module(f"vllm_sched.cli.{name}").describe(commands)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if sys.stderr is None:  # stderr is closed: `print` would write to stdout instead
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 - open until the process ends
    command = "".join(argv[:1])
    name = f"vllm-sched {command}" if command in MODULES else "vllm-sched"
    output = sys.stdout
    if isinstance(output, TextIOWrapper):
        # A file name can contain bytes that are not UTF-8; print them escaped, as stderr does.
        output.reconfigure(errors="backslashreplace")
    checked = None if output is None else cast("IO[str]", StandardOutput(output))
    signals = hangup_waits() if command == "router" else nullcontext()
    if command in MEASURING_COMMANDS:
        signals = signals_as_interrupt()
    try:
        with signals, redirect_stdout(checked):
            try:
                return _run(argv)
            finally:
                if lost_output:
                    raise lost_output.pop()
                if checked is not None:
                    checked.flush()
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except OutputError as error:
        if error.errno not in OUTPUT_ERRORS:
            raise
        if error.errno != errno.EPIPE:  # otherwise the reader has ended, as `head` does
            print(f"{name}: standard output: {error.strerror}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), output.fileno())
        return CLOSED_OUTPUT
    except OSError as error:
        if error.errno not in DISK_ERRORS or error.filename is None:
            raise
        print(f"{name}: {error.filename}: {error.strerror}", file=sys.stderr)
        return BAD_USAGE


def _run(argv: Sequence[str]) -> int:
    first = argv[1] if argv[:1] == ["serve"] and len(argv) > 1 else ""
    if first.startswith("-") and first not in ("-h", "--help"):
        # Otherwise the value of a flag that only vLLM knows would be taken for the model.
        print("vllm-sched serve: give MODEL first, then the flags", file=sys.stderr)
        return BAD_USAGE
    described = parser(*argv[:1])
    arguments, rest = described.parse_known_args(argv)
    if rest and arguments.command != "serve":
        described.error(f"unrecognized arguments: {' '.join(rest)}")
    arguments.argv, arguments.rest = argv, rest
    try:
        return int(arguments.func(arguments))
    except VllmSchedError as error:
        print(f"vllm-sched {arguments.command}: {error}", file=sys.stderr)
        return BAD_USAGE
    except ProxyError as error:
        for line in str(error).splitlines():
            print(f"vllm-sched {arguments.command}: {line}", file=sys.stderr)
        return BAD_USAGE


if __name__ == "__main__":
    sys.exit(main())
