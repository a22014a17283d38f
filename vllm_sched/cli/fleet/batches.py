"""`vllm-sched batches`: move the router's batches from a folder to a PostgreSQL database."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TypeAlias

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def describe(commands: Commands) -> None:
    group = commands.add_parser(
        "batches",
        help="move files and batches to a PostgreSQL database",
        description="Move files and batches to a PostgreSQL database.",
        allow_abbrev=False,
    )
    command = group.add_subparsers(dest="action", metavar="ACTION", required=True).add_parser(
        "migrate",
        help="copy a folder's files, batches, lines and results",
        description="Copy a folder's files, batches, lines and results into an empty database. "
        "The folder is not changed. A run that was interrupted goes on when it is repeated.",
        allow_abbrev=False,
    )
    command.add_argument(
        "--from", dest="folder", type=Path, required=True, help="the folder of router.batches.path"
    )
    command.add_argument(
        "--to", dest="url", required=True, help="the URL of router.batches.database"
    )
    command.add_argument(
        "--password-file", type=Path, help="a file with the password, instead of one in the URL"
    )
    command.set_defaults(func=_migrate)


def _migrate(args: argparse.Namespace) -> int:
    from proxy.batches.storage.migrate import migrate

    for table, (total, new) in migrate(args.folder, args.url, args.password_file).items():
        print(f"{table:8} {total:9} {f'({total - new} were copied before)' if new < total else ''}")
    return 0
