"""`vllm-sched compile`: compile the router's hot modules to machine code."""

from __future__ import annotations

import argparse
from typing import TypeAlias

from rich.console import Console

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def describe(commands: Commands) -> None:
    command = commands.add_parser(
        "compile",
        help="compile the router's hot modules, which saves a third of its CPU time",
        description="Compile the router's hot modules with mypyc, for routers that start later. "
        "This needs a C compiler and takes some minutes, once for each version.",
        allow_abbrev=False,
    )
    command.add_argument("--remove", action="store_true", help="remove the compiled modules")
    command.set_defaults(func=lambda args: _compile(remove=args.remove))


def _compile(*, remove: bool) -> int:
    from proxy.compiled import build

    if remove:
        build.remove()
        print("routers that start from now on use the plain modules")
        return 0
    with Console(stderr=True).status("compiling, about two minutes", refresh_per_second=1):
        folder = build.build()
    print(f"routers that start from now on use the compiled modules in {folder}")
    return 0
