"""Event loops of these tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import uvloop

FACTORIES = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


def pytest_asyncio_loop_factories(
    item: pytest.Item,
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Return the loops that the module names. pytest would not call a hook of a module."""
    module = item.getparent(pytest.Module)
    names = getattr(module and module.obj, "EVENT_LOOPS", ("asyncio",))
    return {name: FACTORIES[name] for name in names}
