"""A benchmark run through the real router."""

from __future__ import annotations

import asyncio
from pathlib import Path

from proxy.app import App
from proxy.config import load
from tests.bench.fake_openai import FakeOpenAI, serving
from vllm_sched.bench.client.endpoint import EndpointOptions, probe_endpoint
from vllm_sched.bench.client.player import play
from vllm_sched.bench.plots.crowd import sent_to_workers
from vllm_sched.bench.traffic.catalogue import find
from vllm_sched.bench.traffic.schedule import Schedule


async def test_outcomes_name_the_worker_of_each_request(tmp_path: Path) -> None:
    async with serving(FakeOpenAI(itl_s=0.005)) as one, serving(FakeOpenAI(itl_s=0.005)) as two:
        source = tmp_path / "fleet.yaml"
        source.write_text(
            "model: fake\n"
            f"workers: [{{name: s0, url: '{one.url}'}}, {{name: s1, url: '{two.url}'}}]\n"
            "router: {port: 0, admin: {port: 0}, probe: {interval_s: 0.05}}\n"
            "routing: {policy: round_robin}\n"
        )
        router = App(load(source), source)
        await router.start()
        try:
            async with asyncio.timeout(15):
                while not all(worker.up for worker in router.fleet.roster):  # noqa: ASYNC110 - no event
                    await asyncio.sleep(0.01)
            endpoint = await probe_endpoint(
                EndpointOptions(f"http://127.0.0.1:{router.wire.port}", explain=True)
            )
            schedule = Schedule(source=find("40x8"), rate=100, count=40, tenants=2)
            played = await play(endpoint, schedule)
        finally:
            await router.stop()
    assert not [each.error for each in played.outcomes if each.error]
    assert endpoint.measure.per_word == 2  # measured through the router
    workers, _, rows = sent_to_workers(played.outcomes)
    assert workers == ["s0", "s1"]
    assert all(any(row) for row in rows)
    assert {each.worker for each in played.outcomes} == {"s0", "s1"}
    assert len(one.played) + len(two.played) == 40
