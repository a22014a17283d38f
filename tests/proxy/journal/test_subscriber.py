"""The connection to an engine's journal, with a real socket on both sides."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest
import zmq

from proxy.journal.messages import Position
from proxy.journal.subscriber import (
    CALM_S,
    FIRST_PAUSE_S,
    MAX_MESSAGES_PER_WAKEUP,
    MAX_PAUSE_S,
    SIGNATURE_LOG_S,
    SILENCE_S,
    JournalSubscriber,
)
from tests.proxy.journal.simulated_engine import FakePublisher, SimulatedEngine, replica_of
from tests.proxy.wire.site import eventually

EVENT_LOOPS = ("asyncio", "uvloop")
KEY = b"0123456789abcdef"
POLL_MS = 60_000
LOGGER = "proxy.journal.subscriber"


class JournalSite:
    """A subscriber, its clock, and the engine that it reads."""

    def __init__(self, publisher: FakePublisher, key: bytes | None = None) -> None:
        self.now = 1000.0
        self.engine = SimulatedEngine(Random(1))
        self.publisher = publisher
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.subscriber = JournalSubscriber(
            self.context, publisher.endpoint, "a", key=key, clock=lambda: self.now
        )
        self.journal = self.subscriber.journal

    @property
    def is_current(self) -> bool:
        """Whether the replica has the engine's last step."""
        return self.journal.exact and replica_of(self.journal) == self.engine.requests()

    def has_read_all(self) -> bool:
        """Return whether every step and snapshot that was sent is applied or kept."""
        kept = self.journal._kept
        last = kept[-1][0].number if kept else self.journal.number
        waits = self.subscriber._snapshot_topic or self.subscriber._snapshot
        return last == self.engine.number and not waits

    def close(self) -> None:
        self.subscriber.close()
        self.context.destroy(linger=0)

    async def until(self, what: Callable[[], object]) -> None:
        """Serve requests for snapshots until a condition holds."""

        def served() -> object:
            self.publisher.serve(self.engine)
            return what()

        await eventually(served)

    async def connected(self) -> None:
        await self.until(lambda: self.subscriber.up)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.publisher.step(self.engine)

    def skip(self) -> None:
        """Take a step of which the message is lost."""
        self.engine.step()

    def look(self, after_s: float) -> None:
        self.now += after_s
        self.subscriber.check_silence(self.now)


@contextmanager
def publishing(endpoint: str = "tcp://127.0.0.1:*", **settings: object) -> Iterator[FakePublisher]:
    publisher = FakePublisher(endpoint, **settings)  # type: ignore[arg-type]
    try:
        yield publisher
    finally:
        publisher.close()


@contextmanager
def reading(publisher: FakePublisher, key: bytes | None = None) -> Iterator[JournalSite]:
    site = JournalSite(publisher, key)
    try:
        yield site
    finally:
        site.close()


@pytest.fixture
async def site() -> AsyncIterator[JournalSite]:
    with publishing() as publisher, reading(publisher) as made:
        yield made


