"""Fixtures of `tests/proxy/wire`: a real router on real sockets."""

from tests.proxy.wire.conftest import Start, pytest_asyncio_loop_factories, site, start

__all__ = ["Start", "pytest_asyncio_loop_factories", "site", "start"]
