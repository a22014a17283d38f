"""Probes of real HTTP servers that misbehave."""

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

DEADLINE_S = 60.0


class ProbedWorker:
    """A fleet of one worker with its probe."""

    def __init__(
        self, double: WorkerDouble, probe: WorkerProbe, prober: Prober, worker: Worker
    ) -> None:
        self.double = double
        self.probe = probe
        self.prober = prober
        self.worker = worker

    @property
    def fleet(self) -> Fleet:
        """The fleet."""
        return self.prober.fleet

    async def probe_times(self, probes: int) -> list[bool]:
        """Probe this number of times; return whether the worker is up after each probe."""
        states = []
        for _ in range(probes):
            await self.probe.probe()
            states.append(self.worker.up)
        return states


def prober_of(fleet: Fleet, **settings: Any) -> Prober:
    """Return a prober of a fleet."""
    router: Any = SimpleNamespace(fleet=fleet)
    return Prober(router, ProbeConfig(**{"interval_s": 0.01, "timeout_s": DEADLINE_S} | settings))


def spec(url: str, name: str = "s0", **more: Any) -> WorkerSpec:
    """Return the spec of a worker."""
    return WorkerSpec(name, url, Role.SHORT, "tiny", **more)


async def probe_once(fleet: Fleet, worker: Worker) -> None:
    """Probe a worker once."""
    with closing(WorkerProbe(prober_of(fleet), worker)) as probe:
        await probe.probe()


@pytest.fixture
async def probed() -> AsyncIterator[ProbedWorker]:
    """Start a worker, and return it with its probe."""
    fleet = Fleet(down_after=3, up_after=2)
    async with worker_double() as double:
        worker = fleet.roster.add(spec(double.url))
        prober = prober_of(fleet)
        with closing(WorkerProbe(prober, worker)) as probe:
            yield ProbedWorker(double, probe, prober, worker)


async def test_first_good_probe_sets_everything(probed: ProbedWorker) -> None:
    assert await probed.probe_times(1) == [True]
    assert probed.worker.max_model_len == 4096
    assert probed.worker.models == ("tiny",)
    gauges = probed.worker.gauges
    assert gauges is not None
    assert (gauges.running, gauges.prompt_tokens_total) == (2, 100)


async def test_up_and_down_need_several_probes(probed: ProbedWorker) -> None:
    await probed.probe_times(1)
    probed.double.health = 503
    assert await probed.probe_times(3) == [True, True, False]
    probed.double.health = 200
    assert await probed.probe_times(1) == [False]
    probed.double.health = 500
    assert await probed.probe_times(1) == [False]
    probed.double.health = 200
    assert await probed.probe_times(2) == [False, True]


async def test_models_are_requested_rarely(probed: ProbedWorker) -> None:
    await probed.probe_times(3)
    assert probed.double.count("/v1/models") == 1
    assert probed.double.count("/metrics") == 3
    assert len(probed.double.peers) == 1


async def test_adapter_loaded_at_run_time_is_found(probed: ProbedWorker) -> None:
    await probed.probe_times(1)
    probed.double.models = models(("tiny", 4096), ("adapter", None))
    await probed.probe_times(1)
    assert probed.fleet.roster.workers_of("adapter") == []
    probed.prober.clock = lambda: time.monotonic() + MODELS_EVERY_S
    await probed.probe_times(1)
    assert probed.fleet.roster.workers_of("adapter") == [probed.worker]


async def test_restart_between_two_probes_is_noticed(probed: ProbedWorker) -> None:
    probed.fleet.roster.prefixes.record((1, 2), probed.worker.index)
    await probed.probe_times(1)
    assert probed.fleet.roster.prefixes.matches((1, 2))
    probed.double.restart(("tiny", 512))
    assert await probed.probe_times(1) == [True]
    assert probed.worker.max_model_len == 512
    assert not probed.fleet.roster.prefixes.matches((1, 2))


async def test_restart_is_noticed_by_lower_counters(probed: ProbedWorker) -> None:
    probed.double.metrics = vllm_page(Engine(prompt_tokens=100), started=None)
    await probed.probe_times(1)
    probed.double.metrics = vllm_page(Engine(prompt_tokens=99), started=None)
    probed.double.models = models(("tiny", 512))
    await probed.probe_times(1)
    assert probed.worker.max_model_len == 512


async def test_models_are_requested_after_a_failure(probed: ProbedWorker) -> None:
    await probed.probe_times(1)
    probed.double.health = 500
    await probed.probe_times(1)
    probed.double.health = 200
    probed.double.models = models(("tiny", 512))
    await probed.probe_times(1)
    assert probed.worker.max_model_len == 512


