"""A real router on real sockets, as in `tests/proxy/wire`."""

from tests.proxy.wire.conftest import Start, pytest_asyncio_loop_factories, site, start

__all__ = ["Start", "pytest_asyncio_loop_factories", "site", "start"]
