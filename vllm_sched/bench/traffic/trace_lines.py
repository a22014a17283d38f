"""Read a trace: a JSON object per line, with errors that name the line."""

from __future__ import annotations

import json
import stat
from sys import float_info
from typing import TYPE_CHECKING, Any, Final, TypeVar

from vllm_sched.bench.traffic.types import MAX_TOKENS
from vllm_sched.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from vllm_sched.bench.traffic.types import Piece

BLOCK_TOKENS: Final = 512
TOKENS_TEXT: Final = f"a number of tokens, 1 to {MAX_TOKENS:,}"
MOMENT_TEXT: Final = "milliseconds, 0 or more"
T = TypeVar("T")


class BadLineError(Exception):
    """A line of a trace is invalid."""


def read_lines(path: Path, parse: Callable[[dict[str, Any], int], T]) -> Iterator[T]:
    """Yield what `parse` makes of each line's object and number."""
    number = 0
    try:
        with path.open(encoding="utf-8-sig") as lines:
            for line in lines:
                number += 1
                if line.strip():
                    yield parse(_entry(line), number)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path}, line {number + 1}: is not UTF-8 text") from None
    except BadLineError as error:
        raise UsageError(f"{path}, line {number}: {error}") from None


def _entry(line: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        raise BadLineError(f"is not JSON: {line.strip()[:60]!r}") from None
    if not isinstance(entry, dict):
        raise BadLineError(f"is not a JSON object: {line.strip()[:60]!r}")
    return entry


def is_pipe(path: Path) -> bool:
    try:
        return not stat.S_ISREG(path.stat().st_mode)
    except OSError:  # reading reports the error
        return False


def field(entry: dict[str, Any], key: str, valid: Callable[[Any], bool], takes: str) -> Any:
    if key not in entry:
        raise BadLineError(f"{key} is missing; it must be {takes}")
    value = entry[key]
    if not valid(value):
        raise BadLineError(f"{key} is {value!r:.60}; it must be {takes}")
    return value


def read_text(entry: dict[str, Any], key: str) -> str:
    value = entry.get(key)
    if value is None:
        return ""
    if not (isinstance(value, str) and value.isprintable()):
        raise BadLineError(f"{key} is {value!r:.60}; it must be a line of text")
    return value


def read_tokens(entry: dict[str, Any], key: str) -> int:
    return int(field(entry, key, lambda n: type(n) is int and 1 <= n <= MAX_TOKENS, TOKENS_TEXT))


def read_milliseconds(entry: dict[str, Any], key: str, most: float = float_info.max) -> float:
    """Return the seconds of a field in milliseconds."""
    takes = MOMENT_TEXT if most == float_info.max else f"milliseconds, 0 to {most:,}"
    value = field(entry, key, lambda n: type(n) in (int, float) and 0 <= n <= most, takes)
    return float(value / 1000)


def pieces_of(names: Any, prompt: int, block_tokens: int) -> tuple[Piece, ...]:
    """Return the pieces of a prompt's `hash_ids`."""
    if names is None:
        return ()
    if not isinstance(names, list) or not all(type(name) in (int, str) for name in names):
        raise BadLineError(f"hash_ids is {names!r:.60}; it must be numbers or strings")
    most = -(-prompt // block_tokens)
    if len(names) > most:
        raise BadLineError(
            f"hash_ids has {len(names)} names, but input_length {prompt} has {most} blocks of "
            f"{block_tokens} tokens; set the block length with --block-tokens"
        )
    return tuple(
        (name, min(block_tokens, prompt - i * block_tokens)) for i, name in enumerate(names)
    )
