"""Starts the router processes, restarts them, and forwards their messages.

    supervisor -+- process 0, the leader     each listens on the port (SO_REUSEPORT)
                +- process 1                 and shares the table with the others

A process that exits is restarted; pauses grow if it exits soon after its start. Its charges are
released at once, and another process becomes leader if necessary. A process that hangs or does not
start to serve is killed.
When the supervisor exits, its processes see the closed channel, release the ports and drain. The
next supervisor waits for the ports.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Coroutine
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from proxy.config import FleetConfig, load
from proxy.config.shared import SharedConfig
from proxy.errors import ProxyError
from proxy.metrics.replica_counts import ALONE
from proxy.processes.channel import Channel
from proxy.processes.child import Child
from proxy.processes.ipc_messages import (
    Begin,
    ConfigReloaded,
    Drain,
    IpcAnswer,
    IpcQuestion,
    Joined,
    Lead,
    Message,
    Reload,
    Serving,
    Stop,
    StoredResponses,
    WorkersChanged,
)
from proxy.processes.ipc_requests import PendingQuestions
from proxy.processes.metrics_totals import MetricsTotals
from proxy.processes.ports import Ports
from proxy.processes.replicas.replication import Replication
from proxy.processes.shared.shared_memory import MAX_REMOTE, SharedTable
from proxy.processes.size import process_count
from proxy.processes.watchdog import kill_hung
from proxy.setup.app import url_of
from proxy.setup.secrets import SecretKeys
from proxy.wire.bind import retry_until_free

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, MAX_PAUSE_S = 0.25, 30.0
STABLE_S = 60.0  # a process that ran longer restarts with the first pause
EXIT_TIMEOUT_S = 5.0  # for processes to exit
JOIN_TIMEOUT_S = 2.0  # for other replicas to report their state at the start
NO_SENDER = 0  # number of a question without a waiting sender
MAX_UNSENT_BYTES = 8 << 20  # unread bytes after which a process gets no more changes of workers


class Supervisor:
    def __init__(
        self,
        config: FleetConfig,
        source: Path | None,
        *,
        read: Callable[[Path], FleetConfig] = load,
    ) -> None:
        self._read = read
        self.processes = process_count(config)
        self.restarts = 0
        self._started_with = self._config = config
        self._keys = SecretKeys.read(config, str(source))
        self._source = source
        self._table: SharedTable
        self._ports = Ports()
        self._children: dict[int, Child] = {}
        self._leader: Child | None = None
        self.replication: Replication | None = None  # with other hosts
        self._tasks: set[asyncio.Task[None]] = set()
        self._keepers: list[asyncio.Task[None]] = []
        self._ending = False
        self._all_serve = asyncio.Event()
        self._questions = PendingQuestions()
        self._totals = MetricsTotals()
        self._numbers = count(1)  # numbers of questions
        self._logs: IpcQuestion | None = None  # log settings changed since the last reload

    @property
    def pids(self) -> list[int]:
        return [child.process.pid for child in self._children.values()]

    @property
    def _serving(self) -> int:
        return sum(child.serving for child in self._children.values())

    @property
    def url(self) -> str:
        return url_of(self._config.router.host, self._ports.port, self._config.router.tls)

    @property
    def admin_url(self) -> str:
        admin = self._config.router.admin
        return url_of(admin.host, self._ports.admin_port, admin.tls)

    @property
    def drain_s(self) -> float:
        return self._config.router.drain_s

    async def start(self) -> None:
        """Start all processes and wait until they serve; raise `ProxyError` on failure."""
        await self._take_ports()
        shared = self._config.router.shared
        self._table = SharedTable.make(self.processes, 0 if shared is None else MAX_REMOTE)
        if shared is not None:
            await self._join_replicas(shared)
        self._keepers = [
            asyncio.create_task(self._keep_child_running(i)) for i in range(self.processes)
        ]
        self._run_in_background(kill_hung(self._children, self._table))
        served = asyncio.create_task(self._all_serve.wait())
        await asyncio.wait([served, *self._keepers], return_when=asyncio.FIRST_COMPLETED)
        served.cancel()
        if not self._all_serve.is_set():
            errors = [e for keeper in self._keepers if keeper.done() and (e := keeper.exception())]
            await self.stop()
            if errors:
                raise ProxyError(
                    f"a router process cannot start: {errors[0]}; raise the limit it names, or "
                    "lower router.processes"
                )
            raise ProxyError("a router process exited before it served; see its log")

    async def _join_replicas(self, settings: SharedConfig) -> None:
        replicas = Replication.on_redis(settings, self._keys.shared, self._table, self._send_all)
        self._run_in_background(replicas.run())
        self.replication = replicas
        await replicas.wait_until_joined(JOIN_TIMEOUT_S)

    def _run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a task of the supervisor failed: %s", error, exc_info=error)

    async def _take_ports(self) -> None:
        router = self._config.router
        try:
            await retry_until_free(lambda: self._ports.reserve(router), router.drain_notice_s)
        except OSError as error:
            raise ProxyError(
                f"the router cannot listen: {error}; choose another host or port under `router`"
            ) from None

    async def drain(self) -> None:
        self._ending = True
        self._send_all(Drain())
        timeout_s = self._config.router.drain_s + EXIT_TIMEOUT_S
        await asyncio.wait(self._keepers, timeout=timeout_s)
        await self.stop()

    async def stop(self) -> None:
        self._ending = True
        self._send_all(Stop())
        pending = [keeper for keeper in self._keepers if not keeper.done()]
        if pending:
            _, pending_set = await asyncio.wait(pending, timeout=EXIT_TIMEOUT_S)
            for child in list(self._children.values()) if pending_set else ():
                logger.warning("%s does not exit; killing it", child)
                child.process.kill()
            await asyncio.gather(*pending, return_exceptions=True)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._ports.close()

    async def reload(self) -> None:
        """Have the leader read the fleet file again, after a check of the file."""
        if self._source is not None:
            await asyncio.to_thread(self._read, self._source)
        if self._leader is not None:
            self._leader.channel.send(Reload())
        else:
            logger.error("the fleet file was not reloaded: no process is leader now; try again")

    # Processes

    async def _keep_child_running(self, index: int) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._ending:
            try:
                child = await self._start_child(index)
            except OSError as error:  # no memory, processes or files; may be temporary
                if not self._all_serve.is_set():
                    raise
                what = f"router process {index} cannot start"
                logger.error("%s: %s; trying again in %g s", what, error, pause_s)
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, MAX_PAUSE_S)
                continue
            status = await child.process.wait()
            self._remove_child(child)
            if self._ending:
                return
            if not (child.serving or self._all_serve.is_set()):
                return  # a failed start; `start` raises an error
            if child.serving and time.monotonic() - child.began > STABLE_S:
                pause_s = FIRST_PAUSE_S
            logger.error(
                "%s exited (%s); restarting in %g s", child, _describe_exit(status), pause_s
            )
            self.restarts += 1
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, MAX_PAUSE_S)

    async def _start_child(self, index: int) -> Child:
        own_end, child_end = socket.socketpair()
        inherited = [self._table.fd, child_end.fileno(), self._ports.admin.fileno()]
        command = [sys.executable, "-m", "proxy.processes", str(index), *map(str, inherited)]
        # The child must import the same modules as this process.
        path = os.pathsep.join(folder or str(Path.cwd()) for folder in sys.path)
        env = {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
        try:
            process = await asyncio.create_subprocess_exec(*command, pass_fds=inherited, env=env)
        except OSError:
            own_end.close()
            raise
        finally:
            child_end.close()
        child = Child(index, process)
        child.channel = await Channel.open(own_end, partial(self._handle, child), lambda: None)
        self._children[index] = child
        begin = Begin(
            self.processes,
            self._started_with,
            self._config,
            self._keys,
            self._source,
            self._read,
            self._ports.addresses,
        )
        child.channel.send(begin)
        if self._logs is not None:
            child.channel.send(self._logs)
        if self._ending:
            child.channel.send(Stop())
        return child

    def _remove_child(self, child: Child) -> None:
        child.channel.close()
        del self._children[child.index]
        self._table.clear(child.index)
        self._totals.keep_counters(child.index)
        self._questions.remove_process(child.index)
        if self.replication is not None:
            self.replication.process_ended(child.index)
        if self._leader is child:
            self._leader = None
            self._appoint_leader()

    def _appoint_leader(self) -> None:
        """Appoint a leader: a process that serves, or the first that joined."""
        if self._leader is not None or self._ending:
            return
        able = [child for child in self._children.values() if child.joined]
        able.sort(key=lambda child: (not child.serving, child.index))
        if able:
            self._leader = able[0]
            self._leader.channel.send(Lead())

    # Messages

    def _handle(self, child: Child, message: Message) -> None:
        if self.replication is not None:
            self.replication.report(message)
        match message:
            case Joined():
                child.joined = True
                self._appoint_leader()
                if self._leader not in (None, child):
                    self._send_to_leader(message)
            case Serving():
                child.serving = True
                if self._serving == self.processes:
                    self._all_serve.set()
            case WorkersChanged():
                for other in self._children.values():
                    if other is not child and other.joined:
                        self._forward(other, message)
            case StoredResponses():
                self._send_all(message, but=child)
            case ConfigReloaded(config, keys):
                self._config, self._keys, self._logs = config, keys, None
                self._send_all(message, but=child)
            case IpcQuestion():
                if message.kind == "logs":
                    self._remember_log_settings(message)
                self._run_in_background(self._ask(child, message))
            case IpcAnswer():
                self._questions.record(child.index, message)

    def _forward(self, child: Child, message: WorkersChanged) -> None:
        """Forward changes of workers, unless the process has too much unread."""
        if child.channel.unsent >= MAX_UNSENT_BYTES:
            child.missed = True
        elif child.missed and not message.complete:
            self._send_to_leader(Joined())  # asks the leader for everything
        else:
            child.missed = False
            child.channel.send(message)

    def _send_to_leader(self, message: Message) -> None:
        if self._leader is not None:
            self._leader.channel.send(message)

    def _send_all(self, message: Message, but: Child | None = None) -> None:
        for child in self._children.values():
            if child is not but:
                child.channel.send(message)

    # Questions

    async def _ask(self, child: Child, question: IpcQuestion) -> None:
        """Collect the answers of all processes and send them to the sender, the leader's first."""
        number = next(self._numbers)  # senders use their own numbers
        answers = await self.gather(IpcQuestion(number, question.kind, question.argument))
        answer: object = [*answers.values()]
        if question.kind == "page":
            answer = self._totals.merge(
                answers,
                number=number,
                serving=self._serving,
                restarts=self.restarts,
                replicas=ALONE if self.replication is None else self.replication.counts,
                openmetrics=bool(question.argument),
            )
        child.channel.send(IpcAnswer(question.number, answer))

    def _remember_log_settings(self, change: IpcQuestion) -> None:
        requests, levels = change.argument
        if self._logs is not None:
            earlier, others = self._logs.argument
            requests, levels = earlier if requests is None else requests, {**others, **levels}
        self._logs = IpcQuestion(NO_SENDER, "logs", (requests, levels))
        for child in self._children.values():
            if not child.serving:
                child.channel.send(self._logs)

    async def gather(self, question: IpcQuestion) -> dict[int, Any]:
        """Ask all serving processes, the leader first; late answers are left out."""
        children = [child for child in self._children.values() if child.serving]
        children.sort(key=lambda child: (child is not self._leader, child.index))
        return await self._questions.ask(question, children)


def _describe_exit(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"exit status {status}"
