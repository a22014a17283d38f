"""The key that signs the journals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from proxy.config import JournalConfig, PartialConfig
from proxy.errors import ConfigError, Problem

MIN_KEY_BYTES: Final = 16
PATH: Final = "router.journal.key_file"


def key_of(journal: JournalConfig, source: str) -> bytes | None:
    """Read the configured key; None if none is configured, `ConfigError` if it can't be read."""
    found = _read(journal)
    if isinstance(found, Problem):
        raise ConfigError(source, [found])
    return found


def key_problems(draft: PartialConfig) -> Iterator[Problem]:
    """Yield what is wrong with the configured key."""
    if draft.router is not None:
        found = _read(draft.router.journal)
        if isinstance(found, Problem):
            yield found


def _read(journal: JournalConfig) -> bytes | Problem | None:
    if (file := journal.key_file) is None:
        return None
    try:
        key = file.read_bytes().strip()  # as the engine does
    except OSError as error:
        why = f"{str(file)!r}: cannot be read: {error.strerror}; check path and permissions"
        return Problem(PATH, why)
    if len(key) < MIN_KEY_BYTES:
        why = f"{str(file)!r}: has {len(key)} bytes; a key has {MIN_KEY_BYTES} or more; "
        return Problem(PATH, why + "`openssl rand -hex 32` makes one")
    return key
