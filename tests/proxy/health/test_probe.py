"""Probing real HTTP servers that misbehave in every way."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import closing, suppress
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest

from proxy.config import ProbeConfig
from proxy.core.fleet.charges import Fleet
from proxy.core.fleet.slots import MAX_PAGE_AGE_S
from proxy.core.fleet.worker import Worker
from proxy.core.model.role import Role
from proxy.core.model.specs import WorkerSpec
from proxy.health import probe_client
from proxy.health.probe import MODELS_EVERY_S, Prober, WorkerProbe
from tests.proxy.health.vllm_page import Engine, vllm_page
from tests.proxy.health.worker_double import WorkerDouble, models, worker_double

DEADLINE_S = 10.0


class Bench:
    """A fleet of one worker, watched a probe at a time."""

    def __init__(
        self, double: WorkerDouble, watch: WorkerProbe, prober: Prober, worker: Worker
    ) -> None:
        self.double = double
        self.watch = watch
        self.prober = prober
        self.worker = worker

    @property
    def fleet(self) -> Fleet:
        """The fleet."""
        return self.prober.fleet

    async def ups(self, probes: int) -> list[bool]:
        """Probe so often; tell after each whether the worker is up."""
        states = []
        for _ in range(probes):
            await self.watch.once()
            states.append(self.worker.up)
        return states


def prober_of(fleet: Fleet, **settings: Any) -> Prober:
    """Make a prober for a fleet alone."""
    router: Any = SimpleNamespace(fleet=fleet)
    return Prober(router, ProbeConfig(**{"interval_s": 0.01, "timeout_s": DEADLINE_S} | settings))


def spec(url: str, name: str = "s0", **more: Any) -> WorkerSpec:
    """Describe a worker."""
    return WorkerSpec(name, url, Role.SHORT, "tiny", **more)


async def once(fleet: Fleet, worker: Worker) -> None:
    """Probe a worker once."""
    with closing(WorkerProbe(prober_of(fleet), worker)) as watch:
        await watch.once()


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    """Stand one up."""
    fleet = Fleet(down_after=3, up_after=2)
    async with worker_double() as double:
        worker = fleet.roster.add(spec(double.url))
        prober = prober_of(fleet)
        with closing(WorkerProbe(prober, worker)) as watch:
            yield Bench(double, watch, prober, worker)


async def test_a_first_good_probe_tells_all(bench: Bench) -> None:
    assert await bench.ups(1) == [True]
    assert bench.worker.max_model_len == 4096
    assert bench.worker.models == ("tiny",)
    gauges = bench.worker.gauges
    assert gauges is not None
    assert (gauges.running, gauges.prompt_tokens_total) == (2, 100)


async def test_hysteresis_both_ways(bench: Bench) -> None:
    await bench.ups(1)
    bench.double.health = 503
    assert await bench.ups(3) == [True, True, False]
    bench.double.health = 200
    assert await bench.ups(1) == [False]
    bench.double.health = 500
    assert await bench.ups(1) == [False]
    bench.double.health = 200
    assert await bench.ups(2) == [False, True]


async def test_models_are_not_asked_for_each_time(bench: Bench) -> None:
    await bench.ups(3)
    assert bench.double.count("/v1/models") == 1
    assert bench.double.count("/metrics") == 3
    assert len(bench.double.peers) == 1


async def test_an_adapter_loaded_while_it_runs_is_found(bench: Bench) -> None:
    await bench.ups(1)
    bench.double.models = models(("tiny", 4096), ("adapter", None))
    await bench.ups(1)
    assert bench.fleet.roster.of("adapter") == []
    bench.prober.clock = lambda: time.monotonic() + MODELS_EVERY_S
    await bench.ups(1)
    assert bench.fleet.roster.of("adapter") == [bench.worker]


async def test_a_restart_between_two_probes_is_noticed(bench: Bench) -> None:
    bench.fleet.roster.prefixes.record((1, 2), bench.worker.index)
    await bench.ups(1)
    assert bench.fleet.roster.prefixes.matches((1, 2))
    bench.double.restart(("tiny", 512))
    assert await bench.ups(1) == [True]
    assert bench.worker.max_model_len == 512
    assert not bench.fleet.roster.prefixes.matches((1, 2))


async def test_a_restart_that_only_the_counts_betray(bench: Bench) -> None:
    bench.double.metrics = vllm_page(Engine(prompt_tokens=100), started=None)
    await bench.ups(1)
    bench.double.metrics = vllm_page(Engine(prompt_tokens=99), started=None)
    bench.double.models = models(("tiny", 512))
    await bench.ups(1)
    assert bench.worker.max_model_len == 512


async def test_models_are_asked_for_anew_after_a_failure(bench: Bench) -> None:
    await bench.ups(1)
    bench.double.health = 500
    await bench.ups(1)
    bench.double.health = 200
    bench.double.models = models(("tiny", 512))
    await bench.ups(1)
    assert bench.worker.max_model_len == 512


async def test_another_model_after_a_restart(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    await bench.ups(1)
    assert bench.fleet.roster.of("tiny") == [bench.worker]
    bench.double.restart(("other", 512))
    await bench.ups(1)
    assert bench.fleet.roster.of("tiny") == []
    assert "worker s0 serves other, not tiny" in caplog.text


async def test_a_length_that_was_stated_stands() -> None:
    fleet = Fleet()
    async with worker_double() as double:
        worker = fleet.roster.add(spec(double.url, max_model_len=1000))
        await once(fleet, worker)
    assert worker.max_model_len == 1000


async def test_a_shorter_length_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet()
    async with worker_double() as double:
        worker = fleet.roster.add(spec(double.url, max_model_len=8000))
        with closing(WorkerProbe(prober_of(fleet), worker)) as watch:
            for _ in range(3):
                watch._models_known_at = -inf
                await watch.once()
            fleet.roster.respecify(worker, spec(double.url, max_model_len=16000))  # after a reload
            for _ in range(3):
                watch._models_known_at = -inf
                await watch.once()
    assert worker.max_model_len == 4096
    for stated in (8000, 16000):
        said = (
            f"worker s0 reports a context of 4096 tokens, less than its max_model_len of {stated}"
        )
        assert caplog.text.count(said) == 1


async def test_the_length_is_that_of_its_own_model(bench: Bench) -> None:
    bench.double.models = models(("base", 512), ("tiny", 2048), ("adapter", None))
    await bench.ups(1)
    assert bench.worker.max_model_len == 2048
    assert bench.worker.models == ("base", "tiny", "adapter")


async def test_what_is_loaded_for_a_model_is_as_the_worker_says(bench: Bench) -> None:
    said = [
        {"id": "tiny", "max_model_len": 4096, "root": "/models/tiny"},
        {"id": "adapter", "root": "/adapters/a", "parent": "tiny"},
        {"id": "odd", "root": 7, "parent": ["tiny"]},
        {"id": "odder", "root": "", "parent": "x" * 5000},
    ]
    bench.double.models = {"object": "list", "data": said}
    await bench.ups(1)
    assert bench.fleet.roster.origin("tiny") == ("/models/tiny", None)
    assert bench.fleet.roster.origin("adapter") == ("/adapters/a", "tiny")
    for unsaid in ("odd", "odder", "nobody's"):
        assert bench.fleet.roster.origin(unsaid) == (None, None)
    bench.fleet.roster.drain("s0")
    assert bench.fleet.roster.origin("tiny") == (None, None)


async def test_another_key_is_used_from_the_next_probe_on(bench: Bench) -> None:
    await bench.ups(1)
    bench.fleet.roster.respecify(bench.worker, spec(bench.double.url, api_key="k2"))
    bench.double.seen.clear()
    assert await bench.ups(1) == [True]
    assert set(bench.double.seen) == {("/health", "Bearer k2"), ("/metrics", "Bearer k2")}


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_models_kept_from_us_leave_what_is_configured(
    bench: Bench, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    bench.double.models_status = status
    assert await bench.ups(2) == [True, True]
    assert bench.worker.models == ("tiny",)
    assert bench.double.count("/v1/models") == 1  # asked once, not every second
    assert "api_key" in caplog.text


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"<html>",
        b"[]",
        b"{}",
        b'{"data": []}',
        b'{"data": [1]}',
        b'{"data": "x"}',
        b"\xff",
        b"null",
    ],
)
async def test_garbage_for_models_is_no_health(bench: Bench, garbage: bytes) -> None:
    bench.double.models = garbage
    assert await bench.ups(3) == [False, False, False]
    bench.double.models = models(("tiny", 4096))
    assert await bench.ups(2) == [False, True]


@pytest.mark.parametrize("page", [b"", b"<html>", b"\xff\0" * 9, b"vllm:num_requests_running{} x"])
async def test_garbage_for_metrics_is_none_of_health_s_business(bench: Bench, page: bytes) -> None:
    bench.double.metrics = page
    assert await bench.ups(1) == [True]
    assert bench.worker.gauges is None


async def test_a_page_that_comes_no_more_is_believed_for_a_while(bench: Bench) -> None:
    await bench.ups(1)
    bench.double.metrics = b""
    assert await bench.ups(1) == [True]
    assert bench.worker.gauges is not None
    bench.prober.clock = lambda: time.monotonic() + 2 * MAX_PAGE_AGE_S
    assert await bench.ups(1) == [True]
    assert bench.worker.gauges is None


async def test_an_endless_page_is_cut_off(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_client, "MAX_PAGE_BYTES", 1 << 20)
    bench.double.endless = True
    async with asyncio.timeout(DEADLINE_S / 2):
        assert await bench.ups(1) == [True]
    assert bench.worker.gauges is None


async def test_nobody_listens(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet()
    async with worker_double() as double:
        gone = double.url
    caplog.set_level(logging.INFO)
    worker = fleet.roster.add(spec(gone))
    with closing(WorkerProbe(prober_of(fleet), worker)) as watch:
        for _ in range(3):
            await watch.once()
    assert not worker.up
    # Said once, not each second; and not as a fault, since it may still load.
    assert caplog.text.count("worker s0 is not up yet: GET /health") == 1
    assert [record.levelname for record in caplog.records] == ["INFO"]


@pytest.mark.parametrize(
    ("path", "up"), [("/health", False), ("/metrics", True), ("/v1/models", False)]
)
async def test_nobody_is_followed_elsewhere(bench: Bench, path: str, up: bool) -> None:
    async with worker_double() as elsewhere:
        bench.double.leads[path] = elsewhere.url + path
        assert await bench.ups(1) == [up]
        assert elsewhere.seen == []


async def test_no_answer_in_time(bench: Bench) -> None:
    await bench.ups(1)
    bench.double.hangs = True
    bench.prober.settings = ProbeConfig(timeout_s=0.05)
    assert await bench.ups(3) == [True, True, False]


async def test_one_that_streams_is_only_busy(bench: Bench) -> None:
    await bench.ups(1)
    bench.double.hangs = True
    bench.prober.settings = ProbeConfig(timeout_s=0.05)
    for _ in range(4):
        bench.worker.written += 1
        assert await bench.ups(1) == [True]
    assert await bench.ups(3) == [True, True, False]


async def test_a_fault_of_the_probe_itself_is_a_failed_probe(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    await bench.ups(1)
    with monkeypatch.context() as patch:
        patch.setattr("proxy.health.probe.parse", broken)
        assert await bench.ups(3) == [True, True, False]
    assert "a bug" in caplog.text
    assert await bench.ups(2) == [False, True]


async def test_a_namesake_is_not_told_of_the_one_before(bench: Bench) -> None:
    bench.fleet.roster.remove("s0")
    namesake = bench.fleet.roster.add(spec("http://127.0.0.1:9"))
    await bench.watch.once()
    assert not namesake.probed
    assert namesake.max_model_len is None


async def running(prober: Prober) -> asyncio.Task[None]:
    """Start a prober's loop."""
    return asyncio.create_task(prober.run())


