"""A real router on real sockets, as for the tests of the wire."""

from tests.proxy.wire.conftest import pytest_asyncio_loop_factories, start

__all__ = ["pytest_asyncio_loop_factories", "start"]