async def test_changed_model_after_a_restart_is_logged(
    probed: ProbedWorker, caplog: pytest.LogCaptureFixture
) -> None:
    await probed.probe_times(1)
    assert probed.fleet.roster.workers_of("tiny") == [probed.worker]
    probed.double.restart(("other", 512))
    await probed.probe_times(1)
    assert probed.fleet.roster.workers_of("tiny") == []
    assert "worker s0 serves other, not tiny" in caplog.text


async def test_configured_max_model_len_is_kept() -> None:
    fleet = Fleet()
    async with worker_double() as double:
        worker = fleet.roster.add(spec(double.url, max_model_len=1000))
        await probe_once(fleet, worker)
    assert worker.max_model_len == 1000


async def test_shorter_max_model_len_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet()
    async with worker_double() as double:
        worker = fleet.roster.add(spec(double.url, max_model_len=8000))
        with closing(WorkerProbe(prober_of(fleet), worker)) as probe:
            for _ in range(3):
                probe._models_known_at = -inf
                await probe.probe()
            fleet.roster.respecify(worker, spec(double.url, max_model_len=16000))  # after a reload
            for _ in range(3):
                probe._models_known_at = -inf
                await probe.probe()
    assert worker.max_model_len == 4096
    for stated in (8000, 16000):
        message = (
            f"worker s0 reports a context of 4096 tokens, less than its max_model_len of {stated}"
        )
        assert caplog.text.count(message) == 1


async def test_max_model_len_is_that_of_the_workers_model(probed: ProbedWorker) -> None:
    probed.double.models = models(("base", 512), ("tiny", 2048), ("adapter", None))
    await probed.probe_times(1)
    assert probed.worker.max_model_len == 2048
    assert probed.worker.models == ("base", "tiny", "adapter")


async def test_root_and_parent_of_models_are_read(probed: ProbedWorker) -> None:
    cards = [
        {"id": "tiny", "max_model_len": 4096, "root": "/models/tiny"},
        {"id": "adapter", "root": "/adapters/a", "parent": "tiny"},
        {"id": "odd", "root": 7, "parent": ["tiny"]},
        {"id": "odder", "root": "", "parent": "x" * 5000},
    ]
    probed.double.models = {"object": "list", "data": cards}
    await probed.probe_times(1)
    assert probed.fleet.roster.origin("tiny") == ("/models/tiny", None)
    assert probed.fleet.roster.origin("adapter") == ("/adapters/a", "tiny")
    for model in ("odd", "odder", "unknown"):
        assert probed.fleet.roster.origin(model) == (None, None)
    probed.fleet.roster.drain("s0")
    assert probed.fleet.roster.origin("tiny") == (None, None)


