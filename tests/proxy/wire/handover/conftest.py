"""The fixtures of hand-overs."""

from __future__ import annotations

import pytest

from tests.proxy.wire.conftest import Start
from tests.proxy.wire.pairs import Pairs, pairs


@pytest.fixture
async def here(start: Start) -> Pairs:
    """Start a router, a prefill worker and a decode worker."""
    return await pairs(start, prefills=1, decodes=1)
