"""A router process: the app, the shared table and the channel to the supervisor."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from itertools import count
from typing import Any

from proxy.config import FleetConfig
from proxy.errors import ProxyError
from proxy.metrics.page import write_page
from proxy.metrics.recent import RecentRequest, RequestFilter
from proxy.processes.channel import Channel
from proxy.processes.fleet_replica import FleetReplica
from proxy.processes.ipc_messages import (
    Begin,
    ConfigReloaded,
    Drain,
    IpcAnswer,
    IpcQuestion,
    Joined,
    Lead,
    Message,
    QuestionKind,
    Reload,
    Serving,
    Stop,
    StoredResponses,
    UrgentChange,
    WorkerDrained,
    WorkersChanged,
)
from proxy.processes.ports import bind
from proxy.processes.replicas.limits import SharedLimiter
from proxy.processes.replicas.publish_times import FlushTimer
from proxy.processes.shared.process_sheet import ALIVE
from proxy.processes.shared.shared_memory import SharedTable
from proxy.processes.shared.sharing import share_router
from proxy.processes.shared.urgent_changes import UrgentChanges
from proxy.processes.signals import reload
from proxy.setup.app import App
from proxy.setup.memory import freeze_objects
from proxy.setup.secrets import SecretKeys
from proxy.status_page.recorder import LiveUpdate, UpdateRequest
from proxy.wire.exchange.moves import MovedRequests

logger = logging.getLogger(__name__)

# Between two looks; shorter with queued requests, which wait for capacity that others free.
IDLE_INTERVAL_S, QUEUED_INTERVAL_S = 0.05, 0.005
ALONE_INTERVAL_S = 0.2  # without other processes here; each decision looks too
FIRST_PROBES_S = 1.0  # wait for the first probes
ANSWER_TIMEOUT_S = 5.0  # longer than the supervisor's timeout
EXIT_FAILURE = 1


class ServerProcess:
    def __init__(self, begin: Begin, index: int, table: int, channel: Channel) -> None:
        started_with = begin.started_with
        self.app = App(
            begin.config, begin.source, read=begin.read, started_with=started_with, keys=begin.keys
        )
        self._connect_app(index, begin.processes)
        clock, router = time.monotonic, self.app.router
        shared = SharedTable(table, begin.processes)
        soon: Callable[[Callable[[], None]], object] = asyncio.get_running_loop().call_soon
        alone = begin.processes == 1
        if alone:
            soon = FlushTimer(lambda: self._shared_load.has_urgent()).start  # noqa: PLW0108 -- made next
        self._shared_load, self._queues = share_router(
            router, shared, index, clock, soon, life=time.monotonic_ns()
        )
        self._limiter: SharedLimiter | None = None  # decides tenants' limits for all hosts
        if (settings := started_with.router.shared) is not None:
            password = begin.keys.shared
            limiter = SharedLimiter(settings, password, router.tenants, shared, clock)
            self._limiter = limiter
            self._shared_load.urgent = UrgentChanges(
                shared, self._shared_load.sheet, lambda: channel.send(UrgentChange())
            )
            self.app.metrics.limits_shared = lambda: limiter.is_up
        self._index = index
        self._idle_s = ALONE_INTERVAL_S if alone else IDLE_INTERVAL_S
        self._replica = FleetReplica(
            router, self.app.discovery, self._shared_load, clock, alone=alone
        )
        self._channel = channel
        self._addresses = begin.addresses
        self._clock = clock
        self._numbers = count(1)
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._tasks: set[asyncio.Task[object]] = set()
        self._listens = False
        self.ended = asyncio.Event()
        self.failed = False

    def _connect_app(self, index: int, processes: int) -> None:
        """Let the app report to the other processes, and collect from them."""
        app, recorder = self.app, self.app.live.recorder
        app.siblings = self
        app.wire.write_metrics = self.page
        app.live.collect_all = self.live_updates
        app.logs.change_all = self.change_logs
        app.logs.take_over(f"[{index}] ")
        app.router.report_stored_response = self._publish_response
        recorder.process_index, recorder.num_processes = index, processes

    async def run(self, admin: socket.socket) -> None:
        """Serve until `ended` is set."""
        self.app.open_admin(admin)
        self._channel.send(Joined())
        endless = [self._watch()]
        if self._limiter is not None:
            endless.append(self._limiter.run())
        watching = [asyncio.create_task(work) for work in endless]
        for task in watching:
            task.add_done_callback(self._check_task)
        try:
            await self.ended.wait()
        finally:
            running = [*watching, *self._tasks]  # a drain goes on until its deadline
            for running_task in running:
                running_task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    def handle(self, message: Message) -> None:
        match message:
            case Lead():
                self._lead()
            case WorkersChanged():
                self._apply_changes(message)
            case Joined():
                self._replica.send_all_next()
                self._channel.send(StoredResponses(tuple(self.app.router.stored_responses())))
            case StoredResponses(responses):
                for response in responses:
                    self.app.router.learn_remote_response(*response)
            case Reload():
                self._run_in_background(reload(self.app))
            case ConfigReloaded(config, keys):
                self._apply_config(config, keys)
            case WorkerDrained(name, draining, at_once):
                if self.app.is_leader:
                    self.app.fleet.roster.drain(name, draining=draining)
                    self._send_changes()
                    if at_once:
                        self._run_in_background(self.move_requests(name))
            case Drain():
                self.drain()
            case Stop():
                self._run_in_background(self._end_with(self.app.stop()))
            case IpcQuestion():
                self._run_in_background(self._send_answer(message))
            case IpcAnswer(number, result):
                answer = self._pending.pop(number, None)
                if answer is not None and not answer.done():
                    answer.set_result(result)

    def _apply_changes(self, changes: WorkersChanged) -> None:
        if not self.app.is_leader:
            self.app.hide_keys(known.spec for known in changes.known)
            self._replica.apply(changes)
            self._start_listening()

    def _apply_config(self, config: FleetConfig, keys: SecretKeys) -> None:
        try:
            self.app.apply_config(config, keys)
        except ProxyError as error:
            logger.error("process %d keeps its configuration:\n%s", self._index, error)

    def drain(self) -> None:
        self._run_in_background(self._end_with(self.app.drain()))

    def drain_without_supervisor(self) -> None:
        """Drain because the supervisor is gone; release the ports at once for the next one."""
        if not self.ended.is_set():
            logger.warning("the supervisor exited; draining")
            self.app.close_admin()
            self.drain()

    # Interface for the app

    def reloaded(self, config: FleetConfig, keys: SecretKeys) -> None:
        self._channel.send(ConfigReloaded(config, keys))

    async def decisions(self, limit: int, wanted: RequestFilter) -> list[RecentRequest]:
        decisions = await self._ask("decisions", (limit, wanted))
        entries: list[RecentRequest] = [entry for part in decisions for entry in part]
        entries.sort(key=lambda entry: -entry.time)
        return entries[:limit]

    async def page(self, openmetrics: bool) -> tuple[bytes, str]:
        page: tuple[bytes, str] = await self._ask("page", openmetrics)
        return page

    async def live_updates(self, filters: UpdateRequest) -> list[LiveUpdate]:
        updates: list[LiveUpdate] = await self._ask("live", filters)
        return updates

    async def change_logs(self, requests: bool | None, levels: Mapping[str, str]) -> None:
        await self._ask("logs", (requests, dict(levels)))

    def report_drain(self, name: str, *, draining: bool, at_once: bool) -> None:
        self._send_changes()
        self._channel.send(WorkerDrained(name, draining, at_once))

    async def move_requests(self, name: str) -> MovedRequests:
        counts: list[MovedRequests] = await self._ask("move", name)
        remaining: Counter[str] = Counter()
        for _, left in counts:
            remaining.update(left)
        return sum(moved for moved, _ in counts), remaining

    async def _ask(self, kind: QuestionKind, argument: object) -> Any:
        number = next(self._numbers)
        answer = self._pending[number] = asyncio.get_running_loop().create_future()
        self._channel.send(IpcQuestion(number, kind, argument))
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return await answer
        finally:
            self._pending.pop(number, None)

    async def _send_answer(self, question: IpcQuestion) -> None:
        try:
            answer = await self._answer(question.kind, question.argument)
            self._channel.send(IpcAnswer(question.number, answer))
        except Exception:
            logger.exception("process %d cannot answer: %s", self._index, question.kind)
            self._channel.send(IpcAnswer(question.number, failed=True))

    async def _answer(self, kind: QuestionKind, argument: Any) -> object:
        if kind == "page":
            page, _ = await write_page(self.app.metrics)
            return page.decode()
        if kind == "live":
            return self.app.live.recorder.update(self._clock(), argument)
        if kind == "logs":
            self.app.logs.change(*argument)
            return None
        if kind == "move":
            return await self.app.wire.moves.move_all(argument)
        return list(self.app.metrics.recent.newest(*argument))

    def _publish_response(self, response_id: str, worker: str, tenant: str) -> None:
        self._channel.send(StoredResponses(((response_id, worker, tenant),)))

    # Tasks

    def _lead(self) -> None:
        self._replica.lead()
        self.app.lead()
        logger.info("process %d leads", self._index)
        self._send_changes()
        self._start_listening()

    def _send_changes(self) -> None:
        if (changes := self._replica.changes()) is not None:
            self._channel.send(changes)

    def _start_listening(self) -> None:
        if not self._listens:
            self._listens = True
            self._run_in_background(self._listen())

    async def _listen(self) -> None:
        """Listen once the workers are probed.

        After a crash of all processes, clients would otherwise be refused.
        """
        give_up = self._clock() + FIRST_PROBES_S
        while self._clock() < give_up:  # there is no event for the end of a probe
            if all(worker.probed for worker in self.app.fleet.roster):
                break
            await asyncio.sleep(QUEUED_INTERVAL_S)
        await self.app.listen([bind(*address) for address in self._addresses])
        freeze_objects()
        self.app.objects_frozen = True
        self._channel.send(Serving())

    async def _watch(self) -> None:
        wire, shared_load = self.app.wire, self._shared_load
        seen = 0
        while True:
            now = self._clock()
            shared_load.sheet.write_count(ALIVE, int(now))
            shared_load.read_remote_charges(now)
            shared_load.publish_rest()
            if wire.queued and (shared_load.changes != seen or self._queues.holds_back):
                self._queues.holds_back = False
                wire.dispatch_queued(now)
            seen = shared_load.changes
            if self.app.is_leader:
                self._send_changes()
            self._queues.request_came.clear()
            if wire.queued:
                await asyncio.sleep(QUEUED_INTERVAL_S)
            else:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._queues.request_came.wait(), self._idle_s)

    async def _end_with(self, ending: Coroutine[Any, Any, None]) -> None:
        await ending
        self.ended.set()

    def _run_in_background(self, work: Coroutine[Any, Any, object]) -> None:
        """Run a task in the background; this process ends if the task fails."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._check_task)

    def _check_task(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        logger.error("a task failed, this process exits: %s", error, exc_info=error)
        self.failed = True
        self.ended.set()


async def serve(index: int, table: int, supervisor: socket.socket, admin: socket.socket) -> int:
    """Serve as one of several processes until told to exit; return the exit status."""
    loop = asyncio.get_running_loop()
    begun: asyncio.Future[Begin | None] = loop.create_future()
    server: ServerProcess | None = None
    early: list[Message] = []

    def handle(message: Message) -> None:
        if server is not None:
            server.handle(message)
        elif isinstance(message, Begin):
            begun.set_result(message)
        else:
            early.append(message)

    def lost() -> None:
        if server is not None:
            server.drain_without_supervisor()
        elif not begun.done():
            begun.set_result(None)

    # A terminal sends Ctrl-C and its hangup to every process; the supervisor decides what happens.
    for number in (signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, _ignore)
    channel = await Channel.open(supervisor, handle, lost)
    begin = await begun
    if begin is None:
        return EXIT_FAILURE
    server = ServerProcess(begin, index, table, channel)
    loop.add_signal_handler(signal.SIGTERM, server.drain)
    for message in early:
        channel.handle(message)
    await server.run(admin)
    channel.close()
    return EXIT_FAILURE if server.failed else 0


def _ignore() -> None:
    pass
