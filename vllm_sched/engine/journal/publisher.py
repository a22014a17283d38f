"""The journal's socket: step messages, and snapshots on request.

A lock guards the journal: the engine holds it during its own steps. A thread has the socket: it
encodes and sends the engine's messages, and answers readers. A send never blocks: a reader that is
too slow misses messages.
"""

from __future__ import annotations

import hmac
import logging
import os
import threading
import time
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Final

import msgspec
import zmq

from vllm_sched.engine.journal.journal import EMPTY, NO_OUTPUTS, Journal, Outputs, StepMessage
from vllm_sched.errors import UsageError

logger = logging.getLogger("vllm.vllm_sched")

STEP: Final = b"step"
SNAPSHOT: Final = b"snapshot/"
# First bytes of what readers send; ZeroMQ defines those of subscriptions.
UNSUBSCRIBE, NAME = b"\x00", b"\x02"
SIGNATURE_BYTES: Final = 32
MAX_NAME_BYTES: Final = 65_536
MAX_FRAME_BYTES: Final = MAX_NAME_BYTES + 4096
MAX_READ_PER_TICK: Final = 256  # frames
MIN_KEY_BYTES: Final = 16
# Messages kept for a slow reader.
MAX_QUEUED: Final = 1000
TICK_S: Final = 0.05
HEARTBEAT_S: Final = 1.0
# A snapshot may take milliseconds of the engine's time.
SNAPSHOT_PAUSE_S: Final = 0.5
MAX_TOPIC_BYTES: Final = 64
MAX_REQUESTED_SNAPSHOTS: Final = 256


def read_key(file: str | None) -> bytes | None:
    """Return the secret in a file, without the whitespace around it."""
    if file is None:
        return None
    try:
        key = Path(file).read_bytes().strip()
    except OSError as error:
        raise UsageError(
            f"journal.key_file={file} can't be read: {error.strerror}; "
            "correct the path, or leave it out"
        ) from None
    if len(key) < MIN_KEY_BYTES:
        raise UsageError(
            f"journal.key_file={file} has {len(key)} bytes; a key has at least "
            f"{MIN_KEY_BYTES}; write a longer one"
        )
    return key


class Publisher:
    def __init__(self, endpoint: str, key: bytes | None, journal: Journal) -> None:
        self.lock = threading.RLock()
        self.journal = journal
        self._key = key
        self._run_id = os.urandom(8)
        self._last_number = 0  # of the last step message
        self._unsent: SimpleQueue[tuple[int, StepMessage] | None] = SimpleQueue()
        self._sent_at = time.monotonic()
        self._snapshot_topics: set[bytes] = set()  # requested, not sent yet
        self._snapshot_sent_at = -SNAPSHOT_PAUSE_S
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode_name = msgspec.msgpack.Decoder(tuple[str, bytes]).decode
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.XPUB)
        self._socket.setsockopt(zmq.SNDHWM, MAX_QUEUED)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise UsageError(
                f"journal.endpoint={endpoint}: the engine can't listen there: {error}; "
                "choose a free port or path"
            ) from None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="journal", daemon=True)
        self._thread.start()

    def publish_step(self, outputs: Outputs = NO_OUTPUTS) -> None:
        """Have what happened since the last call sent."""
        with self.lock:
            message = self.journal.pop_step(outputs)
            if message is not None and not self._stopped.is_set():
                self._enqueue(message)

    def stop(self) -> None:
        """Close the socket soon, without waiting for it."""
        self._stopped.set()
        self._unsent.put(None)

    def close(self) -> None:
        """Close the socket; the caller does not hold the lock."""
        self.stop()
        self._thread.join()

    def _enqueue(self, message: StepMessage) -> None:
        self._last_number += 1
        self._unsent.put((self._last_number, message))

    def _serve(self) -> None:
        try:
            answered_at = time.monotonic()
            while self._send_next():
                now = time.monotonic()
                if now - answered_at >= TICK_S:
                    answered_at = now
                    self._answer_readers(now)
        except Exception:
            logger.exception("the journal is off after an error; please report it")
            self._stopped.set()
        self._context.destroy(linger=0)

    def _send_next(self) -> bool:
        """Send the next message if there is one soon; return whether more may come."""
        try:
            unsent = self._unsent.get(timeout=TICK_S)
        except Empty:
            return True
        if unsent is None:
            return False
        number, message = unsent
        self._send(STEP, number, self._encode(message))
        self._sent_at = time.monotonic()
        return True

    def _send(self, topic: bytes, number: int, payload: bytes) -> None:
        frames = [topic, self._run_id + number.to_bytes(8, "big"), payload]
        if self._key is not None:
            frames.append(hmac.digest(self._key, b"".join(frames), "sha256"))
        self._socket.send_multipart(frames, zmq.NOBLOCK)

    def _answer_readers(self, now: float) -> None:
        with self.lock:
            if self._read_messages():
                self.publish_step()
            if now - self._sent_at >= HEARTBEAT_S:
                self._enqueue(self.journal.pop_step() or EMPTY)
            if not self._snapshot_topics or now - self._snapshot_sent_at < SNAPSHOT_PAUSE_S:
                return
            self.publish_step()
            number, rows = self._last_number, self.journal.snapshot()
        payload = self._encode((self.journal.block_tokens, rows))
        self._snapshot_sent_at = now
        for topic in self._snapshot_topics:
            self._send(topic, number, payload)
        self._snapshot_topics.clear()

    def _read_messages(self) -> bool:
        """Read subscriptions to snapshots, and names of requests; return whether names came."""
        named = False
        for _ in range(MAX_READ_PER_TICK):
            if not self._socket.poll(0):
                break
            message: bytes = self._socket.recv(zmq.NOBLOCK)
            kind, topic = message[:1], message[1:]
            if kind == NAME:
                self._read_name(message)
                named = True
            elif kind == UNSUBSCRIBE:
                self._snapshot_topics.discard(topic)
            elif self._may_request(topic):
                self._snapshot_topics.add(topic)
        return named

    def _may_request(self, topic: bytes) -> bool:
        few = len(self._snapshot_topics) < MAX_REQUESTED_SNAPSHOTS
        return few and topic.startswith(SNAPSHOT) and len(topic) <= MAX_TOPIC_BYTES

    def _read_name(self, message: bytes) -> None:
        if self._key is not None:
            message, signature = message[:-SIGNATURE_BYTES], message[-SIGNATURE_BYTES:]
            if not hmac.compare_digest(signature, hmac.digest(self._key, message, "sha256")):
                return
        try:
            client_id, name = self._decode_name(message[1:])
        except (msgspec.DecodeError, UnicodeDecodeError):
            return
        if len(name) <= MAX_NAME_BYTES:
            self.journal.name(client_id, name)
