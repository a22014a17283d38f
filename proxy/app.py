"""Entry points of the router: one process, or a supervisor of several."""

from __future__ import annotations

import logging
import resource
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import uvloop

from proxy.compiled import locate
from proxy.config import FleetConfig, load
from proxy.processes.signals import serve_until_signal
from proxy.processes.size import process_count
from proxy.processes.supervisor import Supervisor
from proxy.setup.app import App
from proxy.setup.memory import freeze_objects, keep_freed_memory
from proxy.setup.settings import router_settings, specs, wire_settings
from proxy.telemetry.logs import Logs

__all__ = [
    "App",
    "allow_connections",
    "load",
    "router_settings",
    "run",
    "serve",
    "specs",
    "supervise",
    "wire_settings",
]

logger = logging.getLogger(__name__)

MIN_OPEN_FILES = 8192


async def serve(
    config: FleetConfig,
    *,
    source: Path | None = None,
    read: Callable[[Path], FleetConfig] = load,
    on_ready: Callable[[App], None] | None = None,
) -> int:
    """Run a router process until a signal stops it; return the exit status."""
    allow_connections()
    keep_freed_memory()
    app = App(config, source, read=read)
    app.logs.take_over()

    def ready() -> None:
        freeze_objects()
        app.objects_frozen = True
        if on_ready is not None:
            on_ready(app)

    return await serve_until_signal(app, ready)


async def supervise(
    config: FleetConfig,
    *,
    source: Path | None = None,
    read: Callable[[Path], FleetConfig] = load,
    on_ready: Callable[[Supervisor], None] | None = None,
) -> int:
    """Run several router processes until a signal stops them; return the exit status."""
    allow_connections()  # child processes inherit the limit
    supervisor = Supervisor(config, source, read=read)
    return await serve_until_signal(supervisor, partial(on_ready or _nothing, supervisor))


def _nothing(_: Supervisor) -> None:
    pass


def allow_connections() -> None:
    """Raise the limit on open files to its maximum: a stream needs two."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard != resource.RLIM_INFINITY and hard < MIN_OPEN_FILES:
        logger.warning(
            "this process may open %d files, enough for about %d concurrent requests; "
            "raise the hard limit (ulimit -Hn)",
            hard,
            hard // 2,
        )


def run(source: Path, *, config: FleetConfig, read: Callable[[Path], FleetConfig] = load) -> int:
    """Run a router and print its URLs when it is ready; `read` loads the file at a reload."""
    logs = Logs(config)
    logs.take_over()

    def announce(router: App | Supervisor) -> None:
        message = (
            f"router {router.url}/v1, admin {router.admin_url} (in a browser: the status page)"
        )
        message += f"; its modules are {locate.kind()}"
        if config.router.logs.format == "json":
            logger.warning(message)
        else:
            print(message, file=sys.stderr, flush=True)  # noqa: T201

    try:
        if process_count(config) == 1 and config.router.shared is None:
            return uvloop.run(serve(config, source=source, read=read, on_ready=announce))
        return uvloop.run(supervise(config, source=source, read=read, on_ready=announce))
    finally:
        logs.close()
