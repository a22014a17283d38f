"""The event loops of these tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import uvloop

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


def pytest_asyncio_loop_factories(
    item: pytest.Item,
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Return the event loops in the module's `EVENT_LOOPS`; pytest reads no hook from a module."""
    module = item.getparent(pytest.Module)
    names = getattr(module and module.obj, "EVENT_LOOPS", ("asyncio",))
    return {name: LOOPS[name] for name in names}
