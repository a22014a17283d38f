"""Builds a router from a fleet file, and starts, reloads, drains and stops it.

A single process listens and leads. With several processes (`proxy/processes`) all listen and one
leads: only the leader probes, discovers, warms up and serves the admin port.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Protocol

from proxy.admin.key import AdminKey
from proxy.admin.port import AdminPort, admin_socket
from proxy.config import BatchesConfig, FleetConfig, TlsConfig, WorkerConfig, load
from proxy.core.fleet.charges import Fleet
from proxy.core.model.specs import WorkerSpec
from proxy.core.router import Router
from proxy.discovery.discovery import Discovery
from proxy.errors import ConfigError, Problem, ProxyError, short_list
from proxy.health.balance import Balance
from proxy.health.breaker_log import BreakerLog
from proxy.health.probe import Prober
from proxy.journal.journals import Journals
from proxy.metrics.handovers import FallbackLog
from proxy.metrics.recent import RecentRequest, RequestFilter
from proxy.metrics.registry import Metrics
from proxy.net.tls import ServedContext, check_tls, to_worker
from proxy.setup.memory import return_freed_memory
from proxy.setup.restart_only import as_started, restart_only_changes
from proxy.setup.secrets import SecretKeys
from proxy.setup.settings import router_settings, specs, wire_settings, worker_spec
from proxy.setup.tenancy import apply_tenants, refuse_anonymous_access
from proxy.status_page.live import LiveView
from proxy.status_page.snapshot import LiveState
from proxy.telemetry.logs import Logs
from proxy.telemetry.tracing import Tracing
from proxy.transfer.registry import connector
from proxy.transfer.types import Connector
from proxy.wire.bind import retry_until_free
from proxy.wire.exchange.moves import MovedRequests
from proxy.wire.server import WireServer

if TYPE_CHECKING:
    from proxy.admin.server import AdminServer
    from proxy.batches.service import Batches
    from proxy.health.warmup import Warmup

logger = logging.getLogger(__name__)

WATCH_INTERVAL_S = 0.25


class SiblingProcesses(Protocol):
    """The other processes that serve the same fleet on the same port."""

    def reloaded(self, config: FleetConfig, keys: SecretKeys) -> None:
        """Send a reloaded file and its keys to the siblings."""

    async def decisions(self, limit: int, wanted: RequestFilter) -> list[RecentRequest]:
        """Return the last requests of all processes, newest first."""

    def report_drain(self, name: str, *, draining: bool, at_once: bool) -> None:
        """Drain or undrain a worker in all processes, on other hosts too."""

    async def move_requests(self, name: str) -> MovedRequests:
        """Move a drained worker's requests in all processes."""


