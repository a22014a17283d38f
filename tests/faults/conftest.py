"""The event loop of the router."""

from tests.proxy.wire.conftest import pytest_asyncio_loop_factories

__all__ = ["pytest_asyncio_loop_factories"]
