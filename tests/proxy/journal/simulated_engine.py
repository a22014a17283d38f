"""An engine that does random things, and publishes them as docs/journal.md says."""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field
from random import Random
from typing import Any

import msgspec
import zmq

from proxy.journal.engine_state import MAX_STREAM_TOKENS, EngineJournal
from proxy.journal.messages import JournalStep, Position
from proxy.journal.snapshot import SnapshotReader

NAME, SIGNATURE_BYTES = 2, 32
Requests = dict[int, tuple[str, int, bytes, int, bool, list[int]]]


@dataclass
class KnownRequest:
    """A request in the simulated engine."""

    request_id: str
    prompt_tokens: int
    name: bytes = b""
    resident: int = 0
    running: bool = True
    tokens: list[int] = field(default_factory=list)


class SimulatedEngine:
    """The truth that a replica must equal."""

    def __init__(self, random: Random, first: int = 1) -> None:
        self.random = random
        self.run = random.randbytes(8)
        self.number = 0
        self.known: dict[int, KnownRequest] = {}
        self._next = first

    @property
    def position(self) -> Position:
        return Position(self.run, self.number)

    def step(self) -> list[Any]:
        """Do something, and return the payload of its message."""
        random = self.random
        arrived = []
        for _ in range(random.choice((0, 0, 1, 3))):
            number, self._next = self._next, self._next + 1
            request = KnownRequest(f"chatcmpl-x{number}-{number:08x}", random.randrange(1, 5000))
            self.known[number] = request
            arrived.append([number, request.request_id, request.prompt_tokens])
        named = []
        for number, request in self.known.items():
            if not request.name and random.random() < 0.2:
                request.name = random.randbytes(5)
                named.append([number, request.name])
        cleared = random.random() < 0.05
        if cleared:
            for request in self.known.values():
                request.resident = 0
        evicted, resident = [], []
        for number, request in self.known.items():
            if request.resident and random.random() < 0.2:
                first = random.randrange(0, 8) * 16
                evicted += [number, first, first + 32]
                request.resident = min(request.resident, first)
        for number, request in self.known.items():
            if random.random() < 0.2:
                request.resident = random.randrange(0, 8) * 16
                resident += [number, request.resident]
        numbers, counts, tokens = [], [], []
        drafts = random.random() < 0.3
        for number, request in self.known.items():
            if request.running and random.random() < 0.8:
                new = [
                    random.randrange(200_000) for _ in range(random.randint(1, 4) if drafts else 1)
                ]
                request.tokens += new
                numbers.append(number)
                counts.append(len(new))
                tokens += new
        running = [number for number, request in self.known.items() if request.running]
        ended = [[n, random.choice(("stop", "length"))] for n in running if random.random() < 0.1]
        for number, _ in ended:
            self.known[number].running = False
            self.known[number].tokens = []
        forgotten = [
            number
            for number, request in self.known.items()
            if not request.running and (not request.resident or random.random() < 0.1)
        ]
        for number in forgotten:
            del self.known[number]
        self.number += 1
        if len(tokens) == len(numbers):
            counts = []
        return [
            arrived, named, cleared, evicted, resident, numbers, counts, tokens, [], ended,
            forgotten,
        ]  # fmt: skip

    def snapshot(self) -> list[Any]:
        """Return the payload of a snapshot."""
        return [16, [[number, *row] for number, row in self.requests().items()]]

    def requests(self) -> Requests:
        """Return all known requests as `replica_of` does."""
        return {
            number: (r.request_id, r.prompt_tokens, r.name, r.resident, r.running, list(r.tokens))
            for number, r in self.known.items()
        }


def replica_of(journal: EngineJournal) -> Requests:
    """Return all requests of a replica."""
    return {
        number: (r.request_id, r.prompt_tokens, r.name, r.resident, r.running, r.tokens.tolist())
        for number, r in journal.requests.items()
    }


def read_step(payload: list[Any]) -> JournalStep:
    return msgspec.convert(payload, JournalStep)


def read_snapshot(
    position: Position, payload: list[Any], max_tokens: int = MAX_STREAM_TOKENS
) -> SnapshotReader:
    snapshot = SnapshotReader(position, msgspec.msgpack.encode(payload), max_tokens)
    assert snapshot.read()
    return snapshot


class FakePublisher:
    """The engine's socket. It answers readers when `serve` is called."""

    def __init__(self, endpoint: str, key: bytes | None = None, hwm: int = 1000) -> None:
        self.key = key
        self.asked: list[bytes] = []  # topics of all requests for snapshots
        self.names: list[tuple[str, bytes]] = []  # given by readers
        self.is_read = False
        self._wanted: set[bytes] = set()
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.XPUB)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDHWM, hwm)
        self.socket.bind(endpoint)
        self.endpoint: str = self.socket.LAST_ENDPOINT.decode().rstrip("\0")

    def close(self) -> None:
        self._context.destroy(linger=0)

    def send(self, topic: bytes, position: Position, payload: object) -> None:
        body = payload if isinstance(payload, bytes) else msgspec.msgpack.encode(payload)
        frames = [topic, position.run + position.number.to_bytes(8, "big"), body]
        if self.key is not None:
            frames.append(hmac.digest(self.key, b"".join(frames), "sha256"))
        self.socket.send_multipart(frames, zmq.NOBLOCK)

    def step(self, engine: SimulatedEngine) -> None:
        payload = engine.step()
        self.send(b"step", engine.position, payload)

    def serve(self, engine: SimulatedEngine) -> None:
        """Read subscriptions, and send the snapshots that are wanted."""
        while self.socket.get(zmq.EVENTS) & zmq.POLLIN:
            message = self.socket.recv()
            if message[0] == NAME:
                signed = len(message) - (SIGNATURE_BYTES if self.key is not None else 0)
                assert self.key is None or message[signed:] == hmac.digest(
                    self.key, message[:signed], "sha256"
                )
                request_id, name = msgspec.msgpack.decode(message[1:signed])
                self.names.append((request_id, name))
            elif message[1:] == b"step":
                self.is_read = message[0] == 1
            elif message[1:].startswith(b"snapshot/"):
                if message[0]:
                    self.asked.append(message[1:])
                    self._wanted.add(message[1:])
                else:
                    self._wanted.discard(message[1:])
        for topic in self._wanted:
            self.send(topic, engine.position, engine.snapshot())
        self._wanted.clear()