class App:
    def __init__(
        self,
        config: FleetConfig,
        source: Path | None = None,
        *,
        read: Callable[[Path], FleetConfig] = load,
        started_with: FleetConfig | None = None,  # set if the file was reloaded since the start
        keys: SecretKeys | None = None,  # set if they are already read
    ) -> None:
        self.config = config
        self.source = source
        self._read = read  # reads the file with the same overrides as the first time
        self.started_with = started_with or config
        in_effect = as_started(config, self.started_with)
        probe = in_effect.router.probe
        self.fleet = Fleet(down_after=probe.down_after, up_after=probe.up_after, clock=monotonic)
        for spec in specs(in_effect):
            self.fleet.roster.add(spec)
        self.router = Router(router_settings(in_effect), self.fleet)
        keys = self._keys = keys or SecretKeys.read(in_effect, str(source))
        apply_tenants(self.router.tenants, in_effect, keys.tenants)
        self.metrics = Metrics(self.router)
        kv_connector = connector(in_effect.transfer) if in_effect.transfer is not None else None
        self.wire = WireServer(
            self.router, wire_settings(in_effect), self.metrics, connector=kv_connector
        )
        self.prober = Prober(self.router, probe)
        self.balance = Balance(self.router)
        warms_up = in_effect.transfer is not None and in_effect.transfer.warmup
        self.warmup = self._make_warmup(kv_connector) if kv_connector and warms_up else None
        self.discovery = Discovery(self.fleet.roster, in_effect, keys.pools, worker_spec)
        self.journals = Journals(self.fleet.roster, keys.journal)
        self._live_state = LiveState(self.metrics, lambda: self.wire.draining)
        self.live = LiveView(self.metrics, self._live_state, self.wire.clock)
        self.logs = Logs(in_effect, self.metrics, keys=keys.plain)
        self.tracing = Tracing(in_effect.router.tracing) if in_effect.router.tracing else None
        self._connect_metrics()
        self.batches = self._make_batches(in_effect.router.batches)
        self.siblings: SiblingProcesses | None = None  # set in a router of several processes
        self.is_leader = False
        self.objects_frozen = False  # true once garbage collection skips what the start made
        self.admin_key = AdminKey()
        self.admin_key.set(keys.admin)
        check_tls(in_effect, str(source))
        own, admin = in_effect.router.tls, in_effect.router.admin.tls
        self._tls = ServedContext(own) if own else None
        self.admin_tls = ServedContext(admin) if admin else None
        self.wire.tls = self._tls.context if self._tls else None
        self._admin: AdminPort | None = None
        self._admin_task: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._reloading = asyncio.Lock()  # keeps an older file from replacing a newer one

    def _make_warmup(self, kv_connector: Connector) -> Warmup:
        # Imports an HTTP client library that takes 10 MB.
        from proxy.health.warmup import Warmup

        return Warmup(self.router, kv_connector, self.metrics.handovers)

    def _connect_metrics(self) -> None:
        self.metrics.discovered = self.discovery.counts
        self.metrics.journals = self.journals.counts
        self.metrics.log_lines_dropped = lambda: self.logs.writer.dropped
        if self.tracing is not None:
            self.metrics.begin_trace = self.tracing.begin
            self.metrics.at_end += (self.tracing.export_request,)

    def _make_batches(self, config: BatchesConfig) -> Batches | None:
        """Create the batch service; import its database only if batches are on."""
        if not config.are_on:
            return None
        from proxy.batches.service import Batches

        return Batches(self.wire, config)

    async def start(self) -> None:
        try:
            router = self.config.router
            admin = partial(admin_socket, router.admin.host, router.admin.port)
            self.open_admin(await retry_until_free(admin, router.drain_notice_s))
            await self.listen()
        except OSError as error:
            await self.stop()
            raise ProxyError(
                f"the router cannot listen: {error}; choose another host or port under `router`"
            ) from None
        except ProxyError:
            await self.stop()
            raise
        self.lead()

    async def listen(self, sockets: Sequence[socket.socket] = ()) -> None:
        """Listen for clients, on the given sockets if any."""
        snapshots = self._live_state.run(self.wire.clock)
        memory = return_freed_memory(lambda: self.wire.large_bodies.added)
        self._tasks += [
            asyncio.create_task(snapshots, name="the last minute"),
            asyncio.create_task(self.journals.run(), name="journals"),
            asyncio.create_task(memory, name="freed memory"),
        ]
        if self.started_with.transfer is not None:  # each process counts its own requests
            fallbacks = FallbackLog(self.router).log_new
            self._tasks.append(asyncio.create_task(self._repeat(fallbacks), name="fallbacks"))
        if self.batches is not None:
            await self.batches.start()
        router = self.config.router
        for sock in sockets:
            await self.wire.start(router.host, router.port, sock=sock)
        if not sockets:
            alone = partial(self.wire.start, router.host, router.port)
            await retry_until_free(alone, router.drain_notice_s)

    def open_admin(self, sock: socket.socket) -> None:
        """Take the admin port's socket; the port is served once this process leads."""
        self._admin = AdminPort(sock, partial(_make_admin_server, self))

    def lead(self) -> None:
        self.is_leader = True
        self.fleet.roster.ejections.listener = BreakerLog()
        self._tasks += [
            asyncio.create_task(self.prober.run(), name="probes"),
            asyncio.create_task(self.discovery.run(), name="discovery"),
        ]
        if self.warmup is not None:
            self._tasks.append(asyncio.create_task(self.warmup.run(), name="warm-up"))
        if self.started_with.transfer is not None:
            balance = self.balance.sample
            self._tasks.append(asyncio.create_task(self._repeat(balance), name="balance"))
        if self._admin is not None:
            self._admin_task = asyncio.create_task(self._admin.run(), name="admin")

    async def _repeat(self, work: Callable[[float], None]) -> None:
        while True:
            work(self.wire.clock())
            await asyncio.sleep(WATCH_INTERVAL_S)

    @property
    def url(self) -> str:
        return url_of(self.config.router.host, self.wire.port, self.started_with.router.tls)

    @property
    def admin_url(self) -> str:
        admin = self.config.router.admin
        port = self._admin.port if self._admin else admin.port
        return url_of(admin.host, port, self.started_with.router.admin.tls)

    async def decisions(self, limit: int, wanted: RequestFilter) -> list[RecentRequest]:
        if self.siblings is not None:
            return await self.siblings.decisions(limit, wanted)
        return list(self.metrics.recent.newest(limit, wanted))

    def report_drain(self, name: str, *, draining: bool, at_once: bool) -> None:
        if self.siblings is not None:
            self.siblings.report_drain(name, draining=draining, at_once=at_once)

    async def move_requests(self, name: str) -> MovedRequests:
        if self.siblings is not None:
            return await self.siblings.move_requests(name)
        return await self.wire.moves.move_all(name)

    def add_worker(self, worker: WorkerConfig) -> None:
        """Add a worker until the next reload."""
        spec = worker_spec(worker, self.config)
        to_worker(spec.tls)  # an unusable TLS file is an error of this call
        self.hide_keys([spec])
        self.fleet.roster.add(spec)

    def hide_keys(self, workers: Iterable[WorkerSpec]) -> None:
        """Hide workers' keys that are not in the fleet file from the log."""
        self.logs.hide_keys(spec.api_key for spec in workers if spec.api_key is not None)

    def remove_worker(self, name: str) -> None:
        if pool := self.discovery.pool_of(name):
            raise ProxyError(
                f"worker {name!r} was found by discovery (pool {pool}), which would add it again; "
                "drain it, or remove its pod or its DNS entry"
            )
        self.fleet.roster.remove(name)

    async def reload(self) -> list[str]:
        """Read the fleet file again and return the settings that need a restart.

        An invalid file changes nothing. A thread reads it: a thousand workers take half a
        second, which would stall streams.
        """
        if self.source is None:
            raise ProxyError("the router was not started from a file; there is nothing to reload")
        async with self._reloading:
            before = {worker.name for worker in self.fleet.roster}
            changed = self.apply_config(await asyncio.to_thread(self._reread_config, self.source))
            if self.siblings is not None:
                self.siblings.reloaded(self.config, self._keys)
            after = {worker.name for worker in self.fleet.roster}
        logger.info("reloaded %s: %s", self.source, _workers_now(before, after))
        if changed:
            logger.warning("%s: the change needs a restart", ", ".join(changed))
        return changed

    def apply_config(self, config: FleetConfig, keys: SecretKeys | None = None) -> list[str]:
        """Apply a fleet file and return the settings that need a restart.

        `keys` are the file's keys if they are already read.
        """
        changed = restart_only_changes(config, self.started_with)
        follows = self.siblings is not None and not self.is_leader
        try:
            check_tls(config, str(self.source))
        except ConfigError as error:
            # The leader has read these files. A process that finds one half-written applies the
            # rest, so that its keys and limits match its siblings'.
            if not follows:
                raise
            logger.error("TLS files keep their previous content:\n%s", error)
        in_effect = as_started(config, self.started_with)
        keys = keys or SecretKeys.read(in_effect, str(self.source))
        refuse_anonymous_access(in_effect, in_effect.router.host, str(self.source))
        reconfigured = self.discovery.reconfigure(in_effect, keys.pools)
        # From here on nothing can fail.
        self.config, self._keys = config, keys
        probe = self.prober.settings = in_effect.router.probe
        self.fleet.health.down_after, self.fleet.health.up_after = probe.down_after, probe.up_after
        # Followers get their workers from the leader.
        own = [worker.spec for worker in self.fleet.roster]
        workers = own if follows else [*reconfigured, *specs(in_effect)]
        self.router.reconfigure(router_settings(in_effect), workers)
        apply_tenants(self.router.tenants, in_effect, keys.tenants)
        self.admin_key.set(keys.admin)
        self.journals.set_key(keys.journal)
        router = in_effect.router
        for served, tls in (self._tls, router.tls), (self.admin_tls, router.admin.tls):
            if served is not None and tls is not None:
                served.renew(tls)
        if self.is_leader:
            self.discovery.reloaded()
        self.wire.reconfigure(wire_settings(in_effect))
        self.logs.reconfigure(in_effect, keys.plain)
        if self.batches is not None:
            self.batches.reconfigure(router.batches)
        return changed

    def _reread_config(self, source: Path) -> FleetConfig:
        """Read the file; workers keep the addresses that `up` chose for them."""
        config = self._read(source)
        by_name = {worker.name: worker for worker in self.config.workers}
        workers: list[WorkerConfig] = []
        problems: list[Problem] = []
        for index, worker in enumerate(config.workers):
            before = by_name.get(worker.name, worker)
            chosen = {key: getattr(before, key) for key in worker.keys_to_choose}
            workers.append(worker.model_copy(update=chosen))
            why = "missing, and a reload starts no worker; set it, or restart"
            keys = workers[-1].keys_to_choose
            problems += [Problem(f"workers[{index}].{key}", why, worker.name) for key in keys]
        if problems:
            raise ConfigError(str(source), problems)
        return config.model_copy(update={"workers": tuple(workers)})

    @property
    def drain_s(self) -> float:
        return self.config.router.drain_s

    def close_admin(self) -> None:
        """Close the admin port, because another router may be waiting for it."""
        if self._admin is not None:
            self._admin.stop()

    async def drain(self) -> None:
        await self.wire.drain(self.drain_s)
        await self.stop()

    async def stop(self) -> None:
        self.live.close()
        if self.batches is not None:
            await self.batches.stop()
        await self.wire.close()
        for task in self._tasks:
            task.cancel()
        self.close_admin()
        ended = self._tasks if self._admin_task is None else [*self._tasks, self._admin_task]
        await asyncio.gather(*ended, return_exceptions=True)
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)
        self.logs.close()


def _workers_now(before: set[str], after: set[str]) -> str:
    text = f"{len(after)} workers"
    for change, names in (("added", after - before), ("removed", before - after)):
        if names:
            text += f"; {change}: {short_list(sorted(names))}"
    return text


def url_of(host: str, port: int, tls: TlsConfig | None = None) -> str:
    scheme = "http" if tls is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _make_admin_server(app: App, sock: socket.socket) -> AdminServer:
    """Return the admin server; the first connection pays for the imports."""
    from proxy.admin.api import admin_app
    from proxy.admin.server import AdminServer

    tls = app.admin_tls.context if app.admin_tls else None
    api = admin_app(app, app.started_with.router.admin.host, key=app.admin_key)
    server = AdminServer(api, sock, tls=tls)
    if app.objects_frozen:
        gc.freeze()
    return server
