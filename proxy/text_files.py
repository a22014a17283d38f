"""The fleet file, and files that it names."""

from __future__ import annotations

from pathlib import Path

from proxy.errors import ProxyError


class UnreadableFileError(ProxyError):
    """Why, and the remedy."""


def read_text(file: Path) -> str:
    """Return a file's text; raise `UnreadableFileError`."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        why = f"is not UTF-8 text (byte {error.start}); save it as UTF-8"
        raise UnreadableFileError(why) from None
    except OSError as error:
        raise _unreadable(error) from None


def read_bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise _unreadable(error) from None


def _unreadable(error: OSError) -> UnreadableFileError:
    why = f"can't be read: {error.strerror}; check the path and its permissions"
    return UnreadableFileError(why)
