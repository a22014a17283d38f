"""The connection to one engine's journal: an XSUB socket in the event loop, which can also send.

ZeroMQ's file descriptor shows only changes of its state, so the socket is read until it is empty,
and again after each subscription. A connection that breaks is opened again by ZeroMQ.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import random
import secrets
from collections.abc import Callable
from contextlib import suppress
from math import inf
from typing import Final

import zmq

from proxy.journal.connection_monitor import ConnectionMonitor
from proxy.journal.engine_state import EngineJournal
from proxy.journal.messages import (
    RUN_BYTES,
    MalformedMessageError,
    decode_step,
    encode_name,
    read_position,
)
from proxy.journal.snapshot import SnapshotReader

logger = logging.getLogger(__name__)

STEP: Final = b"step"
# First bytes of what a reader sends.
UNSUBSCRIBE, SUBSCRIBE, NAME = b"\x00", b"\x01", b"\x02"
FRAMES: Final = 3  # without the signature
SILENCE_S: Final = 3.0
# Between two requests for a snapshot; the first pause again if none was needed for a while.
FIRST_PAUSE_S, MAX_PAUSE_S, CALM_S = 2.0, 10.0, 30.0
SIGNATURE_LOG_S: Final = 60.0
# A step takes about 0.1 ms. The loop serves streams between two groups of messages.
MAX_MESSAGES_PER_WAKEUP: Final = 8
MAX_SNAPSHOT_BYTES_PER_WAKEUP: Final = 64 << 10  # 1 ms
MAX_QUEUED_MESSAGES: Final = 1000
MAX_MESSAGE_BYTES: Final = 256 << 20
# An engine on a machine that disappears does not close its connection.
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 3000, 10_000
FIRST_RECONNECT_MS, MAX_RECONNECT_MS = 100, 2000


class SnapshotPauses:
    """The pauses between requests for a snapshot, longer if they follow each other."""

    def __init__(self) -> None:
        self.ends_at = -inf
        self._began_at = -inf
        self._pause_s = FIRST_PAUSE_S

    def begin(self, now: float) -> None:
        calm = now - self._began_at > CALM_S
        self._pause_s = FIRST_PAUSE_S if calm else min(2 * self._pause_s, MAX_PAUSE_S)
        self._began_at = now
        self.ends_at = now + self._pause_s * random.uniform(0.5, 1.0)

    def shorten(self) -> None:
        """Make this pause a first one."""
        self.ends_at = min(self.ends_at, self._began_at + FIRST_PAUSE_S)


class JournalSubscriber:
    """Keeps the replica of one engine current; call `check_silence` several times a second."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        worker: str,
        *,
        key: bytes | None,
        clock: Callable[[], float],
    ) -> None:
        """Connect; raise `zmq.ZMQError` on failure."""
        self.endpoint = endpoint
        self.key = key
        self.journal = EngineJournal()
        self.bad_signatures = 0
        self.up = False
        self._name = f"worker {worker}: the journal at {endpoint}"
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._current_at = clock()  # last time when the replica had all messages
        self._pauses = SnapshotPauses()
        self._snapshot_topic: bytes | None = None
        self._snapshot: SnapshotReader | None = None  # arrived, and not read completely
        self._planned: asyncio.Handle | None = None  # the next call of `read`
        self._logged_late = False
        self._signature_logged_at = -inf
        self._logged_run: bytes | None = None  # with a malformed message
        self._socket = context.socket(zmq.XSUB)
        try:
            self._open()
            self._monitor = ConnectionMonitor(self._socket, self._note_opened, self._note_ended)
        except zmq.ZMQError:
            self._socket.close(linger=0)
            raise
        self._fd: int = self._socket.FD
        self._loop.add_reader(self._fd, self.read)
        self._request_snapshot(clock())

    def _open(self) -> None:
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.RCVHWM, MAX_QUEUED_MESSAGES),
            (zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES),
            (zmq.HEARTBEAT_IVL, HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS),
            (zmq.RECONNECT_IVL, FIRST_RECONNECT_MS),
            (zmq.RECONNECT_IVL_MAX, MAX_RECONNECT_MS),
            (zmq.IPV6, int(self.endpoint.startswith("tcp://["))),
        ):
            self._socket.setsockopt(option, value)
        self._socket.connect(self.endpoint)
        self._send(SUBSCRIBE + STEP)

    def name(self, request_id: str, name: bytes) -> None:
        """Name a request for all readers of the journal; without a connection it gets no name."""
        if self._socket.closed:
            return
        message = NAME + encode_name(request_id, name)
        if self.key is not None:
            message += hmac.digest(self.key, message, "sha256")
        self._send(message)
        self._plan_read()
        self.journal.expect(request_id, name)

    def _send(self, message: bytes) -> None:
        with suppress(zmq.Again):
            self._socket.send(message, zmq.NOBLOCK)

    def close(self) -> None:
        if not self._socket.closed:
            self._monitor.close()
            self._loop.remove_reader(self._fd)
            self._socket.close(linger=0)

    def _note_opened(self) -> None:
        """Ask for a snapshot soon: the steps before the connection are missing."""
        self._pauses.shorten()

    def _note_ended(self) -> None:
        self.read_all()
        self._snapshot = None
        if self.up:
            self._lose("the connection ended")

    def check_silence(self, now: float) -> None:
        """Note silence, and ask for a snapshot if one is needed."""
        if now - self._current_at > SILENCE_S:
            self.read()  # the loop may have been busy
        late = now - self._current_at > SILENCE_S
        if late and not self._logged_late:
            self._log_late()
        if late or not self.journal.exact:
            self._request_snapshot(now)

    def _log_late(self) -> None:
        if self.up:
            what = "message" if self.journal.exact else "snapshot"
            self._lose(f"no {what} for {SILENCE_S:.0f} s")
        else:  # the engine may still be loading
            self._logged_late = True
            logger.info("%s is not read yet: no snapshot for %.0f s", self._name, SILENCE_S)

    def _lose(self, why: str) -> None:
        self.up = False
        self._logged_late = True
        logger.warning("%s is lost: %s", self._name, why)

    def _request_snapshot(self, now: float) -> None:
        """Subscribe to a snapshot, unless that was done a short time ago."""
        if now < self._pauses.ends_at or self._snapshot is not None:
            return
        self._pauses.begin(now)
        self._unsubscribe()
        self._snapshot_topic = b"snapshot/" + secrets.token_hex(8).encode()
        self._send(SUBSCRIBE + self._snapshot_topic)
        self._plan_read()

    def _unsubscribe(self) -> None:
        if self._snapshot_topic is not None:
            self._send(UNSUBSCRIBE + self._snapshot_topic)
            self._snapshot_topic = None
            self._plan_read()

    def _plan_read(self) -> None:
        if self._planned is None:
            self._planned = self._loop.call_soon(self.read)

    def read(self) -> None:
        """Read what has arrived, in parts."""
        if self._planned is not None:
            self._planned.cancel()
            self._planned = None
        if self._read_part():
            self._plan_read()

    def read_all(self) -> None:
        """Read what has arrived, at once."""
        while self._read_part():
            pass

    def _read_part(self) -> bool:
        """Read some messages; return whether there may be more."""
        if self._socket.closed:
            return False
        for _ in range(MAX_MESSAGES_PER_WAKEUP):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            self._handle_message(frames)
        return True

    def _handle_message(self, frames: list[bytes]) -> None:
        now = self.journal.now = self._clock()
        if self.key is not None and not is_signed(frames, self.key):
            self._note_bad_signature(now)
            return
        try:
            exact = self._apply(frames)
        except MalformedMessageError as error:
            exact = self._log_malformed(frames[1][:RUN_BYTES] if len(frames) > 1 else b"", error)
        self._check_current(now, exact=exact)

    def _apply(self, frames: list[bytes]) -> bool:
        """Apply a message; return whether the replica is exact."""
        if len(frames) < FRAMES:
            raise MalformedMessageError(f"a message has {len(frames)} frames, not {FRAMES}")
        topic, position, payload = frames[0], read_position(frames[1]), frames[2]
        if topic == STEP:
            return self.journal.apply_step(position, decode_step(payload))
        exact = self.journal.contains(position)
        if topic == self._snapshot_topic:
            self._unsubscribe()
            if not exact:
                self._snapshot = SnapshotReader(position, payload, self.journal.max_tokens)
                self._loop.call_soon(self._read_snapshot)
        return exact

    def _read_snapshot(self) -> None:
        """Read a part of the snapshot; apply it when it is complete."""
        if (snapshot := self._snapshot) is None or self._socket.closed:
            return
        try:
            if not snapshot.read(MAX_SNAPSHOT_BYTES_PER_WAKEUP):
                self._loop.call_soon(self._read_snapshot)
                return
            exact = self.journal.apply_snapshot(snapshot)
        except MalformedMessageError as error:
            exact = self._log_malformed(snapshot.position.run, error)
        self._snapshot = None
        self._check_current(self._clock(), exact=exact)

    def _check_current(self, now: float, *, exact: bool) -> None:
        """Note that the replica is current, or ask for a snapshot."""
        if not exact:
            self._request_snapshot(now)
            return
        self._current_at = now
        self._logged_late = False
        if not self.up:
            self.up = True
            logger.info("%s is read: %d requests", self._name, len(self.journal.requests))

    def _log_malformed(self, run: bytes, error: MalformedMessageError) -> bool:
        """Log the first malformed message of a run; return False."""
        if run != self._logged_run:
            self._logged_run = run
            logger.error("%s has a message that can't be read: %s", self._name, error)
        self.journal.mark_incomplete()
        return False

    def _note_bad_signature(self, now: float) -> None:
        self.bad_signatures += 1
        if now - self._signature_logged_at > SIGNATURE_LOG_S:
            self._signature_logged_at = now
            logger.warning(
                "%s has a wrong signature in %d messages; router.journal.key_file and the "
                "engine's journal.key_file must have the same content",
                self._name,
                self.bad_signatures,
            )


def is_signed(frames: list[bytes], key: bytes) -> bool:
    """Return whether the fourth frame is the signature of the first three."""
    if len(frames) != FRAMES + 1:
        return False
    digest = hmac.digest(key, b"".join(frames[:FRAMES]), "sha256")
    return hmac.compare_digest(digest, frames[FRAMES])
