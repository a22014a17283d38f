"""Fixtures of `tests/proxy/wire`: a real router on real sockets."""

from tests.proxy.wire.conftest import pytest_asyncio_loop_factories, start

__all__ = ["pytest_asyncio_loop_factories", "start"]
