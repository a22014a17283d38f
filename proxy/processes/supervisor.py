"""Starts the processes of a router, keeps them alive, and carries what they say to each other.

    supervisor -+- process 0, which leads     each listens on the port for itself (SO_REUSEPORT),
                +- process 1                  and shares the table with all others

It serves nobody itself. A process that dies is begun again, after pauses that grow while it dies
young, and what it had charged is released at once; if it led, another one leads. One whose loop
stands still for long is killed: its share of the connections would wait for ever. So is one that
has begun and does not come to serve. When the supervisor goes, in whatever way, its processes hear
the line go dead, let go of the ports, and drain; the next one waits for the ports a little.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from proxy.config import FleetConfig, load
from proxy.errors import ProxyError
from proxy.processes.channel import Channel
from proxy.processes.child import Child
from proxy.processes.ipc_messages import (
    Begin,
    ConfigReloaded,
    Drain,
    IpcAnswer,
    IpcNoAnswer,
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
from proxy.processes.shared.shared_memory import ALIVE, SharedTable
from proxy.processes.size import how_many
from proxy.setup.app import url_of
from proxy.setup.secrets import SecretKeys
from proxy.wire.bind import retry_until_free

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 30.0
GROWN_S = 60.0  # one that dies later than that is begun again as the first time
GRACE_S = 5.0  # for what was told to end
STILL_S, LOOK_S = 30.0, 1.0  # a loop that stands still so long; between two looks
BORN_S = 120.0  # that one may take from its beginning until it serves, on whatever machine
MOST_LATE = 5  # looks that one may come late, before it was the machine that stood still
NOBODYS = 0  # a question whose answer nobody waits for
MUCH = 8 << 20  # bytes that a process may leave unread before it is told no more of workers


class Supervisor:
    """See the module's text."""

    def __init__(
        self,
        config: FleetConfig,
        source: Path | None,
        *,
        read: Callable[[Path], FleetConfig] = load,
    ) -> None:
        self._read = read
        self.processes = how_many(config)
        self.restarts = 0
        self._started_with = self._config = config
        self._keys = SecretKeys.read(config, str(source))
        self._source = source
        self._table: SharedTable
        self._ports = Ports()
        self._children: dict[int, Child] = {}
        self._leader: Child | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._keepers: list[asyncio.Task[None]] = []
        self._ending = False
        self._all_serve = asyncio.Event()
        self._questions = PendingQuestions()
        self._totals = MetricsTotals()
        self._numbers = count(1)  # of questions
        self._logs: IpcQuestion | None = None  # what was changed of them since the file was read

    @property
    def pids(self) -> list[int]:
        """The processes that are there."""
        return [child.process.pid for child in self._children.values()]

    @property
    def _serving(self) -> int:
        return sum(child.serving for child in self._children.values())

    @property
    def url(self) -> str:
        """Where clients find it."""
        return url_of(self._config.router.host, self._ports.port, self._config.router.tls)

    @property
    def admin_url(self) -> str:
        """Where operators find it."""
        admin = self._config.router.admin
        return url_of(admin.host, self._ports.admin_port, admin.tls)

    @property
    def drain_s(self) -> float:
        """How long requests have to finish."""
        return self._config.router.drain_s

    async def start(self) -> None:
        """Begin all, and wait until they serve; raise if one does not."""
        await self._take_ports()
        self._table = SharedTable.make(self.processes)
        self._keepers = [asyncio.create_task(self._keep(i)) for i in range(self.processes)]
        watching = asyncio.create_task(self._watch())
        watching.add_done_callback(_complain)
        self._tasks.add(watching)
        served = asyncio.create_task(self._all_serve.wait())
        await asyncio.wait([served, *self._keepers], return_when=asyncio.FIRST_COMPLETED)
        served.cancel()
        if not self._all_serve.is_set():
            errors = [e for each in self._keepers if each.done() and (e := each.exception())]
            await self.stop()
            if errors:
                raise ProxyError(
                    f"a process of the router can't begin: {errors[0]}; raise the limit it names, "
                    "or give fewer router.processes"
                )
            raise ProxyError("a process of the router ended before it served; it has said why")

    async def _take_ports(self) -> None:
        router = self._config.router
        try:
            await retry_until_free(lambda: self._ports.take(router), router.drain_notice_s)
        except OSError as error:
            raise ProxyError(
                f"the router can't listen: {error}; choose another host or port under `router`"
            ) from None

    async def drain(self) -> None:
        """Let requests finish, and end."""
        self._ending = True
        self._say_all(Drain())
        patience = self._config.router.drain_s + GRACE_S
        await asyncio.wait(self._keepers, timeout=patience)
        await self.stop()

    async def stop(self) -> None:
        """End all now."""
        self._ending = True
        self._say_all(Stop())
        pending = [keeper for keeper in self._keepers if not keeper.done()]
        if pending:
            _, pending_set = await asyncio.wait(pending, timeout=GRACE_S)
            for child in list(self._children.values()) if pending_set else ():
                logger.warning("%s does not end; it is killed", child)
                child.process.kill()
            await asyncio.gather(*pending, return_exceptions=True)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._ports.let_go()

    async def reload(self) -> None:
        """Have the fleet file read again, if there is nothing wrong with it that we can tell."""
        if self._source is not None:
            await asyncio.to_thread(self._read, self._source)
        if self._leader is not None:
            self._leader.channel.say(Reload())
        else:
            logger.error("nothing was read again: no process leads at this moment; try again")

    # The processes

    async def _keep(self, index: int) -> None:
        """Have a process of that index, for as long as there is to be one."""
        pause_s = FIRST_PAUSE_S
        while not self._ending:
            try:
                child = await self._begin(index)
            except OSError as error:  # no memory, processes or files, which may pass
                if not self._all_serve.is_set():
                    raise
                what = f"router process {index} can't begin"
                logger.error("%s: %s; tried again in %g s", what, error, pause_s)
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, LONGEST_PAUSE_S)
                continue
            status = await child.process.wait()
            self._gone(child)
            if self._ending:
                return
            if not (child.serving or self._all_serve.is_set()):
                return  # it never will: see `start`
            if child.serving and time.monotonic() - child.began > GROWN_S:
                pause_s = FIRST_PAUSE_S
            logger.error("%s ended (%s); another begins in %g s", child, _how(status), pause_s)
            self.restarts += 1
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, LONGEST_PAUSE_S)

    async def _begin(self, index: int) -> Child:
        ours, theirs = socket.socketpair()
        given = [self._table.fd, theirs.fileno(), self._ports.admin.fileno()]
        command = [sys.executable, "-m", "proxy.processes", str(index), *map(str, given)]
        # As this process finds its modules, and from nowhere else.
        path = os.pathsep.join(each or str(Path.cwd()) for each in sys.path)
        env = {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
        try:
            process = await asyncio.create_subprocess_exec(*command, pass_fds=given, env=env)
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        child = Child(index, process)
        child.channel = await Channel.open(ours, partial(self._heard, child), lambda: None)
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
        child.channel.say(begin)
        if self._logs is not None:
            child.channel.say(self._logs)
        if self._ending:
            child.channel.say(Stop())
        return child

    async def _watch(self) -> None:
        """Kill those whose loop stands still, or never began, unless all did, this one too."""
        looked = since = time.monotonic()
        while True:
            await asyncio.sleep(LOOK_S)
            now = time.monotonic()
            if now - looked > MOST_LATE * LOOK_S:
                since = now
            looked = now
            for child in self._children.values():
                alive_at = self._table.sheet(child.index).count(ALIVE)
                if not child.serving:
                    if max(child.began, since) < now - BORN_S:
                        born_s = now - child.began
                        logger.error("%s does not serve after %d s; it is killed", child, born_s)
                        child.process.kill()
                elif alive_at and max(alive_at, since) < now - STILL_S:
                    logger.error("%s stood still for %d s; it is killed", child, now - alive_at)
                    child.process.kill()

    def _gone(self, child: Child) -> None:
        child.channel.close()
        del self._children[child.index]
        self._table.clear(child.index)
        self._totals.gone(child.index)
        self._questions.gone(child.index)
        if self._leader is child:
            self._leader = None
            self._elect()

    def _elect(self) -> None:
        """Have one lead who knows the workers; at first, whoever comes first."""
        if self._leader is not None or self._ending:
            return
        able = [child for child in self._children.values() if child.joined]
        able.sort(key=lambda child: (not child.serving, child.index))
        if able:
            self._leader = able[0]
            self._leader.channel.say(Lead())

    # What they say

    def _heard(self, child: Child, message: Message) -> None:
        match message:
            case Joined():
                child.joined = True
                self._elect()
                if self._leader not in (None, child):
                    self._to_leader(message)
            case Serving():
                child.serving = True
                if self._serving == self.processes:
                    self._all_serve.set()
            case WorkersChanged():
                for other in self._children.values():
                    if other is not child and other.joined:
                        self._pass_on(other, message)
            case StoredResponses():
                self._say_all(message, but=child)
            case ConfigReloaded(config, keys):
                self._config, self._keys, self._logs = config, keys, None
                self._say_all(message, but=child)
            case IpcQuestion():
                if message.what == "logs":
                    self._note_logs(message)
                task = asyncio.create_task(self._ask(child, message))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case IpcAnswer(number, found):
                self._questions.answered(child.index, number, found)
            case IpcNoAnswer(number):
                self._questions.unanswered(child.index, number)

    def _pass_on(self, child: Child, message: WorkersChanged) -> None:
        """Tell a process of workers, unless it has not read what it was told before."""
        if child.channel.unsent >= MUCH:
            child.missed = True
        elif child.missed and not message.all:
            self._to_leader(Joined())  # to be told everything
        else:
            child.missed = False
            child.channel.say(message)

    def _to_leader(self, message: Message) -> None:
        if self._leader is not None:
            self._leader.channel.say(message)

    def _say_all(self, message: Message, but: Child | None = None) -> None:
        for child in self._children.values():
            if child is not but:
                child.channel.say(message)

    # What they ask

    async def _ask(self, child: Child, question: IpcQuestion) -> None:
        """Put a question to all, and give whoever asked the answers, the leader's first."""
        number = next(self._numbers)  # each process that asks has numbers of its own
        found = await self.gather(IpcQuestion(number, question.what, question.given))
        answer: object = [*found.values()]
        if question.what == "page":
            answer = self._totals.page(
                found,
                number=number,
                serving=self._serving,
                restarts=self.restarts,
                openmetrics=bool(question.given),
            )
        child.channel.say(IpcAnswer(question.number, answer))

    def _note_logs(self, change: IpcQuestion) -> None:
        """Keep what is to be logged for processes that begin later; tell those that do now."""
        requests, levels = change.given
        if self._logs is not None:
            earlier, others = self._logs.given
            requests, levels = earlier if requests is None else requests, {**others, **levels}
        self._logs = IpcQuestion(NOBODYS, "logs", (requests, levels))
        for child in self._children.values():
            if not child.serving:
                child.channel.say(self._logs)

    async def gather(self, question: IpcQuestion) -> dict[int, Any]:
        """Ask all that serve, the leader first; who does not answer in time is left out."""
        children = [child for child in self._children.values() if child.serving]
        children.sort(key=lambda child: (child is not self._leader, child.index))
        return await self._questions.put(question, children)


def _complain(watching: asyncio.Task[None]) -> None:
    if not watching.cancelled() and (error := watching.exception()) is not None:
        logger.error("nobody watches the processes any more: %s", error, exc_info=error)


def _how(status: int) -> str:
    """Say how a process ended."""
    return f"signal {-status}" if status < 0 else f"exit status {status}"
