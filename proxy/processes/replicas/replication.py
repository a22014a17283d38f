"""Exchanges the sheets of this host's processes with those of other hosts, in the supervisor.

For router processes, a process on another host is one more sheet in the shared memory. So no
decision waits for the network. Without the server, each host goes on with what it knows.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
import uuid
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from math import inf

import msgspec

from proxy.config.shared import SharedConfig
from proxy.metrics.replica_counts import ReplicaCounts
from proxy.processes.ipc_messages import (
    Message,
    StoredResponses,
    UrgentChange,
    WorkerDrained,
    WorkersChanged,
)
from proxy.processes.replicas import redis_server
from proxy.processes.replicas.local_sheets import LocalSheet
from proxy.processes.replicas.messages import Update, decode, encode
from proxy.processes.replicas.notices import Notices
from proxy.processes.replicas.publish_times import (
    MIN_PAUSE_S,
    PUBLISH_INTERVAL_S,
    SMALL_INTERVAL_S,
    PublishTimes,
)
from proxy.processes.replicas.remote_sheets import LEASE_S, RemoteSheets
from proxy.processes.replicas.reservations import Reservations, slots_for_others
from proxy.processes.replicas.worker_names import WorkerNames
from proxy.processes.shared.shared_memory import SharedTable

logger = logging.getLogger(__name__)

HEARTBEAT_S = 0.5
ECHO_TIMEOUT_S = 2.0  # without this replica's own messages the connection is dead
PAUSE_S = 1.0  # without a step, this process was stopped
WHOLE_INTERVAL_S = 0.5  # between two whole updates
RETRY_INTERVAL_S = 0.5
LEAVE_TIMEOUT_S = 0.2
WARNING_INTERVAL_S = 60.0  # between two warnings of unreadable messages
OpenChannel = Callable[
    [Callable[[bytes], None]], AbstractAsyncContextManager[redis_server.RedisChannel]
]


class Replication:
    def __init__(
        self,
        table: SharedTable,
        open_channel: OpenChannel,
        *,
        send: Callable[[StoredResponses | WorkerDrained], None],
        replicas: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}"
        self._own = _start_of(self.name)
        self.connected = False
        self.errors = 0  # failed connections and unreadable messages
        self.workers = WorkerNames()
        self.sheets = RemoteSheets(table, self.workers)
        self._table = table
        self._open_channel = open_channel
        self._clock = clock
        self._local = [LocalSheet(index, table) for index in range(table.processes)]
        self._requests: list[dict[str, int]] = [{} for _ in self._local]  # by process and worker
        self._gone: list[int] = []
        self._reservations = Reservations(self.name)
        self._configured = replicas  # parts without the server, at least
        self._hosts = replicas  # that shared the workers when the server was last reached
        table.hosts = replicas
        self._connected_at, self._ran_at = -inf, clock()
        self._joined = False
        self._number = 0
        self._whole = True  # the next update has everything
        self._last_whole = self._last_sent = self._echo_at = self._next_warning = -inf
        self._heard: dict[str, int] = {}
        self._owes_answer = False  # a replica's slots depend on what this one has heard
        self._notices = Notices(send)
        self._times = PublishTimes()

    @classmethod
    def on_redis(
        cls,
        settings: SharedConfig,
        password: str | None,
        table: SharedTable,
        send: Callable[[StoredResponses | WorkerDrained], None],
    ) -> Replication:
        """Return a replica of a fleet; raise `ProxyError` if the settings cannot be used here."""
        redis_server.check(settings)
        open_channel = partial(redis_server.open_channel, settings, password)
        return cls(table, open_channel, send=send, replicas=settings.replicas or 1)

    # What the supervisor reports

    def report(self, message: Message) -> None:
        """Take what other hosts must know from a message of a process."""
        match message:
            case WorkersChanged():
                self.sheets.write_new_rows(self.workers.apply(message))
                self._reserve(self._now())
            case UrgentChange():
                self._times.wake()
            case _:
                self._notices.report(message)
                if self._notices.has_new:
                    self._times.wake()

    def process_ended(self, index: int) -> None:
        self._gone.append(index)
        self._requests[index].clear()
        self._times.wake()

    @property
    def counts(self) -> ReplicaCounts:
        now = self._clock()
        alive = self.sheets.alive(now)
        age_s = max((now - member.heard_at for member in alive), default=0.0)
        return ReplicaCounts(self.connected, len(alive) + 1, age_s, self.errors)

    # The exchange

    async def wait_until_joined(self, timeout_s: float) -> None:
        """Wait until the other replicas' state is known, or cannot be had."""
        give_up = self._clock() + timeout_s
        heartbeats = self._clock() + 2 * HEARTBEAT_S
        while (now := self._clock()) < give_up and not self.errors:
            if self.connected and now > heartbeats and not self.sheets.wants_whole(now):
                break
            await asyncio.sleep(PUBLISH_INTERVAL_S)

    async def run(self) -> None:
        while True:
            try:
                async with self._open_channel(self._receive) as channel:
                    await self._exchange(channel)
            except Exception as error:  # replicas must find each other again after any error
                self._note_error(error)
            await asyncio.sleep(RETRY_INTERVAL_S)

    async def _exchange(self, channel: redis_server.RedisChannel) -> None:
        self._whole, self._last_whole, self._echo_at = True, -inf, self._clock()
        small = True  # changes are due too
        try:
            while True:
                self._publish(channel, small=small)
                self._table.awaits_urgent = True  # before the last look
                try:
                    small = await self._times.wait(urgent=self._has_urgent())
                finally:
                    self._table.awaits_urgent = False
        except asyncio.CancelledError:
            self._number += 1
            with suppress(Exception):  # the server may be gone too
                channel.publish(encode(Update(self.name, self._number, self._clock(), leaves=True)))
                async with asyncio.timeout(LEAVE_TIMEOUT_S):
                    await channel.drain()
            raise

    def _note_error(self, error: Exception) -> None:
        self.errors += 1
        if not isinstance(error, redis_server.server_errors()):
            logger.error("router.shared: an update failed", exc_info=error)
        if self.connected or self.errors == 1:
            logger.error(
                "router.shared: the server cannot be reached: %s; "
                "this router uses its own state only",
                redis_server.describe(error),
            )
        self.connected = False
        now = self._clock()
        self._expire(now)
        self._reserve(now)

    def _publish(self, channel: redis_server.RedisChannel, *, small: bool) -> None:
        now = self._now()
        if channel.error is not None:
            raise channel.error
        if now - self._echo_at > ECHO_TIMEOUT_S:
            raise TimeoutError(f"no message came back for {ECHO_TIMEOUT_S:g} s")
        self._expire(now)
        if not self._joined:
            self._reserve(now)
        if (small or self.is_due(now)) and (message := self.next_message(now)) is not None:
            channel.publish(message)

    def _now(self) -> float:
        """Return the time; a pause of this process is no silence of others."""
        now = self._clock()
        if self.connected and (pause := now - self._ran_at) > PAUSE_S:
            self._echo_at += pause
            for member in self.sheets.members.values():
                member.heard_at += pause
        self._ran_at = now
        return now

    def is_due(self, now: float) -> bool:
        return now - self._last_sent >= SMALL_INTERVAL_S - MIN_PAUSE_S or self._has_urgent()

    def _has_urgent(self) -> bool:
        if self._whole or self._owes_answer or self.sheets.waits:
            return True
        if self._gone or self._notices.has_new:
            return True
        return any(sheet.has_urgent_change(self.workers, self._is_scarce) for sheet in self._local)

    def _is_scarce(self, name: str, requests: int) -> bool:
        """Return True if half of this host's part of a worker's slots is taken."""
        limit = self.workers.limits.get(name)
        taken = requests + self.sheets.requests(name)
        return limit is not None and 2 * self._hosts * taken >= limit

    def next_message(self, now: float) -> bytes | None:
        """Return the next update; None if there is nothing to report yet."""
        whole = self._whole and now - self._last_whole >= WHOLE_INTERVAL_S
        all_changes = [sheet.changes(self.workers, whole=whole) for sheet in self._local]
        processes = [changes for changes in all_changes if changes is not None]
        due = self._owes_answer or now - self._last_sent >= HEARTBEAT_S
        if not (processes or whole or due or self._gone or self._notices.has_new):
            return None
        update = Update(
            self.name,
            self._number + 1,
            now,
            whole=whole,
            wants_whole=self.sheets.wants_whole(now),
            heard=self._heard,
            processes=processes,
            gone=self._gone,
        )
        if whole:
            self._whole, self._last_whole = False, now
            update.history = self.sheets.history
            update.folded, update.folded_names = self.sheets.folded, self.sheets.folded_names
        self._notices.write(update)
        self._number += 1
        self._table.sent += 1
        self._last_sent, self._owes_answer = now, False
        self._gone = []
        if self._note_requests(update):  # before others take what is reported as free
            self._reserve(now, None if update.gone else workers_of(update))
        return encode(update)

    def _note_requests(self, update: Update) -> bool:
        limits = self.workers.limits
        for part in update.processes:
            own = self._requests[part.index]
            own.update({name: load[0] for name, (load, _) in part.loads.items() if name in limits})
        total: Counter[str] = Counter()
        for own in self._requests:
            total.update(own)
        return self._reservations.report(update.number, total)

    def _receive(self, message: bytes) -> None:
        if message.startswith(self._own):
            self._note_echo(self._now())
            return
        now = self._now()
        try:
            update = decode(message)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self.errors += 1
            if now >= self._next_warning:
                self._next_warning = now + WARNING_INTERVAL_S
                logger.warning("router.shared: a message cannot be read: %s", error)
        else:
            self.handle(update, now)

    def _note_echo(self, now: float) -> None:
        self._echo_at = now
        if not self.connected:
            self.connected, self._connected_at = True, now
            logger.info("router.shared: connected to the server")

    def handle(self, update: Update, now: float) -> None:
        """Apply an update, of this replica too."""
        if update.member == self.name:
            self._note_echo(now)
            return
        if update.member not in self.sheets.members and not update.leaves:
            logger.info("router.shared: replica %s joined", update.member)
            self._whole = True
        self._whole = self._whole or update.wants_whole
        self.sheets.apply(update, now)
        if update.leaves:
            logger.info("router.shared: replica %s left", update.member)
            self._heard.pop(update.member, None)
        elif not self.sheets.members[update.member].is_lost:
            self._heard[update.member] = update.number
        changed = workers_of(update)
        if self.workers.limits.keys() & changed:
            self._owes_answer = True
        self._notices.apply(update)
        if self._whole or self._owes_answer or self.sheets.waits:
            self._times.wake()
        concerns_all = update.whole or update.gone or update.leaves
        self._reserve(now, None if concerns_all else changed)

    def _expire(self, now: float) -> None:
        for name in self.sheets.expire(now):
            logger.warning("router.shared: replica %s is silent; its charges are released", name)
            self._heard.pop(name, None)
            self._reserve(now)

    def _is_joined(self, now: float) -> bool:
        """Return True if each of the last known hosts is heard again, or taken for dead."""
        if not self.connected or now - self._connected_at > LEASE_S:
            return self.connected
        return len(self.sheets.alive(now)) + 1 >= self._hosts and not self.sheets.wants_whole(now)

    def _reserve(self, now: float, names: set[str] | None = None) -> None:
        """Write how many slots of each worker, or of some, are left to the other replicas."""
        alive, before = self.sheets.alive(now), (self._joined, self._hosts)
        self._joined = self._is_joined(now)
        if self._joined:
            self._hosts = len(alive) + 1
            acknowledged = self._reservations.acknowledge(alive)
            names = None if names is None else names | acknowledged
            self._table.hosts = max(self._hosts, self._configured)
        limits = self.workers.limits
        if names is None or before != (self._joined, self._hosts):
            names = set(limits)
        for name in names & limits.keys():
            limit = limits[name]
            if self._joined:
                remote, believed = self.sheets.requests(name), self._reservations.believed(name)
                slots = slots_for_others(limit, believed, remote, self._hosts)
            else:  # an equal part for each
                slots = limit - -(-limit // max(self._hosts, self._configured))
            self._table.reserve(self.workers.rows[name], slots)


def _start_of(name: str) -> bytes:
    """Return how messages of a replica begin."""
    message = encode(Update(name, 0, 0.0))
    return message[: message.index(name.encode()) + len(name.encode())]


def workers_of(update: Update) -> set[str]:
    """Return the workers with changed charges."""
    return {name for part in update.processes for name in part.loads}
