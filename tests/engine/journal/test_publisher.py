"""The journal's socket, read as docs/journal.md says."""

from __future__ import annotations

import hmac
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from vllm.v1.core.block_pool import BlockPool

from tests.engine.journal.reader import CacheReader
from tests.engine.schedulers import base_config, drain, make_request, make_scheduler, step
from vllm_sched import SyncPolicyScheduler
from vllm_sched.engine.journal import publisher as publishing
from vllm_sched.engine.journal.journal import StepMessage
from vllm_sched.errors import UsageError

DEADLINE_S = 60.0


class Socket:
    """A subscriber's socket."""

    def __init__(self, endpoint: str, queue: int = 1000) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.SUB)
        self.socket.setsockopt(zmq.RCVHWM, queue)
        self.socket.connect(endpoint)

    def subscribe(self, topic: bytes) -> None:
        self.socket.subscribe(topic)

    def receive(self) -> list[bytes]:
        assert self.socket.poll(DEADLINE_S * 1000), "no message came"
        return self.socket.recv_multipart()

    def until(self, topic: bytes) -> list[bytes]:
        """Return the next message with a topic."""
        while True:
            if (frames := self.receive())[0] == topic:
                return frames

    def close(self) -> None:
        self.context.destroy(linger=0)


def number_of(frames: list[bytes]) -> int:
    return int.from_bytes(frames[1][8:], "big")


def payload_of(frames: list[bytes]) -> Any:
    return msgspec.msgpack.decode(frames[2])


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/journal"


@pytest.fixture
def scheduler(endpoint: str) -> Iterator[Any]:
    made = make_scheduler({"journal": {"endpoint": endpoint}}, prefix_caching=True)
    yield made
    made.shutdown()


@pytest.fixture
def reader(scheduler: Any, endpoint: str) -> Iterator[Socket]:
    """Return a socket that gets every step from now on."""
    assert scheduler._publisher is not None
    made = Socket(endpoint)
    made.subscribe(b"step")
    made.subscribe(b"snapshot/first")
    made.until(b"snapshot/first")
    yield made
    made.close()


def test_a_late_reader_is_exact_after_a_snapshot(endpoint: str, scheduler: Any) -> None:
    done, running = make_request(100, output=3), make_request(70, output=50)
    for request in (done, running):
        scheduler.add_request(request)
    while scheduler.running or scheduler.waiting:
        step(scheduler)
        if done.is_finished():
            break
    late = Socket(endpoint)
    late.subscribe(b"step")
    late.subscribe(b"snapshot/late")
    frames = late.until(b"snapshot/late")
    block_tokens, rows = payload_of(frames)
    assert block_tokens == 16
    assert [row[:3] + row[4:6] for row in rows] == [
        [1, done.request_id, 100, 96, False], [2, running.request_id, 70, 64, True],
    ]  # fmt: skip
    assert rows[1][6] == list(running.output_token_ids)
    step(scheduler)
    following = late.until(b"step")
    assert number_of(following) == number_of(frames) + 1
    assert following[1][:8] == frames[1][:8]
    late.close()


def test_steps_are_numbered_from_one_without_a_gap(scheduler: Any, reader: Socket) -> None:
    scheduler.add_request(make_request(100, output=5))
    steps = drain(scheduler)
    assert [number_of(reader.until(b"step")) for _ in range(steps)] == [*range(1, steps + 1)]


def test_real_messages_are_applied_by_a_reader(scheduler: Any, reader: Socket) -> None:
    request = make_request(100, output=5)
    state = CacheReader({request.request_id: request._all_token_ids})
    scheduler.add_request(request)
    for _ in range(drain(scheduler)):
        state.apply(StepMessage(*payload_of(reader.until(b"step"))))
    assert state.output == {request.request_id: [7] * 5}
    assert state.cached(request._all_token_ids) == 96


def test_an_idle_engine_sends_a_message_each_second(reader: Socket) -> None:
    assert payload_of(reader.until(b"step")) == [[], [], False, *[[]] * 9]


