"""What a router is made of, from one fleet file: listens, leads, reloads, drains and stops.

Where one process serves, it listens and leads. Where several do (`proxy/processes`), all of them
listen and one of them leads: it alone probes, discovers, warms up and has the admin port.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import inf
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

from proxy.admin.api import admin_app
from proxy.admin.key import AdminKey
from proxy.admin.server import AdminServer, admin_socket
from proxy.config import BatchesConfig, FleetConfig, TlsConfig, WorkerConfig, load
from proxy.config.admin import is_loopback
from proxy.core.fleet.charges import Fleet
from proxy.core.model.role import Role
from proxy.core.model.specs import WorkerSpec
from proxy.core.model.types import Reason
from proxy.core.router import Router, RouterSettings
from proxy.discovery.discovery import Discovery
from proxy.errors import ConfigError, Problem, ProxyError
from proxy.health.balance import Balance
from proxy.health.breaker_log import BreakerLog
from proxy.health.probe import Prober
from proxy.metrics.handovers import FallbackLog
from proxy.metrics.recent import RecentRequest, RecentRequests
from proxy.metrics.registry import Metrics
from proxy.net.tls import ServedContext, check_tls, to_worker
from proxy.setup.restart_only import as_started, takes_a_restart
from proxy.setup.secrets import SecretKeys
from proxy.setup.tenancy import (
    admission_settings,
    fairness_settings,
    keep_strangers_out,
    take_tenants,
)
from proxy.status_page.live import LiveView
from proxy.status_page.snapshot import LiveState
from proxy.telemetry.logs import Logs
from proxy.telemetry.tracing import Tracing
from proxy.transfer.registry import connector
from proxy.wire.bind import retry_until_free
from proxy.wire.server import WireServer
from proxy.wire.settings import WireSettings

if TYPE_CHECKING:
    from proxy.batches.service import Batches
    from proxy.health.warmup import Warmup

logger = logging.getLogger(__name__)

LOOK_S = 0.25


class SiblingProcesses(Protocol):
    """Other processes that serve the same fleet on the same port."""

    def reloaded(self, config: FleetConfig, keys: SecretKeys) -> None:
        """Have them take what was read."""

    async def decisions(self, limit: int, wanted: Mapping[str, Any]) -> list[RecentRequest]:
        """Return the last requests of all, newest first."""


class App:
    """A router and its surroundings, from one fleet file."""

    def __init__(
        self,
        config: FleetConfig,
        source: Path | None = None,
        *,
        read: Callable[[Path], FleetConfig] = load,
        started_with: FleetConfig | None = None,  # where the file was read again since
        keys: SecretKeys | None = None,  # where they were read already
    ) -> None:
        self.config = config
        self.source = source
        self._read = read  # the file again, as it was read the first time
        self._started_with = started_with or config
        config = as_started(config, self._started_with)
        probe = config.router.probe
        self.fleet = Fleet(down_after=probe.down_after, up_after=probe.up_after, clock=monotonic)
        for spec in specs(config):
            self.fleet.add(spec)
        self.router = Router(router_settings(config), self.fleet)
        keys = self._keys = keys or SecretKeys.read(config, str(source))
        take_tenants(self.router.tenants, config, keys.tenants)
        self.metrics = Metrics(self.router)
        moves = connector(config.transfer) if config.transfer is not None else None
        self.wire = WireServer(self.router, wire_settings(config), self.metrics, connector=moves)
        self.prober = Prober(self.router, probe)
        self.balance = Balance(self.router)
        self.warmup: Warmup | None = None
        if moves is not None and config.transfer is not None and config.transfer.warmup:
            from proxy.health.warmup import Warmup  # it reads in a client library of 10 MB

            self.warmup = Warmup(self.router, moves, self.metrics.handovers)
        self.discovery = Discovery(self.fleet, config, keys.pools, _spec)
        self.metrics.discovered = self.discovery.counts
        self._minute = LiveState(self.metrics, lambda: self.wire.draining)
        self.live = LiveView(self.metrics, self._minute, self.wire.clock)
        self.logs = Logs(config, self.metrics, keys=keys.plain)
        self.metrics.log_lines_dropped = lambda: self.logs.writer.dropped
        self.tracing = Tracing(config.router.tracing) if config.router.tracing else None
        if self.tracing is not None:
            self.metrics.begin_trace = self.tracing.begin
            self.metrics.at_end += (self.tracing.ended,)
        self.batches = self._batches(config.router.batches)
        self.siblings: SiblingProcesses | None = None  # other processes that serve the same
        self.leads = False
        self._admin_key = AdminKey()
        self._admin_key.take(keys.admin)
        check_tls(config, str(source))
        own, admin = config.router.tls, config.router.admin.tls
        self._tls = ServedContext(own) if own else None
        self._admin_tls = ServedContext(admin) if admin else None
        self.wire.tls = self._tls.context if self._tls else None
        self._admin: AdminServer | None = None
        self._admin_task: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._reloading = asyncio.Lock()  # or an older file might be taken after a newer one

    def _batches(self, config: BatchesConfig) -> Batches | None:
        """Make what keeps batches; SQLite and all of that, where it is off, is not even read in."""
        if config.path is None:
            return None
        from proxy.batches.service import Batches

        return Batches(self.wire, config, config.path)

    async def start(self) -> None:
        """Listen on both ports and begin to probe."""
        try:
            router = self.config.router
            admin = partial(admin_socket, router.admin.host, router.admin.port)
            self.open_admin(await retry_until_free(admin, router.drain_notice_s))
            await self.listen()
        except OSError as error:
            await self.stop()
            raise ProxyError(
                f"the router can't listen: {error}; choose another host or port under `router`"
            ) from None
        except ProxyError:
            await self.stop()
            raise
        self.lead()

    async def listen(self, sockets: Sequence[socket.socket] = ()) -> None:
        """Listen for clients, on sockets of the caller's if there are any."""
        remembering = self._minute.run(self.wire.clock)
        self._tasks.append(asyncio.create_task(remembering, name="the last minute"))
        if self._started_with.transfer is not None:  # each process has served its own
            self._tasks.append(asyncio.create_task(self._tell_aggregated(), name="served whole"))
        if self.batches is not None:
            await self.batches.start()
        router = self.config.router
        for sock in sockets:
            await self.wire.start(router.host, router.port, sock=sock)
        if not sockets:
            alone = partial(self.wire.start, router.host, router.port)
            await retry_until_free(alone, router.drain_notice_s)

    def open_admin(self, sock: socket.socket) -> None:
        """Have the admin port, which others may listen on too; it is served once this leads."""
        app = admin_app(self, key=self._admin_key)
        tls = self._admin_tls.context if self._admin_tls else None
        self._admin = AdminServer(app, sock, tls=tls)

    def lead(self) -> None:
        """Begin what one process alone does."""
        self.leads = True
        self.fleet.witness = BreakerLog()
        self._tasks += [
            asyncio.create_task(self.prober.run(), name="probes"),
            asyncio.create_task(self.discovery.run(), name="discovery"),
        ]
        if self.warmup is not None:
            self._tasks.append(asyncio.create_task(self.warmup.run(), name="warm-up"))
        if self._started_with.transfer is not None:
            self._tasks.append(asyncio.create_task(self._watch_sides(), name="sides"))
        if self._admin is not None:
            self._admin_task = asyncio.create_task(self._admin.run(), name="admin")

    async def _watch_sides(self) -> None:
        while True:
            self.balance.look(self.wire.clock())
            await asyncio.sleep(LOOK_S)

    async def _tell_aggregated(self) -> None:
        aggregated = FallbackLog(self.router)
        while True:
            aggregated.look(self.wire.clock())
            await asyncio.sleep(LOOK_S)

    @property
    def url(self) -> str:
        """Where clients find it."""
        return url_of(self.config.router.host, self.wire.port, self._started_with.router.tls)

    @property
    def admin_url(self) -> str:
        """Where operators find it."""
        admin = self.config.router.admin
        port = self._admin.port if self._admin else admin.port
        return url_of(admin.host, port, self._started_with.router.admin.tls)

    @property
    def recent(self) -> RecentRequests:
        """The last requests."""
        return self.metrics.recent

    async def decisions(
        self,
        limit: int,
        *,
        model: str | None = None,
        worker: str | None = None,
        reason: Reason | None = None,
        status: int | None = None,
    ) -> list[RecentRequest]:
        """Return the last requests that are so, newest first."""
        wanted: dict[str, Any] = {
            "model": model,
            "worker": worker,
            "reason": reason,
            "status": status,
        }
        if self.siblings is not None:
            return await self.siblings.decisions(limit, wanted)
        return list(self.recent.newest(limit, **wanted))

    def add_worker(self, worker: WorkerConfig) -> None:
        """Take in a worker until the next reload."""
        spec = _spec(worker, self.config)
        to_worker(spec.tls)  # files that can't be used are whose fault that asks, now
        self.hide_keys([spec])
        self.fleet.add(spec)

    def hide_keys(self, workers: Iterable[WorkerSpec]) -> None:
        """Keep keys of workers out of the log that no file tells of."""
        self.logs.hide(spec.api_key for spec in workers if spec.api_key is not None)

    def remove_worker(self, name: str) -> None:
        """Take out a worker until the next reload; its requests in flight finish."""
        self.fleet.remove(name)

    async def reload(self) -> list[str]:
        """Read the fleet file again; return what will change only with the next start.

        A file that can't be used changes nothing. It is read in a thread: a thousand workers take
        half a second, for which no stream should stand still.
        """
        if self.source is None:
            raise ProxyError("this router was not started from a file; there is nothing to reload")
        async with self._reloading:
            late = self.take(await asyncio.to_thread(self._read_again, self.source))
            if self.siblings is not None:
                self.siblings.reloaded(self.config, self._keys)
        logger.info("read %s again: %d workers", self.source, len(self.fleet))
        if late:
            logger.warning("%s: the change takes a restart", ", ".join(late))
        return late

    def take(self, config: FleetConfig, keys: SecretKeys | None = None) -> list[str]:
        """Become what a fleet file says; return what will change only with the next start.

        `keys` are those that it names, where they were read already.
        """
        late = takes_a_restart(config, self._started_with)
        follows = self.siblings is not None and not self.leads
        try:
            check_tls(config, str(self.source))
        except ConfigError as error:
            # Who leads has read them. What another finds half-written must not keep it from the
            # rest: it would go on with keys and limits that its siblings have no more.
            if not follows:
                raise
            logger.error("of TLS stays what was read before:\n%s", error)
        said, config = config, as_started(config, self._started_with)
        keys = keys or SecretKeys.read(config, str(self.source))
        keep_strangers_out(config, config.router.host, str(self.source))
        found = self.discovery.reconfigure(config, keys.pools)
        # Nothing can fail any more.
        self.config, self._keys = said, keys
        probe = self.prober.settings = config.router.probe
        self.fleet.down_after, self.fleet.up_after = probe.down_after, probe.up_after
        # Who follows is told by the leader who the workers are.
        workers = [w.spec for w in self.fleet] if follows else [*found, *specs(config)]
        self.router.reconfigure(router_settings(config), workers)
        take_tenants(self.router.tenants, config, keys.tenants)
        self._admin_key.take(keys.admin)
        for shown, tls in (
            (self._tls, config.router.tls),
            (self._admin_tls, config.router.admin.tls),
        ):
            if shown is not None and tls is not None:
                shown.renew(tls)
        if self.leads:
            self.discovery.reloaded()
        self.wire.reconfigure(wire_settings(config))
        self.logs.reconfigure(config, keys.plain)
        if self.batches is not None:
            self.batches.reconfigure(config.router.batches)
        return late

    def _read_again(self, source: Path) -> FleetConfig:
        """Read the file, and give workers without a URL the one that they were started with."""
        config = self._read(source)
        known = {worker.name: worker.url for worker in self.config.workers}
        workers: list[WorkerConfig] = []
        problems: list[Problem] = []
        for index, worker in enumerate(config.workers):
            if worker.url is None and known.get(worker.name) is None:
                why = "is missing, and a reload starts no worker; give it, or restart"
                problems.append(Problem(f"workers[{index}].url", why))
            workers.append(worker.model_copy(update={"url": worker.url or known.get(worker.name)}))
        if problems:
            raise ConfigError(str(source), problems)
        return config.model_copy(update={"workers": tuple(workers)})

    @property
    def drain_s(self) -> float:
        """How long requests have to finish, once it drains."""
        return self.config.router.drain_s

    def close_admin(self) -> None:
        """Have the admin port no more: another router may be waiting for it."""
        if self._admin is not None:
            self._admin.stop()

    async def drain(self) -> None:
        """Take nothing new, let requests in flight finish, and stop."""
        await self.wire.drain(self.drain_s)
        await self.stop()

    async def stop(self) -> None:
        """Stop now."""
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


