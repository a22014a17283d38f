"""The router as a process: how it starts, and what signals do to it.

SIGHUP reads the fleet file again. SIGTERM and SIGINT drain; a second one stops at once.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import uvloop

from proxy.assembly import App, router_settings, specs, wire_settings
from proxy.config import FleetConfig, load
from proxy.errors import ProxyError

__all__ = [
    "App",
    "allow_connections",
    "load",
    "router_settings",
    "run",
    "serve",
    "specs",
    "wire_settings",
]

logger = logging.getLogger(__name__)

INTERRUPTED = 130
ENOUGH_FILES = 8192


async def serve(
    config: FleetConfig,
    *,
    source: Path | None = None,
    on_ready: Callable[[App], None] | None = None,
) -> int:
    """Run a router until a signal ends it; return the exit status."""
    allow_connections()
    app = App(config, source)
    loop = asyncio.get_running_loop()
    asked: list[signal.Signals] = []
    first, second = asyncio.Event(), asyncio.Event()

    def leave(number: signal.Signals) -> None:
        (second if asked else first).set()
        asked.append(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, partial(leave, number))
    loop.add_signal_handler(signal.SIGHUP, partial(_reload, app))
    await app.start()
    # What is here now stays: the collector need not look at it again and again.
    gc.collect()
    gc.freeze()
    if on_ready is not None:
        on_ready(app)
    await first.wait()
    logger.info("draining for at most %g s", app.config.router.drain_s)
    draining = asyncio.ensure_future(app.drain())
    hurried = asyncio.ensure_future(second.wait())
    await asyncio.wait((draining, hurried), return_when=asyncio.FIRST_COMPLETED)
    hurried.cancel()
    if draining.done():
        await draining
    else:
        draining.cancel()
        await asyncio.gather(draining, return_exceptions=True)
        await app.stop()
    return INTERRUPTED if asked[0] is signal.SIGINT else 0


def allow_connections() -> None:
    """Raise the limit on open files: a stream takes two, and shells offer 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard != resource.RLIM_INFINITY and hard < ENOUGH_FILES:
        logger.warning(
            "this process may open %d files, which is room for about %d requests at a time; "
            "raise the hard limit (ulimit -Hn)",
            hard,
            hard // 2,
        )


def _reload(app: App) -> None:
    try:
        app.reload()
    except ProxyError as error:
        logger.error("the fleet file was not taken:\n%s", error)


def run(source: Path, *, config: FleetConfig) -> int:
    """Run a router in a loop of its own, and say where it is."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")

    def tell(app: App) -> None:
        print(f"router {app.url}/v1, admin {app.admin_url}", file=sys.stderr, flush=True)  # noqa: T201

    return uvloop.run(serve(config, source=source, on_ready=tell))
