"""The journal's socket, read as docs/journal.md says."""

from __future__ import annotations

import hmac
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import RequestStatus

from tests.engine.journal.reader import CacheReader
from tests.engine.schedulers import base_config, drain, make_request, make_scheduler, step
from vllm_sched import SyncPolicyScheduler
from vllm_sched.engine.journal import publisher as publishing
from vllm_sched.engine.journal.journal import StepMessage
from vllm_sched.errors import UsageError

DEADLINE_S = 60.0
KEY = b"0123456789abcdef"
NAMED = "chatcmpl-mine-0123abcd"  # the request `mine`


class Reader:
    """A socket of a reader, which can also send names."""

    def __init__(self, endpoint: str, queue: int = 1000) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.XSUB)
        self.socket.setsockopt(zmq.RCVHWM, queue)
        self.socket.connect(endpoint)
        self.send = self.socket.send

    def subscribe(self, topic: bytes) -> None:
        self.send(b"\x01" + topic)

    def until(self, topic: bytes) -> list[bytes]:
        """Return the next message with a topic."""
        while True:
            assert self.socket.poll(DEADLINE_S * 1000), "no message came"
            frames: list[bytes] = self.socket.recv_multipart()
            if frames[0] == topic:
                return frames

    def next_step(self) -> StepMessage:
        return StepMessage(*payload_of(self.until(b"step")))

    def first_named(self) -> Any:
        """Return the names in the first message that has one."""
        deadline = time.monotonic() + DEADLINE_S
        while not (named := self.next_step().named):
            assert time.monotonic() < deadline, "no request was named"
        return named

    def close(self) -> None:
        self.context.destroy(linger=0)


def number_of(frames: list[bytes]) -> int:
    return int.from_bytes(frames[1][8:], "big")


def payload_of(frames: list[bytes]) -> Any:
    return msgspec.msgpack.decode(frames[2])


def naming(client_id: str, name: bytes) -> bytes:
    return b"\x02" + msgspec.msgpack.encode((client_id, name))


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/journal"


@pytest.fixture
def scheduler(endpoint: str) -> Iterator[Any]:
    made = make_scheduler({"journal": {"endpoint": endpoint}}, prefix_caching=True)
    yield made
    made.shutdown()


@pytest.fixture
def join(endpoint: str) -> Iterator[Callable[..., Reader]]:
    """Return a function that makes a reader which gets every step from now on."""
    made: list[Reader] = []

    def joined(queue: int = 1000) -> Reader:
        made.append(Reader(endpoint, queue))
        topic = b"snapshot/%d" % len(made)
        made[-1].subscribe(b"step")
        made[-1].subscribe(topic)
        made[-1].until(topic)
        return made[-1]

    yield joined
    for reader in made:
        reader.close()


Join = Callable[..., Reader]


def test_a_late_reader_is_exact_after_a_snapshot(endpoint: str, scheduler: Any) -> None:
    done, running = make_request(100, output=3), make_request(70, output=50)
    for request in (done, running):
        scheduler.add_request(request)
    while not done.is_finished():
        step(scheduler)
    late = Reader(endpoint)
    for topic in (b"step", b"snapshot/late"):
        late.subscribe(topic)
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


def test_numbered_messages_are_applied_by_a_reader(scheduler: Any, join: Join) -> None:
    reader = join()
    request = make_request(100, output=5)
    state = CacheReader({request.request_id: request._all_token_ids})
    scheduler.add_request(request)
    for number in range(drain(scheduler)):
        frames = reader.until(b"step")
        assert number_of(frames) == number + 1
        state.apply(StepMessage(*payload_of(frames)))
    assert state.output == {request.request_id: [7] * 5}
    assert state.cached(request._all_token_ids) == 96


def test_an_idle_engine_publishes_an_abort_and_a_message_each_second(
    scheduler: Any, join: Join
) -> None:
    reader = join()
    request = make_request(20)
    scheduler.add_request(request)
    scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
    message = reader.next_step()
    assert message.arrived == [[1, request.request_id, 20]]
    assert message.ended == [[1, "abort"]]
    assert [*reader.next_step()] == [[], [], False, *[[]] * 9]


def test_messages_and_names_are_signed_if_there_is_a_key(tmp_path: Path, endpoint: str) -> None:
    (tmp_path / "key").write_bytes(KEY + b"\n")
    settings = {"endpoint": endpoint, "key_file": f"{tmp_path}/key"}
    scheduler = make_scheduler({"journal": settings})
    scheduler.add_request(make_request(100, name=NAMED, output=3))
    reader = Reader(endpoint)
    for topic in (b"step", b"snapshot/x"):
        reader.subscribe(topic)
        *signed, signature = reader.until(topic)
        assert signature == hmac.digest(KEY, b"".join(signed), "sha256")
    reader.send(naming("mine", b"unsigned"))
    reader.send(naming("mine", b"wrong") + b"0" * 32)
    message = naming("mine", b"signed")
    reader.send(message + hmac.digest(KEY, message, "sha256"))
    assert reader.first_named() == [[1, b"signed"]]
    reader.close()
    scheduler.shutdown()


