"""Ports that an earlier router may still have."""

from __future__ import annotations

import asyncio
import errno

import pytest

from proxy.wire import bind
from proxy.wire.bind import retry_until_free


class Port:
    """A port that is taken until it is released."""

    def __init__(self, error: int = errno.EADDRINUSE) -> None:
        self.error = error
        self.taken = True
        self.tries = 0

    async def take(self) -> str:
        self.tries += 1
        if self.taken:
            raise OSError(self.error, "no")
        return "port"

    def release(self) -> None:
        self.taken = False


async def test_port_is_taken_once_it_is_free(caplog: pytest.LogCaptureFixture) -> None:
    port = Port()
    asyncio.get_running_loop().call_later(1.5 * bind.RETRY_INTERVAL_S, port.release)
    assert await retry_until_free(port.take, 0.0) == "port"
    assert len(caplog.messages) == 1, "one warning for all tries"


@pytest.mark.parametrize(
    ("error", "notice_s", "again"),
    [(errno.EADDRINUSE, 0.0, False), (errno.EADDRINUSE, 60.0, True), (errno.EACCES, 60.0, False)],
    ids=["too long", "while a router drains", "not permitted"],
)
async def test_another_try_follows_only_while_the_port_may_become_free(
    monkeypatch: pytest.MonkeyPatch, error: int, notice_s: float, again: bool
) -> None:
    monkeypatch.setattr(bind, "MAX_WAIT_S", 0.0)
    port = Port(error)
    trying = asyncio.ensure_future(retry_until_free(port.take, notice_s))
    await asyncio.sleep(1.5 * bind.RETRY_INTERVAL_S)
    assert (port.tries > 1) is again
    if again:
        trying.cancel()
        return
    with pytest.raises(OSError, match="no"):
        await asyncio.wait_for(trying, 5.0)