async def test_replica_follows_the_engine(
    site: JournalSite, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    site.engine.step()
    await site.connected()
    for _ in range(20):
        site.step(10)
        await site.until(lambda: site.is_current)
    assert len(site.publisher.asked) == 1
    (line,) = caplog.messages
    assert line.startswith(f"worker a: the journal at {site.publisher.endpoint} is read: ")


@pytest.mark.parametrize(
    ("endpoint", "key", "readers_key"),
    [
        ("ipc://{}/journal", None, None),
        ("tcp://127.0.0.1:*", KEY, KEY),
        ("tcp://127.0.0.1:*", KEY, None),
    ],
    ids=["unix socket", "signed", "signed, without a key"],
)
async def test_other_sockets_and_signed_messages_are_read(
    tmp_path: Path, endpoint: str, key: bytes | None, readers_key: bytes | None
) -> None:
    endpoint = endpoint.format(tmp_path)
    with publishing(endpoint, key=key) as publisher, reading(publisher, readers_key) as site:
        await site.connected()
        site.step(5)
        await site.until(lambda: site.is_current)
        assert site.subscriber.bad_signatures == 0


async def test_long_backlog_is_read_in_parts(site: JournalSite) -> None:
    """The loop runs other callbacks between two groups of messages."""
    await site.connected()
    numbers: set[int] = set()
    site.step(500)
    last = site.engine.number
    while site.journal.number < last:
        numbers.add(site.journal.number)
        await asyncio.sleep(0)
    assert len(numbers) > 20
    assert site.is_current


async def test_gap_is_closed_by_a_snapshot(site: JournalSite) -> None:
    await site.connected()
    site.now += CALM_S + 1
    site.step(3)
    site.skip()
    site.step(3)
    await site.until(lambda: site.is_current)
    assert site.journal.gaps == 1
    assert len(set(site.publisher.asked)) == 2


async def test_snapshots_are_asked_for_at_growing_intervals(site: JournalSite) -> None:
    """An engine that loses messages all the time does not only write snapshots."""
    await site.connected()
    asked = []
    for _ in range(120):
        site.skip()
        site.step()
        await site.until(site.has_read_all)
        site.look(1.0)
        await site.until(site.has_read_all)
        asked.append(len(site.publisher.asked))
    assert 120 / MAX_PAUSE_S <= asked[-1] <= 30


async def test_silence_is_a_loss_and_asks_again(
    site: JournalSite, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    await site.connected()
    site.look(SILENCE_S - 0.1)
    assert site.subscriber.up
    site.look(0.2)
    assert not site.subscriber.up
    assert caplog.messages[-1].endswith("is lost: no message for 3 s")
    assert site.journal.exact  # no step was missed
    site.step()
    await site.until(lambda: site.subscriber.up)
    await site.until(lambda: len(site.publisher.asked) == 2)
    await site.until(lambda: site.is_current)
    assert site.journal.gaps == 0
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING", "INFO"]


async def test_engine_that_is_not_there_is_logged_once(
    site: JournalSite, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    for _ in range(20):
        site.look(1.0)
    (record,) = caplog.records
    assert (record.levelname, record.message) == (
        "INFO",
        f"worker a: the journal at {site.publisher.endpoint} is not read yet: no snapshot for 3 s",
    )


async def test_messages_that_wait_are_read_before_a_loss(site: JournalSite) -> None:
    """The event loop itself may have been busy for some seconds."""
    await site.connected()
    site.step()
    assert site.subscriber._socket.poll(POLL_MS)  # without the loop
    site.look(SILENCE_S + 1)
    assert site.subscriber.up


async def test_restarted_engine_is_recognised(site: JournalSite) -> None:
    await site.connected()
    site.step(5)
    await site.until(lambda: site.is_current)
    site.engine = SimulatedEngine(Random(2))
    site.step(3)
    site.now += CALM_S + 1
    await site.until(lambda: site.is_current)
    assert site.journal.run == site.engine.run
    assert site.journal.gaps == 0


async def test_engine_that_comes_back_on_its_port_is_read_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, LOGGER)
    with publishing() as publisher:
        endpoint = publisher.endpoint
        site = JournalSite(publisher)
        await site.connected()
    try:
        await eventually(lambda: not site.subscriber.up)
        site.look(SILENCE_S + 1)
        (line,) = caplog.messages
        assert line.endswith("is lost: the connection ended")
        with publishing(endpoint) as site.publisher:
            site.engine = SimulatedEngine(Random(3))
            site.engine.step()
            site.look(MAX_PAUSE_S)  # the first message may be the snapshot
            await site.until(lambda: site.subscriber.up)
            assert site.journal.run == site.engine.run
            site.step(5)
            await site.until(lambda: site.is_current)
    finally:
        site.close()


async def test_messages_from_before_the_end_do_not_bring_a_connection_back() -> None:
    with publishing() as publisher, reading(publisher) as site:
        await site.connected()
        site.step(5 * MAX_MESSAGES_PER_WAKEUP)
        # Without the loop, so that the end is known before the messages are read.
        publisher.socket.close(linger=POLL_MS)
        assert site.subscriber._monitor._socket.poll(POLL_MS)
        site.subscriber._monitor._read()
        for _ in range(10):
            await asyncio.sleep(0)
        assert site.journal.number == site.engine.number
        assert not site.subscriber.up


async def test_new_connection_has_a_snapshot_soon() -> None:
    """Also one of many that end: only too many gaps on one connection make the pauses longer."""
    with publishing() as publisher:
        endpoint = publisher.endpoint
        site = JournalSite(publisher)
        await site.connected()
    try:
        for _ in range(4):
            await eventually(lambda: not site.subscriber.up)
            with publishing(endpoint) as site.publisher:
                site.step()
                site.journal.mark_incomplete()
                await eventually(
                    lambda: site.subscriber._pauses.ends_at <= site.now + FIRST_PAUSE_S
                )
                site.look(FIRST_PAUSE_S)
                await site.until(lambda: site.is_current)
    finally:
        site.close()


@pytest.mark.parametrize("key", [None, b"another key, with enough bytes"])
async def test_wrong_signatures_are_dropped_and_logged_once_a_minute(
    key: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    with publishing(key=key) as publisher, reading(publisher, KEY) as site:
        await site.until(lambda: publisher.asked)
        site.step(10)
        await site.until(lambda: site.subscriber.bad_signatures >= 10)
        assert len(caplog.messages) == 1
        assert "wrong signature" in caplog.messages[0]
        assert not site.subscriber.up
        assert not site.journal.requests
        site.now += SIGNATURE_LOG_S + 1
        site.step(2)
        seen = site.subscriber.bad_signatures
        await site.until(lambda: site.subscriber.bad_signatures >= seen)
        await site.until(lambda: len(caplog.messages) == 2)
        publisher.key = KEY
        site.look(MAX_PAUSE_S)
        await site.until(lambda: site.subscriber.up)


async def test_signature_covers_topic_position_and_payload() -> None:
    with publishing(key=KEY) as publisher, reading(publisher, KEY) as site:
        await site.connected()
        frames: list[bytes] = [b"step", b"p" * 16, b"payload"]
        for index in range(3):
            publisher.send(b"step", Position(b"p" * 8, 1), b"payload")
            forged = [*frames, b"s" * 32]
            forged[index] = b"step!" if index == 0 else b"q" * 16
            publisher.socket.send_multipart(forged)
        await site.until(lambda: site.subscriber.bad_signatures == 3)


@pytest.mark.parametrize(
    "frames",
    [
        [b"step"],
        [b"step", b"p" * 16],
        [b"step", b"short", b"\x90"],
        [b"step", b"p" * 16, b""],
        [b"step", b"p" * 16, b"\xc1" * 50],
        [b"step", b"p" * 16, os.urandom(5000)],
        [b"steppe", b"p" * 16, b"\x90", b"", b""],
    ],
)
async def test_malformed_message_is_logged_once_and_followed_by_a_snapshot(
    site: JournalSite, frames: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    await site.connected()
    caplog.clear()
    site.now += CALM_S + 1
    for _ in range(3):
        site.publisher.socket.send_multipart(frames)
    site.step()
    await site.until(lambda: len(site.publisher.asked) == 2 or frames[0] == b"steppe")
    site.look(MAX_PAUSE_S)
    await site.until(lambda: site.is_current)
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == (frames[0] == b"step")


async def test_malformed_snapshot_is_asked_for_again(
    site: JournalSite, caplog: pytest.LogCaptureFixture
) -> None:
    await eventually(lambda: site.publisher.socket.get(zmq.EVENTS) & zmq.POLLIN)
    await site.until(lambda: site.publisher.asked)
    good = site.engine.snapshot
    site.engine.snapshot = lambda: [16, "rows"]  # type: ignore[method-assign]
    site.look(MAX_PAUSE_S)
    await site.until(lambda: caplog.messages or site.subscriber.up)
    site.engine.snapshot = good  # type: ignore[method-assign]
    site.look(MAX_PAUSE_S)
    await site.connected()


async def test_slow_reader_misses_messages_and_recovers() -> None:
    """The engine's queue is bounded, and so is the reader's."""
    with publishing(hwm=10) as publisher, reading(publisher) as site:
        await site.connected()
        payload = [[], [], False, [], [], [], [], [], [], [], []]
        padding = [*payload, b"x" * 100_000]
        for _ in range(3000):
            site.engine.number += 1
            publisher.send(b"step", site.engine.position, padding)
        site.now += CALM_S + 1
        site.step()
        await site.until(lambda: site.journal.gaps)
        site.step()
        await site.until(lambda: site.is_current)


async def test_closing_leaves_nothing_open(site: JournalSite) -> None:
    await site.connected()
    site.step(100)
    site.subscriber.close()
    site.subscriber.close()
    await asyncio.sleep(0)  # a reading that was planned before
    await site.until(lambda: True)
    assert site.subscriber._socket.closed
    assert not asyncio.get_running_loop().remove_reader(site.subscriber._fd)


async def test_address_that_cannot_be_connected_to_is_an_error() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with pytest.raises(zmq.ZMQError):
        JournalSubscriber(context, "udp://nowhere", "a", key=None, clock=lambda: 0.0)
    context.destroy(linger=0)