def test_key_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    with pytest.raises(UsageError, match=r"key_file=.*key can't be read: No such file"):
        publishing.read_key(str(file))
    file.write_text("short\n")
    with pytest.raises(UsageError, match="has 5 bytes; a key has at least 16"):
        publishing.read_key(str(file))
    file.write_bytes(KEY + b"\n")
    assert publishing.read_key(str(file)) == KEY
    assert publishing.read_key(None) is None


def test_a_reader_names_a_request(scheduler: Any, join: Join) -> None:
    reader = join()
    no_text = b"\x02\x92\xa2\xff\xfe\xc4\x01a"
    for wrong in (b"", b"\x02", b"\x02\x91", b"\x03", no_text, naming("mine", b"x" * 66_000)):
        reader.send(wrong)
    reader.send(naming("mine", b"prefix"))
    scheduler.add_request(make_request(100, name=NAMED, output=3))
    drain(scheduler)
    assert reader.first_named() == [[1, b"prefix"]]


def test_a_name_is_reported_at_once_by_an_idle_engine(
    scheduler: Any, join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "HEARTBEAT_S", 1e9)
    scheduler.add_request(make_request(100, name=NAMED, output=3))
    drain(scheduler)
    reader = join()
    reader.send(naming("mine", b"prefix"))
    assert reader.first_named() == [[1, b"prefix"]]


@pytest.mark.usefixtures("scheduler")
def test_a_huge_frame_closes_its_connection_only(endpoint: str, join: Join) -> None:
    reader, hostile = join(), Reader(endpoint)
    hostile.send(b"\x02" + b"x" * 10_000_000)
    reader.subscribe(b"snapshot/after")
    reader.until(b"snapshot/after")
    hostile.close()


def test_a_stalled_reader_misses_messages_and_stops_nothing(
    endpoint: str, join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "MAX_QUEUED", 5)
    scheduler = make_scheduler({"journal": {"endpoint": endpoint}}, max_model_len=2000)
    stalled = join(queue=5)
    scheduler.add_request(make_request(10, output=1500))
    steps = drain(scheduler)
    numbers = [0]
    # Until the first message of the idle engine.
    while numbers[-1] <= steps and stalled.socket.poll(500):
        numbers.append(number_of(stalled.socket.recv_multipart()))
    assert numbers == sorted(numbers)
    assert len(numbers) < steps
    stalled.subscribe(b"snapshot/y")
    assert number_of(stalled.until(b"snapshot/y")) >= steps
    scheduler.shutdown()


@pytest.mark.usefixtures("scheduler")
def test_snapshots_have_a_pause_between_them(endpoint: str) -> None:
    readers = [Reader(endpoint) for _ in range(4)]
    began = time.monotonic()
    for topic in (b"snapshot/one%d", b"snapshot/other%d"):
        for number, reader in enumerate(readers):
            reader.subscribe(topic % number)
        for number, reader in enumerate(readers):
            reader.until(topic % number)
    assert time.monotonic() - began >= publishing.SNAPSHOT_PAUSE_S
    for reader in readers:
        reader.close()


@pytest.mark.usefixtures("scheduler")
def test_each_subscription_gets_one_snapshot(join: Join) -> None:
    reader = join()  # it has its first snapshot
    topics: list[bytes] = []
    for requested in (b"snapshot/second", b"snapshot/third"):
        reader.subscribe(requested)
        while topics[-1:] != [requested]:
            topics += {reader.socket.recv_multipart()[0]} - {b"step"}
    assert topics == [b"snapshot/second", b"snapshot/third"]


def test_an_endpoint_in_use_is_a_usage_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(UsageError, match=f"endpoint={address}: .* choose a free port"):
            make_scheduler({"journal": {"endpoint": address}})


def test_the_endpoint_is_free_after_shutdown(endpoint: str) -> None:
    make_scheduler({"journal": {"endpoint": endpoint}}).shutdown()
    # Another scheduler, beside a policy.
    scheduler = make_scheduler(
        {"long_prompt": {}, "journal": {"endpoint": endpoint}}, scheduler_cls=SyncPolicyScheduler
    )
    assert [policy.name for policy in scheduler._policies] == ["long_prompt"]
    assert scheduler._publisher is not None
    scheduler.shutdown()


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


@pytest.mark.parametrize(("host", "warned"), [("127.0.0.1", False), ("*", True)])
def test_an_open_port_without_a_key_is_warned_of(
    host: str, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with caplog.at_level("WARNING", logger="vllm.vllm_sched"):
        make_scheduler({"journal": {"endpoint": f"tcp://{host}:{port}"}}).shutdown()
    assert ("set journal.key_file" in caplog.text) is warned
