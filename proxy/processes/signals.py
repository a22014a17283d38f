"""What signals do to a router, be it one process or many.

SIGHUP reads the fleet file again. SIGTERM and SIGINT drain; a second one stops at once.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from proxy.errors import ProxyError

logger = logging.getLogger(__name__)

INTERRUPTED = 130


class Reloadable(Protocol):
    """Whoever takes a fleet file."""

    async def reload(self) -> object:
        """Read it again."""


class Service(Reloadable, Protocol):
    """What is started, and ended by signals."""

    @property
    def drain_s(self) -> float:
        """How long requests have to finish."""

    async def start(self) -> None:
        """Serve; raise where that can't be."""

    async def drain(self) -> None:
        """Take nothing new, let requests in flight finish, and stop."""

    async def stop(self) -> None:
        """Stop now."""


async def serve_until_told(service: Service, on_ready: Callable[[], None]) -> int:
    """Start a service and end it as signals say; return the exit status."""
    loop = asyncio.get_running_loop()
    asked: list[signal.Signals] = []
    first, second = asyncio.Event(), asyncio.Event()

    def leave(number: signal.Signals) -> None:
        (second if asked else first).set()
        asked.append(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, partial(leave, number))
    reloads: set[asyncio.Task[None]] = set()  # or nobody would keep them

    def hang_up() -> None:
        task = loop.create_task(reload(service))
        reloads.add(task)
        task.add_done_callback(reloads.discard)

    loop.add_signal_handler(signal.SIGHUP, hang_up)
    leaving = asyncio.ensure_future(first.wait())
    if await _before(asyncio.ensure_future(service.start()), leaving):
        on_ready()
        await leaving
        logger.info("draining for at most %g s", service.drain_s)
        hurried = asyncio.ensure_future(second.wait())
        drained = await _before(asyncio.ensure_future(service.drain()), hurried)
        hurried.cancel()
    else:
        drained = False
    if not drained:
        await service.stop()
    return INTERRUPTED if asked[0] is signal.SIGINT else 0


async def _before(work: asyncio.Future[None], end: asyncio.Future[Any]) -> bool:
    """Whether work is done before its end is called for; if not, it is given up."""
    try:
        await asyncio.wait((work, end), return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            await work
            return True
    finally:
        if not work.done():
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
    return False


async def reload(service: Reloadable) -> None:
    """Have the fleet file read again; whatever is wrong with it is logged."""
    try:
        await service.reload()
    except ProxyError as error:
        logger.error("the fleet file was not taken:\n%s", error)
    except Exception:
        logger.exception("the fleet file was not taken")
