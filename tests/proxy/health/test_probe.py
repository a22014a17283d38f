"""Probes of real HTTP servers that misbehave."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
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
from tests.proxy.health.vllm_page import STARTED, Engine, vllm_page
from tests.proxy.running import serving
from tests.proxy.wire import scripts
from tests.proxy.wire.fake_worker import Call, FakeWorker
from tests.proxy.wire.site import eventually

DEADLINE_S = 60.0
HEALTH, METRICS, MODELS = "/health", "/metrics", "/v1/models"
Card = tuple[str, int | None]


class ProbedWorker:
    """A fleet of one worker with its probe."""

    def __init__(self, fake: FakeWorker, prober: Prober, worker: Worker) -> None:
        self.fake, self.prober, self.worker = fake, prober, worker
        self.fleet = prober.fleet
        self.probe = WorkerProbe(prober, worker)

    async def probe_times(self, probes: int) -> list[bool]:
        """Probe this number of times; return whether the worker is up after each probe."""
        states = []
        for _ in range(probes):
            await self.probe.probe()
            states.append(self.worker.up)
        return states

    def set_health(self, status: int) -> None:
        self.fake.always(scripts.answer(status), HEALTH)

    def set_page(self, page: bytes) -> None:
        self.fake.always(scripts.answer(body=page), METRICS)

    def set_models(self, *cards: Card) -> None:
        """Answer /v1/models with names and context lengths, as vLLM does."""
        listed = [{"id": name, "max_model_len": length} for name, length in cards]
        self.fake.always(scripts.answer(body=json.dumps({"data": listed}).encode()), MODELS)


def count(fake: FakeWorker, path: str) -> int:
    return sum(call.path == path for call in fake.calls)


def prober_of(fleet: Fleet) -> Prober:
    router: Any = SimpleNamespace(fleet=fleet)
    return Prober(router, ProbeConfig(interval_s=0.01, timeout_s=DEADLINE_S))


def spec(url: str, name: str = "s0", **more: Any) -> WorkerSpec:
    return WorkerSpec(name, url, Role.SHORT, "tiny", **more)


@pytest.fixture
async def probed() -> AsyncIterator[ProbedWorker]:
    """Start a worker, and return it with its probe."""
    fleet, fake = Fleet(down_after=3, up_after=2), FakeWorker(max_model_len=4096)
    async with serving(fake):
        found = ProbedWorker(fake, prober_of(fleet), fleet.roster.add(spec(fake.url)))
        found.set_page(vllm_page(Engine(running=2, prompt_tokens=100)))
        with closing(found.probe):
            yield found


async def test_good_probes_set_everything_and_request_models_rarely(probed: ProbedWorker) -> None:
    assert await probed.probe_times(3) == [True, True, True]
    assert probed.worker.max_model_len == 4096
    assert probed.worker.models == ("tiny",)
    gauges = probed.worker.gauges
    assert gauges is not None
    assert (gauges.running, gauges.prompt_tokens_total) == (2, 100)
    assert (count(probed.fake, MODELS), count(probed.fake, METRICS)) == (1, 3)
    assert len(probed.fake.connections) == 1


async def test_up_and_down_need_several_probes(probed: ProbedWorker) -> None:
    await probed.probe_times(1)
    for status, states in (
        (503, [True, True, False]),
        (200, [False]),
        (500, [False]),
        (200, [False, True]),
    ):
        probed.set_health(status)
        assert await probed.probe_times(len(states)) == states


async def test_adapter_loaded_at_run_time_is_found(probed: ProbedWorker) -> None:
    await probed.probe_times(1)
    probed.set_models(("tiny", 4096), ("adapter", None))
    await probed.probe_times(1)
    assert probed.fleet.roster.workers_of("adapter") == []
    probed.prober.clock = lambda: time.monotonic() + MODELS_EVERY_S
    await probed.probe_times(1)
    assert probed.fleet.roster.workers_of("adapter") == [probed.worker]


async def test_restart_between_two_probes_is_noticed(
    probed: ProbedWorker, caplog: pytest.LogCaptureFixture
) -> None:
    roster = probed.fleet.roster
    roster.prefixes.record((1, 2), probed.worker.index)
    await probed.probe_times(1)
    assert roster.workers_of("tiny") == [probed.worker]
    assert roster.prefixes.matches((1, 2))
    probed.set_page(vllm_page(Engine(), started=STARTED + 60))
    probed.set_models(("other", 512))
    assert await probed.probe_times(1) == [True]
    assert probed.worker.max_model_len == 512
    assert roster.workers_of("tiny") == []
    assert probed.worker.not_served_because == "serves other, not tiny"
    assert "worker s0 serves other, not tiny" in caplog.text
    assert not roster.prefixes.matches((1, 2))


async def test_restart_is_noticed_by_lower_counters(probed: ProbedWorker) -> None:
    for prompt_tokens, length in ((100, 4096), (99, 512)):
        probed.set_page(vllm_page(Engine(prompt_tokens=prompt_tokens), started=None))
        probed.set_models(("tiny", length))
        await probed.probe_times(1)
        assert probed.worker.max_model_len == length


async def test_models_are_requested_after_a_failure(probed: ProbedWorker) -> None:
    await probed.probe_times(1)
    probed.set_health(500)
    await probed.probe_times(1)
    probed.set_health(200)
    probed.set_models(("tiny", 512))
    await probed.probe_times(1)
    assert probed.worker.max_model_len == 512


async def test_shorter_max_model_len_is_logged_once(
    probed: ProbedWorker, caplog: pytest.LogCaptureFixture
) -> None:
    for stated in (1000, 8000, 16000):  # each after a reload
        url = probed.fake.url
        probed.fleet.roster.respecify(probed.worker, spec(url, max_model_len=stated))
        for _ in range(3):
            probed.probe._models_known_at = -inf
            await probed.probe.probe()
        assert probed.worker.max_model_len == min(stated, 4096)
        message = (
            f"worker s0 reports a context of 4096 tokens, less than its max_model_len of {stated}"
        )
        assert caplog.text.count(message) == (stated > 4096)


async def test_max_model_len_is_that_of_the_workers_model(probed: ProbedWorker) -> None:
    probed.set_models(("base", 512), ("tiny", 2048), ("adapter", None))
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
    probed.fake.always(scripts.answer(body=json.dumps({"data": cards}).encode()), MODELS)
    await probed.probe_times(1)
    roster = probed.fleet.roster
    assert roster.origin("tiny") == ("/models/tiny", None)
    assert roster.origin("adapter") == ("/adapters/a", "tiny")
    for model in ("odd", "odder", "unknown"):
        assert roster.origin(model) == (None, None)
    roster.drain("s0")
    assert roster.origin("tiny") == (None, None)


async def test_changed_api_key_is_used_by_the_next_probe(probed: ProbedWorker) -> None:
    await probed.probe_times(1)
    probed.fleet.roster.respecify(probed.worker, spec(probed.fake.url, api_key="k2"))
    probed.fake.calls.clear()
    assert await probed.probe_times(1) == [True]
    keys = [(call.path, call.all(b"authorization")) for call in probed.fake.calls]
    assert keys == [(HEALTH, [b"Bearer k2"]), (METRICS, [b"Bearer k2"])]


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_refused_model_list_keeps_the_configured_model(
    probed: ProbedWorker, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    probed.fake.always(scripts.error(status), MODELS)
    assert await probed.probe_times(2) == [True, True]
    assert probed.worker.models == ("tiny",)
    assert count(probed.fake, MODELS) == 1  # not requested by every probe
    assert "api_key" in caplog.text


@pytest.mark.parametrize(
    "garbage",
    [b"", b"<html>", b"[]", b"{}", b'{"data": []}', b'{"data": [1]}', b'{"data": "x"}', b"\xff"],
)
async def test_malformed_model_list_fails_the_probe(probed: ProbedWorker, garbage: bytes) -> None:
    probed.fake.always(scripts.answer(body=garbage), MODELS)
    assert await probed.probe_times(3) == [False, False, False]
    probed.set_models(("tiny", 4096))
    assert await probed.probe_times(2) == [False, True]


async def test_missing_metrics_expire_after_a_while(probed: ProbedWorker) -> None:
    await probed.probe_times(1)
    probed.set_page(b"<html>")
    assert await probed.probe_times(1) == [True]
    assert probed.worker.gauges is not None
    probed.prober.clock = lambda: time.monotonic() + 2 * MAX_PAGE_AGE_S
    assert await probed.probe_times(1) == [True]
    assert probed.worker.gauges is None


async def test_endless_metrics_page_is_cut_off(
    probed: ProbedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def endless(call: Call) -> None:
        await call.send(scripts.head(200))
        while True:
            await call.send(b"x" * 65_536)

    monkeypatch.setattr(probe_client, "MAX_PAGE_BYTES", 1 << 20)
    probed.fake.always(endless, METRICS)
    async with asyncio.timeout(DEADLINE_S / 2):
        assert await probed.probe_times(1) == [True]
    assert probed.worker.gauges is None


async def test_refused_probe_is_logged_once(
    probed: ProbedWorker, caplog: pytest.LogCaptureFixture
) -> None:
    await probed.fake.stop()
    caplog.set_level(logging.INFO)
    assert await probed.probe_times(3) == [False] * 3
    assert probed.worker.not_served_because.startswith("GET /health: ")
    # Logged once and without a warning, since the worker may still be loading.
    assert caplog.text.count("worker s0 is not up yet: GET /health") == 1
    assert [record.levelname for record in caplog.records] == ["INFO"]


@pytest.mark.parametrize(("path", "up"), [(HEALTH, False), (METRICS, True), (MODELS, False)])
async def test_redirects_are_not_followed(probed: ProbedWorker, path: str, up: bool) -> None:
    location = (b"location", f"{probed.fake.url}/elsewhere".encode())
    probed.fake.always(scripts.answer(307, b"", location), path)
    assert await probed.probe_times(1) == [up]
    assert probed.fake.served == []


async def test_streaming_worker_stays_up_on_probe_timeout(probed: ProbedWorker) -> None:
    await probed.probe_times(1)
    probed.fake.always(scripts.stall, HEALTH)
    probed.prober.settings = ProbeConfig(timeout_s=0.05)
    for _ in range(4):
        probed.worker.total_written += 1
        assert await probed.probe_times(1) == [True]
    assert await probed.probe_times(3) == [True, True, False]
    assert probed.worker.not_served_because == "GET /health: no response in time"


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


@asynccontextmanager
async def probing(fleet: Fleet) -> AsyncIterator[None]:
    task = asyncio.create_task(prober_of(fleet).run())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_hung_worker_does_not_delay_other_probes_and_leaves_no_tasks() -> None:
    fleet, hung, healthy = Fleet(), FakeWorker(), FakeWorker()
    before = asyncio.all_tasks()
    hung.always(scripts.stall, HEALTH)
    async with serving(hung, healthy):
        fleet.roster.add(spec(hung.url, "hung"))
        fleet.roster.add(spec(healthy.url, "well"))
        async with probing(fleet):
            # Less than the timeout of a probe.
            await eventually(lambda: count(healthy, HEALTH) >= 10, within=DEADLINE_S / 2)
    assert count(hung, HEALTH) == 1
    assert asyncio.all_tasks() == before


async def test_added_and_removed_workers_are_probed_and_dropped() -> None:
    fleet, first, second = Fleet(), FakeWorker(), FakeWorker()
    async with serving(first, second):
        fleet.roster.add(spec(first.url))
        async with probing(fleet):
            await eventually(lambda: count(first, HEALTH) >= 2, within=DEADLINE_S)
            fleet.roster.remove("s0")
            fleet.roster.add(spec(second.url, "s1"))
            await eventually(lambda: count(second, HEALTH) >= 2, within=DEADLINE_S)
            seen = count(first, HEALTH)
            await eventually(lambda: count(second, HEALTH) >= 10, within=DEADLINE_S)
        assert count(first, HEALTH) <= seen + 1
