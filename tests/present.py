"""A value that a test knows to be there."""

from __future__ import annotations

from typing import TypeVar

Value = TypeVar("Value")


def present(value: Value | None) -> Value:
    """Return a value that is not None, and fail where it is."""
    assert value is not None
    return value
