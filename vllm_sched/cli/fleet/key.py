"""`vllm-sched key`: a fresh key for a tenant, and the hash that the fleet file keeps of it."""

from __future__ import annotations

import argparse
import secrets
import sys
from hashlib import sha256
from typing import TypeAlias

from vllm_sched.errors import UsageError

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

PREFIX = "sk-vs-"
BYTES = 32
LEAST = 16  # letters, as the router wants them


def describe(commands: Commands) -> None:
    """Describe the command."""
    command = commands.add_parser(
        "key",
        help="make a key for a tenant, and the hash that the fleet file keeps of it",
        description="Make a key for a tenant, and the hash that the fleet file keeps of it.",
        allow_abbrev=False,
    )
    command.add_argument(
        "--stdin",
        action="store_true",
        help="print the hash of the key on standard input in place of a fresh one",
    )
    command.set_defaults(func=lambda given: _key(stdin=given.stdin))


def hashed(key: str) -> str:
    """Write the hash of a key as the fleet file has it."""
    return f"sha256:{sha256(key.encode()).hexdigest()}"


def fresh() -> str:
    """Make a key that nobody can guess."""
    return PREFIX + secrets.token_urlsafe(BYTES)


def _key(*, stdin: bool) -> int:
    if stdin:
        key = sys.stdin.readline().strip()
        if len(key) < LEAST or not key.isascii() or not key.isprintable() or " " in key:
            raise UsageError(
                f"standard input is no key of {LEAST} or more letters, digits and signs; "
                "without --stdin a fresh one is made"
            )
    else:
        key = fresh()
        print(f"key   {key}")
    print(f"hash  {hashed(key)}")
    return 0
