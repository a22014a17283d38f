"""The password of the Redis server that replicas share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from proxy.errors import ConfigError, Problem

if TYPE_CHECKING:
    from proxy.config import PartialConfig
    from proxy.config.shared import SharedConfig

PATH = "router.shared.password_file"


def password_of(shared: SharedConfig | None, source: str) -> str | None:
    """Read the configured password; None if none is configured, `ConfigError` on failure."""
    found = _read(shared)
    if isinstance(found, Problem):
        raise ConfigError(source, [found])
    return found


def password_problems(draft: PartialConfig) -> Iterator[Problem]:
    """Yield what is wrong with the configured password."""
    if draft.router is not None:
        found = _read(draft.router.shared)
        if isinstance(found, Problem):
            yield found


def _read(shared: SharedConfig | None) -> str | Problem | None:
    if shared is None or (file := shared.password_file) is None:
        return None
    try:
        password = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        why = f"{str(file)!r}: cannot be read: {error}; check path and permissions"
        return Problem(PATH, why)
    return password or Problem(PATH, f"{str(file)!r}: is empty; write the password into it")
