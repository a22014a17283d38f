"""Signal handling of a router, with one or several processes.

SIGHUP reads the fleet file again. SIGTERM and SIGINT drain; a second signal ends requests with
errors.
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
    """A service that can read the fleet file again."""

    async def reload(self) -> object: ...


class Service(Reloadable, Protocol):
    """A service that is started here and ended by signals."""

    @property
    def drain_s(self) -> float:
        """How long requests may take to finish during a drain, in seconds."""

    async def start(self) -> None:
        """Start serving; raise on failure."""

    async def drain(self) -> None:
        """Refuse new requests, let requests in flight finish, and stop."""

    async def stop(self) -> None: ...


async def serve_until_signal(service: Service, on_ready: Callable[[], None]) -> int:
    """Run a service until a signal ends it; return the exit status."""
    loop = asyncio.get_running_loop()
    received: list[signal.Signals] = []
    first, second = asyncio.Event(), asyncio.Event()

    def leave(number: signal.Signals) -> None:
        (second if received else first).set()
        received.append(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, partial(leave, number))
    reloads: set[asyncio.Task[None]] = set()  # the event loop has weak references only

    def hang_up() -> None:
        task = loop.create_task(reload(service))
        reloads.add(task)
        task.add_done_callback(reloads.discard)

    loop.add_signal_handler(signal.SIGHUP, hang_up)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})  # `vllm-sched router` blocks it
    leaving = asyncio.ensure_future(first.wait())
    if await _ends_before(asyncio.ensure_future(service.start()), leaving):
        on_ready()
        await leaving
        logger.info("draining for at most %g s", service.drain_s)
        interrupted = asyncio.ensure_future(second.wait())
        drained = await _ends_before(asyncio.ensure_future(service.drain()), interrupted)
        interrupted.cancel()
    else:
        drained = False
    if not drained:
        await service.stop()
    return INTERRUPTED if received[0] is signal.SIGINT else 0


async def _ends_before(work: asyncio.Future[None], end: asyncio.Future[Any]) -> bool:
    """Return True if `work` finishes before `end`; otherwise cancel `work`."""
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
    """Read the fleet file again and log errors."""
    try:
        await service.reload()
    except ProxyError as error:
        logger.error("the fleet file was not reloaded:\n%s", error)
    except Exception:
        logger.exception("the fleet file was not reloaded")