async def test_changed_api_key_is_used_by_the_next_probe(probed: ProbedWorker) -> None:
    await probed.probe_times(1)
    probed.fleet.roster.respecify(probed.worker, spec(probed.double.url, api_key="k2"))
    probed.double.seen.clear()
    assert await probed.probe_times(1) == [True]
    assert set(probed.double.seen) == {("/health", "Bearer k2"), ("/metrics", "Bearer k2")}


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_refused_model_list_keeps_the_configured_model(
    probed: ProbedWorker, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    probed.double.models_status = status
    assert await probed.probe_times(2) == [True, True]
    assert probed.worker.models == ("tiny",)
    assert probed.double.count("/v1/models") == 1  # not requested by every probe
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
async def test_malformed_model_list_fails_the_probe(probed: ProbedWorker, garbage: bytes) -> None:
    probed.double.models = garbage
    assert await probed.probe_times(3) == [False, False, False]
    probed.double.models = models(("tiny", 4096))
    assert await probed.probe_times(2) == [False, True]


@pytest.mark.parametrize("page", [b"", b"<html>", b"\xff\0" * 9, b"vllm:num_requests_running{} x"])
async def test_malformed_metrics_do_not_fail_the_probe(probed: ProbedWorker, page: bytes) -> None:
    probed.double.metrics = page
    assert await probed.probe_times(1) == [True]
    assert probed.worker.gauges is None


async def test_missing_metrics_expire_after_a_while(probed: ProbedWorker) -> None:
    await probed.probe_times(1)
    probed.double.metrics = b""
    assert await probed.probe_times(1) == [True]
    assert probed.worker.gauges is not None
    probed.prober.clock = lambda: time.monotonic() + 2 * MAX_PAGE_AGE_S
    assert await probed.probe_times(1) == [True]
    assert probed.worker.gauges is None


async def test_endless_metrics_page_is_cut_off(
    probed: ProbedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe_client, "MAX_PAGE_BYTES", 1 << 20)
    probed.double.endless = True
    async with asyncio.timeout(DEADLINE_S / 2):
        assert await probed.probe_times(1) == [True]
    assert probed.worker.gauges is None


async def test_refused_probe_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet()
    async with worker_double() as double:
        gone = double.url
    caplog.set_level(logging.INFO)
    worker = fleet.roster.add(spec(gone))
    with closing(WorkerProbe(prober_of(fleet), worker)) as probe:
        for _ in range(3):
            await probe.probe()
    assert not worker.up
    # Logged once and without a warning, since the worker may still be loading.
    assert caplog.text.count("worker s0 is not up yet: GET /health") == 1
    assert [record.levelname for record in caplog.records] == ["INFO"]


@pytest.mark.parametrize(
    ("path", "up"), [("/health", False), ("/metrics", True), ("/v1/models", False)]
)
async def test_redirects_are_not_followed(probed: ProbedWorker, path: str, up: bool) -> None:
    async with worker_double() as elsewhere:
        probed.double.redirects[path] = elsewhere.url + path
        assert await probed.probe_times(1) == [up]
        assert elsewhere.seen == []


async def test_probe_timeout_marks_down(probed: ProbedWorker) -> None:
    await probed.probe_times(1)
    probed.double.hangs = True
    probed.prober.settings = ProbeConfig(timeout_s=0.05)
    assert await probed.probe_times(3) == [True, True, False]


async def test_streaming_worker_stays_up_on_probe_timeout(probed: ProbedWorker) -> None:
    await probed.probe_times(1)
    probed.double.hangs = True
    probed.prober.settings = ProbeConfig(timeout_s=0.05)
    for _ in range(4):
        probed.worker.written += 1
        assert await probed.probe_times(1) == [True]
    assert await probed.probe_times(3) == [True, True, False]


async def test_error_in_the_probe_fails_the_probe(
    probed: ProbedWorker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    await probed.probe_times(1)
    with monkeypatch.context() as patch:
        patch.setattr("proxy.health.probe.parse", broken)
        assert await probed.probe_times(3) == [True, True, False]
    assert "a bug" in caplog.text
    assert await probed.probe_times(2) == [False, True]


async def test_probe_of_a_removed_worker_does_not_change_its_successor(
    probed: ProbedWorker,
) -> None:
    probed.fleet.roster.remove("s0")
    namesake = probed.fleet.roster.add(spec("http://127.0.0.1:9"))
    await probed.probe.probe()
    assert not namesake.probed
    assert namesake.max_model_len is None


async def start_prober(prober: Prober) -> asyncio.Task[None]:
    """Start a prober."""
    return asyncio.create_task(prober.run())


async def stop(task: asyncio.Task[None]) -> None:
    """Stop a prober."""
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def test_hung_worker_does_not_delay_other_probes() -> None:
    fleet = Fleet()
    async with worker_double() as hung, worker_double() as healthy:
        hung.hangs = True
        fleet.roster.add(spec(hung.url, "hung"))
        fleet.roster.add(spec(healthy.url, "well"))
        task = await start_prober(prober_of(fleet))
        async with asyncio.timeout(DEADLINE_S / 2):  # less than the timeout of a probe
            await hung.probed(1)
            await healthy.probed(10)
        await stop(task)
    assert hung.count("/health") == 1


async def test_added_and_removed_workers_are_probed_and_dropped() -> None:
    fleet = Fleet()
    async with worker_double() as first, worker_double() as second:
        fleet.roster.add(spec(first.url))
        task = await start_prober(prober_of(fleet))
        async with asyncio.timeout(DEADLINE_S):
            await first.probed(2)
            fleet.roster.remove("s0")
            fleet.roster.add(spec(second.url, "s1"))
            await second.probed(2)
            seen = first.count("/health")
            await second.probed(10)
        await stop(task)
        assert first.count("/health") <= seen + 1


async def test_stopped_prober_leaves_no_tasks() -> None:
    fleet = Fleet()
    before = asyncio.all_tasks()
    async with worker_double() as hung:
        hung.hangs = True
        fleet.roster.add(spec(hung.url))
        task = await start_prober(prober_of(fleet))
        await hung.probed(1)
        await stop(task)
    assert asyncio.all_tasks() == before