def test_an_abort_while_idle_is_published(scheduler: Any, reader: Socket) -> None:
    from vllm.v1.request import RequestStatus

    request = make_request(20)
    scheduler.add_request(request)
    scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
    message = StepMessage(*payload_of(reader.until(b"step")))
    assert message.arrived == [[1, request.request_id, 20]]
    assert message.ended == [[1, "abort"]]


def test_messages_are_signed(tmp_path: Path, endpoint: str) -> None:
    (tmp_path / "key").write_text("0123456789abcdef\n")
    settings = {"endpoint": endpoint, "key_file": f"{tmp_path}/key"}
    scheduler = make_scheduler({"journal": settings})
    reader = Socket(endpoint)
    for topic in (b"step", b"snapshot/x"):
        reader.subscribe(topic)
        *signed, signature = reader.until(topic)
        assert signature == hmac.digest(b"0123456789abcdef", b"".join(signed), "sha256")
    reader.close()
    scheduler.shutdown()


def test_key_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    with pytest.raises(UsageError, match=r"key_file=.*key can't be read: No such file"):
        publishing.read_key(str(file))
    file.write_text("short\n")
    with pytest.raises(UsageError, match="has 5 bytes; a key has at least 16"):
        publishing.read_key(str(file))
    file.write_text("0123456789abcdef\n")
    assert publishing.read_key(str(file)) == b"0123456789abcdef"
    assert publishing.read_key(None) is None