async def stop(task: asyncio.Task[None]) -> None:
    """Cancel it."""
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def test_a_hung_worker_does_not_delay_the_others() -> None:
    fleet = Fleet()
    async with worker_double() as hung, worker_double() as well:
        hung.hangs = True
        fleet.roster.add(spec(hung.url, "hung"))
        fleet.roster.add(spec(well.url, "well"))
        task = await running(prober_of(fleet))
        async with asyncio.timeout(DEADLINE_S / 2):  # less than the hung probe's time-out
            await hung.probed(1)
            await well.probed(10)
        await stop(task)
    assert hung.count("/health") == 1


async def test_workers_come_and_go_while_it_runs() -> None:
    fleet = Fleet()
    async with worker_double() as first, worker_double() as second:
        fleet.roster.add(spec(first.url))
        task = await running(prober_of(fleet))
        async with asyncio.timeout(DEADLINE_S):
            await first.probed(2)
            fleet.roster.remove("s0")
            fleet.roster.add(spec(second.url, "s1"))
            await second.probed(2)
            seen = first.count("/health")
            await second.probed(10)
        await stop(task)
        assert first.count("/health") <= seen + 1


async def test_ending_it_leaves_nothing_behind() -> None:
    fleet = Fleet()
    before = asyncio.all_tasks()
    async with worker_double() as hung:
        hung.hangs = True
        fleet.roster.add(spec(hung.url))
        task = await running(prober_of(fleet))
        await hung.probed(1)
        await stop(task)
    assert asyncio.all_tasks() == before