def specs(config: FleetConfig) -> list[WorkerSpec]:
    """Tell the core of the workers."""
    return [_spec(worker, config) for worker in config.workers]


def _spec(worker: WorkerConfig, config: FleetConfig) -> WorkerSpec:
    return WorkerSpec(
        worker.name,
        worker.url or "",
        Role(worker.role),
        config.model_of(worker),
        worker.stated_max_model_len,
        worker.max_requests,
        worker.api_key,
        config.tls_of(worker),
        worker.seats,
    )


def router_settings(config: FleetConfig) -> RouterSettings:
    """Tell the core what the file says about routing."""
    routing, router = config.routing, config.router
    above = routing.disaggregate_above
    return RouterSettings(
        policy=routing.policy,
        short_limit=routing.short_limit,
        prefix_affinity=routing.prefix_affinity,
        tokenize=routing.tokenize,
        cut_output=routing.cut_output,
        max_attempts=router.retries.attempts,
        retry_budget=router.retries.budget,
        panic_threshold=routing.panic_threshold,
        queue_requests=router.queue.max_requests,
        queue_bytes=router.queue.max_bytes,
        queue_wait_s=router.queue.max_wait_s,
        queue_tokens=router.queue.max_tokens,
        fairness=fairness_settings(config),
        admission=admission_settings(config),
        transfer=config.transfer is not None,
        disaggregate_above=None if above == "auto" else above,
        allow_client_kv_transfer=router.allow_client_kv_transfer,
        client_priority="priority" in router.client_fields,
        client_arguments="vllm_xargs" in router.client_fields,
        pass_priority=router.pass_priority,
        transfer_within_s=connector(config.transfer).within_s if config.transfer else inf,
    )


def wire_settings(config: FleetConfig) -> WireSettings:
    """Tell the data path its limits."""
    router = config.router
    return WireSettings(
        refuses_pages=is_loopback(router.host) and not router.allow_anonymous,
        max_body_bytes=router.max_body_bytes,
        max_header_bytes=router.max_header_bytes,
        notice_s=router.drain_notice_s,
        max_collected_bytes=router.max_collected_bytes,
        **router.timeouts.model_dump(),
    )


def url_of(host: str, port: int, tls: TlsConfig | None = None) -> str:
    """Write where somebody listens."""
    scheme = "http" if tls is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
