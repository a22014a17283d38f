"""The script that decides limits on a real server, call by call."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import redis as redis_library

from proxy.processes.replicas.limits import SCRIPT
from tests.redis_server import RedisServer

NONE, REQUESTS, TOKENS, CONCURRENCY = range(4)
KEY = "{fleet}:tenant:t"


class Script:
    """Calls of two processes."""

    def __init__(self, server: RedisServer) -> None:
        self.client: Any = redis_library.Redis(port=server.port)
        self.client.flushall()
        self.script = self.client.register_script(SCRIPT.read_text())
        self.ahead_requests = self.ahead_tokens = 0  # of the last call

    def call(
        self,
        *tokens: int,
        process: str = "p",
        number: int = 1,
        running: int = 0,
        charges: tuple[int, int] = (0, 0),
        again: bool = False,
        left: tuple[float, float] = (0.0, 0.0),
        limits: tuple[int, int, int] = (60, 6000, -1),
        held: tuple[int, int] = (0, 0),
        ahead: tuple[int, int] = (0, 0),
        lease: float = 3.0,
    ) -> tuple[list[int], float, float, int]:
        """Return the exceeded limits, the seconds to full, and the requests elsewhere."""
        arguments = [
            process, lease, number, running, *charges, int(again), *left, *limits,
            *held, *ahead, len(tokens), *tokens,
        ]  # fmt: skip
        [found] = self.script(keys=[KEY], args=arguments)
        requests_us, tokens_us, elsewhere, self.ahead_requests, self.ahead_tokens, *verdicts = found
        return verdicts[::2], requests_us / 1e6, tokens_us / 1e6, elsewhere

    def full_at(self) -> Any:
        """Return when the buckets of requests and tokens will be full."""
        return np.array([float(time) for time in self.client.hmget(KEY, "r", "t")])


@pytest.fixture
def script(redis: RedisServer) -> Iterator[Script]:
    made = Script(redis)
    yield made
    made.client.close()


def test_buckets_are_shared_and_report_when_they_are_full(script: Script) -> None:
    assert script.call(*[10] * 40)[0] == [NONE] * 40
    verdicts, requests_s, tokens_s, _ = script.call(*[10] * 40, process="q")
    assert verdicts.count(NONE) in (20, 21)
    assert {*verdicts} == {NONE, REQUESTS}
    assert requests_s == pytest.approx(60.0, abs=1.0)
    assert tokens_s == pytest.approx(6.0, abs=0.5)


def test_tokens_are_charged_only_if_the_request_enters(script: Script) -> None:
    assert script.call(5000, 2000, 900)[0] == [NONE, TOKENS, NONE]
    _, requests_s, tokens_s, _ = script.call(charges=(0, -4000))
    assert requests_s == pytest.approx(2.0, abs=0.1)
    assert tokens_s == pytest.approx(19.0, abs=0.2)
    assert script.call(20_000, limits=(-1, 6000, -1))[0] == [TOKENS]
    script.call(charges=(0, -6000))
    assert script.call(20_000, limits=(-1, 6000, -1))[0] == [NONE]  # a full bucket is enough


def test_small_charges_add_up(script: Script) -> None:
    for number in range(200):
        script.call(number=number, charges=(1, 0), limits=(1_000_000, -1, -1))
    _, requests_s, _, _ = script.call(charges=(60_000, 0), limits=(1_000_000, -1, -1))
    assert requests_s == pytest.approx(3.6, abs=0.02)


def test_requests_in_flight_expire_with_their_process(script: Script) -> None:
    limits = (-1, -1, 5)
    assert script.call(1, 1, 1, limits=limits, lease=0.2)[0] == [NONE] * 3
    verdicts, _, _, elsewhere = script.call(1, 1, 1, process="q", limits=limits)
    assert (verdicts, elsewhere) == ([NONE, NONE, CONCURRENCY], 3)
    time.sleep(0.25)
    verdicts, _, _, elsewhere = script.call(1, 1, 1, 1, process="q", running=2, limits=limits)
    assert (verdicts, elsewhere) == ([NONE] * 3 + [CONCURRENCY], 0)
    assert script.call(1, process="p", limits=limits)[0] == [CONCURRENCY]
    script.call(process="q", running=0, limits=limits)
    assert script.call(1, process="p", limits=limits)[3] == 0


@pytest.mark.parametrize("lost", ["call", "reply"])
def test_call_without_a_reply_is_charged_once(script: Script, lost: str) -> None:
    """The process has decided the new request itself: its charge is in the next call."""
    if lost == "reply":
        assert script.call(600, number=7, charges=(5, 300))[0] == [NONE]
    for _ in range(2):  # the reply of the first resolution may be lost too
        script.call(number=7, charges=(5, 300), again=True)
    _, requests_s, tokens_s, _ = script.call(number=8, charges=(1, 600))
    assert requests_s == pytest.approx(6.0, abs=0.1)
    assert tokens_s == pytest.approx(9.0, abs=0.1)


def test_server_without_its_data_continues_from_what_each_process_knows(script: Script) -> None:
    """A new process, which knows nothing, may be the first."""
    for process, left, expected in (
        ("new", (0.0, 0.0), (0.0, 0.0)),
        ("p", (30.0, 20.0), (30.0, 20.0)),
        ("q", (50.0, 10.0), (50.0, 20.0)),
        ("r", (50.0, 20.0), (50.0, 20.0)),
        ("p", (60.0, 60.0), (50.0, 20.0)),  # only the first call of a process counts
    ):
        _, requests_s, tokens_s, _ = script.call(process=process, left=left)
        assert (requests_s, tokens_s) == pytest.approx(expected, abs=0.1)


def test_charges_before_and_after_a_loss_of_data_add_up(script: Script) -> None:
    script.call(*[10] * 30, process="p")
    assert script.call(process="q", left=(40.0, 1.0))[1] == pytest.approx(70.0, abs=0.2)
    assert script.call(process="r", left=(45.0, 1.0))[1] == pytest.approx(75.0, abs=0.2)
    assert script.call(process="q", left=(99.0, 99.0))[1] == pytest.approx(75.0, abs=0.2)


def test_calls_of_ended_processes_are_forgotten(script: Script) -> None:
    script.call(1, process="old")
    script.client.hset(KEY, "b:old", "1 1 1 1")
    script.call(1)
    assert script.client.hexists(KEY, "b:p")
    assert not script.client.hexists(KEY, "b:old")


def test_clock_that_is_set_back_changes_no_limit(script: Script) -> None:
    script.call(charges=(30, 3000))
    fields = script.client.hgetall(KEY)
    ahead = {name: float(fields[name.encode()]) + 120.0 for name in ("n", "r", "t")}
    script.client.hset(KEY, mapping=ahead)
    _, requests_s, tokens_s, _ = script.call()
    assert (requests_s, tokens_s) == pytest.approx((30.0, 30.0), abs=0.2)


def test_far_limits_are_charged_in_advance(script: Script) -> None:
    limits = (6400, 640_000, 640)
    script.call(limits=limits, charges=(2000, 200_000))  # more than is refilled during the test
    before = script.full_at()
    script.call(limits=limits, ahead=(7, 500))
    assert (script.ahead_requests, script.ahead_tokens) == (7, 500)
    assert script.full_at() - before == pytest.approx([7 * 60 / 6400, 500 * 60 / 640_000], abs=1e-5)
    assert script.call(process="q", limits=limits)[3] == 7  # they count as requests in flight
    script.call(limits=limits, charges=(-3, -200), running=4)
    assert script.full_at() - before == pytest.approx([4 * 60 / 6400, 300 * 60 / 640_000], abs=1e-5)
    assert script.call(process="q", limits=limits)[3] == 4


@pytest.mark.parametrize(
    ("limits", "charged", "expected"),
    [
        ((6400, -1, -1), (0, 0), (100, 9000)),
        ((6400, -1, -1), (3200, 0), (50, 9000)),
        ((6400, -1, -1), (6400 - 63, 0), (0, 0)),
        ((6400, -1, -1), (9000, 0), (0, 0)),
        ((-1, 640_000, -1), (0, 0), (1000, 9000)),
        ((-1, 64_000, -1), (0, 0), (1000, 1000)),
        ((-1, -1, 640), (0, 0), (10, 9000)),
        ((6400, 64_000, 640), (0, 64_000), (0, 0)),
        ((6400, 64_000, 63), (0, 0), (0, 0)),
    ],
)
def test_advance_is_a_small_part_of_what_is_left_of_each_limit(
    script: Script,
    limits: tuple[int, int, int],
    charged: tuple[int, int],
    expected: tuple[int, int],
) -> None:
    script.call(limits=limits, charges=charged, ahead=(1000, 9000))
    assert (script.ahead_requests, script.ahead_tokens) == pytest.approx(expected, abs=1)


def test_advance_includes_what_is_not_used_yet(script: Script) -> None:
    limits = (6400, 640_000, -1)
    script.call(limits=limits, ahead=(1000, 9000), held=(60, 8000))
    assert (script.ahead_requests, script.ahead_tokens) == (40, 2000)
    script.call(limits=limits, ahead=(1000, 9000), held=(100, 20_000))
    assert (script.ahead_requests, script.ahead_tokens) == (0, 0)


def test_advance_of_a_call_without_a_reply_is_returned(script: Script) -> None:
    limits = (6400, 640_000, -1)
    script.call(100, number=7, limits=limits, ahead=(50, 5000))
    script.call(number=7, again=True, limits=limits)
    _, requests_s, tokens_s, _ = script.call(number=8, limits=limits)
    assert (requests_s, tokens_s) == pytest.approx((0.0, 0.0), abs=1e-3)
