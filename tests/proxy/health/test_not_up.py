"""Workers that are not up, and the reasons shown to operators."""

from __future__ import annotations

from pathlib import Path

import aiohttp

from tests.proxy.metrics.scraped import scraped
from tests.proxy.running import DEADLINE_S, running, serving, write_fleet
from tests.proxy.wire import scripts
from tests.proxy.wire.fake_worker import FakeWorker
from tests.proxy.wire.site import eventually
from vllm_sched.workers.launch import free_port

NO_RESPONSE = "GET /health: no response in time"
WRONG_MODEL = "serves llama, not tiny"


async def test_admin_and_metrics_show_why_workers_are_not_up(tmp_path: Path) -> None:
    hung, other = FakeWorker("hung"), FakeWorker("other", model="llama")
    refused = {"name": "refused", "url": f"http://127.0.0.1:{free_port()}"}
    hung.always(scripts.stall, "/health")
    probe = {"interval_s": 0.05, "timeout_s": 0.5}
    async with serving(hung, other):
        source = write_fleet(tmp_path, refused, hung, other, router={"probe": probe})
        async with running(source) as app, aiohttp.ClientSession(app.admin_url) as web:
            await eventually(
                lambda: all(worker.not_served_because for worker in app.fleet.roster),
                within=DEADLINE_S,
            )
            async with web.get("/admin/workers") as answer:
                workers = {worker["name"]: worker for worker in await answer.json()}
            async with web.post("/admin/explain", json={"prompt_tokens": 10}) as answer:
                explained = await answer.json()
            page = scraped(app.metrics).splitlines()
    assert {name: worker["state"] for name, worker in workers.items()} == {
        "refused": "down", "hung": "down", "other": "wrong_model",
    }  # fmt: skip
    assert "GET /health" in workers["refused"]["why"]
    assert workers["refused"]["why"] != NO_RESPONSE
    assert workers["hung"]["why"] == NO_RESPONSE
    assert workers["other"]["why"] == WRONG_MODEL
    up = [line.rpartition(" ")[2] for line in page if line.startswith("proxy_worker_up{")]
    assert up == ["0"] * 3
    assert explained["status"] == 503
    notes = {score["worker"]: score["note"] for score in explained["scores"]}
    assert set(notes) == set(workers)
    assert notes["refused"].startswith("down: GET /health")
    assert notes["hung"] == f"down: {NO_RESPONSE}"
    assert notes["other"] == WRONG_MODEL
