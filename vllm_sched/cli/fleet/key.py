"""`vllm-sched key`: make a tenant's key and its hash for the fleet file."""

from __future__ import annotations

import argparse
import secrets
import sys
from hashlib import sha256
from typing import TypeAlias

from vllm_sched.errors import UsageError

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

PREFIX = "sk-vs-"
KEY_BYTES = 32
MIN_KEY_CHARACTERS = 16  # characters; the router's minimum


def describe(commands: Commands) -> None:
    command = commands.add_parser(
        "key",
        help="make a key for a tenant, and its hash for the fleet file",
        description="Make a key for a tenant, and its hash for the fleet file.",
        allow_abbrev=False,
    )
    command.add_argument(
        "--stdin",
        action="store_true",
        help="print the hash of the key on standard input; make no new key",
    )
    command.set_defaults(func=lambda args: _key(stdin=args.stdin))


def hash_key(key: str) -> str:
    return f"sha256:{sha256(key.encode()).hexdigest()}"


def make_key() -> str:
    return PREFIX + secrets.token_urlsafe(KEY_BYTES)


def _key(*, stdin: bool) -> int:
    if stdin:
        key = sys.stdin.readline().strip()
        if (
            len(key) < MIN_KEY_CHARACTERS
            or not key.isascii()
            or not key.isprintable()
            or " " in key
        ):
            raise UsageError(
                f"standard input is not a key of at least {MIN_KEY_CHARACTERS} printable ASCII "
                "characters without spaces; without --stdin a new key is made"
            )
    else:
        key = make_key()
        print(f"key   {key}")
    print(f"hash  {hash_key(key)}")
    return 0