class Naming:
    """An XSUB socket, which can also send."""

    def __init__(self, endpoint: str) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.XSUB)
        self.socket.connect(endpoint)
        self.socket.send(b"\x01step")

    def send(self, message: bytes) -> None:
        self.socket.send(message)

    def first_named(self) -> Any:
        """Return the names in the first message that has one."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            if self.socket.poll(1000) and (
                named := StepMessage(*payload_of(self.socket.recv_multipart())).named
            ):
                return named
        raise AssertionError("no request was named")

    def close(self) -> None:
        self.context.destroy(linger=0)


def naming(client_id: str, name: bytes) -> bytes:
    return b"\x02" + msgspec.msgpack.encode((client_id, name))


def test_a_reader_names_a_request(endpoint: str, scheduler: Any) -> None:
    reader = Naming(endpoint)
    no_text = b"\x02\x92\xa2\xff\xfe\xc4\x01a"
    for wrong in (b"", b"\x02", b"\x02\x91", b"\x03", no_text, naming("mine", b"x" * 66_000)):
        reader.send(wrong)
    reader.send(naming("mine", b"prefix"))
    scheduler.add_request(make_request(100, name="chatcmpl-mine-0123abcd", output=3))
    drain(scheduler)
    assert reader.first_named() == [[1, b"prefix"]]
    reader.close()


def test_a_name_is_reported_at_once_by_an_idle_engine(
    endpoint: str, scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "HEARTBEAT_S", 1e9)
    scheduler.add_request(make_request(100, name="chatcmpl-mine-0123abcd", output=3))
    drain(scheduler)
    reader = Naming(endpoint)
    reader.send(naming("mine", b"prefix"))
    assert reader.first_named() == [[1, b"prefix"]]
    reader.close()


def test_a_huge_frame_closes_its_connection_only(endpoint: str, reader: Socket) -> None:
    hostile = Naming(endpoint)
    hostile.send(b"\x02" + b"x" * 10_000_000)
    reader.subscribe(b"snapshot/after")
    reader.until(b"snapshot/after")
    hostile.close()


def test_names_are_signed_if_there_is_a_key(tmp_path: Path, endpoint: str) -> None:
    key = b"0123456789abcdef"
    (tmp_path / "key").write_bytes(key)
    settings = {"endpoint": endpoint, "key_file": f"{tmp_path}/key"}
    scheduler = make_scheduler({"journal": settings})
    scheduler.add_request(make_request(100, name="chatcmpl-mine-0123abcd", output=3))
    reader = Naming(endpoint)
    reader.send(naming("mine", b"unsigned"))
    reader.send(naming("mine", b"wrong") + b"0" * 32)
    message = naming("mine", b"signed")
    reader.send(message + hmac.digest(key, message, "sha256"))
    assert reader.first_named() == [[1, b"signed"]]
    reader.close()
    scheduler.shutdown()


def test_a_stalled_reader_misses_messages_and_stops_nothing(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "MAX_QUEUED", 5)
    scheduler = make_scheduler({"journal": {"endpoint": endpoint}}, max_model_len=2000)
    stalled = Socket(endpoint, queue=5)
    stalled.subscribe(b"step")
    stalled.subscribe(b"snapshot/x")
    stalled.until(b"snapshot/x")
    scheduler.add_request(make_request(10, output=1500))
    steps = drain(scheduler)
    numbers = []
    while stalled.socket.poll(500):
        frames = stalled.socket.recv_multipart()
        numbers.append(number_of(frames))
        if number_of(frames) > steps:  # the first message of the idle engine
            break
    assert numbers == sorted(numbers)
    assert len(numbers) < steps
    stalled.subscribe(b"snapshot/y")
    assert number_of(stalled.until(b"snapshot/y")) >= steps
    stalled.close()
    scheduler.shutdown()


@pytest.mark.usefixtures("scheduler")
def test_snapshots_have_a_pause_between_them(endpoint: str) -> None:
    readers = [Socket(endpoint) for _ in range(4)]
    began = time.monotonic()
    for turn in range(2):
        topic = b"snapshot/%d" % turn
        for reader in readers:
            reader.subscribe(topic)
        for reader in readers:
            reader.until(topic)
    assert time.monotonic() - began >= publishing.SNAPSHOT_PAUSE_S
    for reader in readers:
        reader.close()


def test_an_endpoint_in_use_is_a_usage_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(UsageError, match=f"endpoint={address}: .* choose a free port"):
            make_scheduler({"journal": {"endpoint": address}})


def test_the_endpoint_is_free_after_shutdown(endpoint: str) -> None:
    for _ in range(2):
        make_scheduler({"journal": {"endpoint": endpoint}}).shutdown()


def test_each_rank_has_its_endpoint(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    class Opened(publishing.Publisher):
        def __init__(self, endpoint: str, *args: Any) -> None:
            opened.append(endpoint)
            super().__init__(endpoint, *args)

    monkeypatch.setattr("vllm_sched.engine.journal.scheduler.Publisher", Opened)
    monkeypatch.setattr(base_config().parallel_config, "data_parallel_index", 2)
    make_scheduler({"journal": {"endpoint": endpoint}}).shutdown()
    assert opened == [f"{endpoint}_dp2"]


def test_a_failure_turns_the_journal_off_and_the_engine_goes_on(scheduler: Any) -> None:
    publisher = scheduler._publisher
    publisher.journal._prefixes.record_stored = None
    scheduler.add_request(make_request(100, output=3))
    drain(scheduler)
    assert scheduler._publisher is None
    assert type(scheduler.kv_cache_manager.block_pool) is BlockPool
    publisher.close()
    with pytest.raises(zmq.ZMQError):
        publisher._socket.send(b"")


def test_policies_and_the_synchronous_scheduler_have_a_journal(endpoint: str) -> None:
    scheduler = make_scheduler(
        {"long_prompt": {}, "journal": {"endpoint": endpoint}}, scheduler_cls=SyncPolicyScheduler
    )
    assert [policy.name for policy in scheduler._policies] == ["long_prompt"]
    assert scheduler._publisher is not None
    scheduler.shutdown()


@pytest.mark.parametrize(("host", "warned"), [("127.0.0.1", False), ("*", True)])
def test_an_open_port_without_a_key_is_warned_of(
    host: str, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with caplog.at_level("WARNING", logger="vllm.vllm_sched"):
        make_scheduler({"journal": {"endpoint": f"tcp://{host}:{port}"}}).shutdown()
    assert ("set journal.key_file" in caplog.text) is warned
