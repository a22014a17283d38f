"""The isolation benchmark without its workers: who is started, what is judged, what is counted."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer

from benchmarks.isolation import identical, stage, verdict
from benchmarks.isolation.__main__ import main
from benchmarks.isolation.identical import Pass, Route
from proxy.config import parse
from tests.bench.canned import canned_comparison
from vllm_sched.errors import UsageError
from vllm_sched.workers import launch


@pytest.fixture(autouse=True)
def two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have two processors and a CPU build."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 5})
    monkeypatch.setattr(launch, "on_cpu", lambda: True)


def test_both_pairs_have_the_same_two_processors(tmp_path: Path) -> None:
    config = stage.fleet()
    workers = stage.started(config, tmp_path)
    assert [worker.cpus for worker in workers] == [(2,), (5,), (2,), (5,)]
    moved = ["--kv-transfer-config" in worker.command for worker in workers]
    assert moved == [False, False, True, True]


def test_each_pair_has_a_router_of_its_own(tmp_path: Path) -> None:
    config = stage.fleet()
    files = [Path(side.worker.command[-1]) for side in stage.sides(config, tmp_path)]
    whole, halves = (parse(file.read_text(), file.name) for file in files)
    assert [worker.role for worker in whole.workers] == ["general", "general"]
    assert (whole.routing.policy, whole.transfer) == ("least_loaded", None)
    assert [worker.role for worker in halves.workers] == ["prefill", "decode"]
    assert halves.routing.disaggregate_above == stage.ABOVE
    urls = [worker.url for config in (whole, halves) for worker in config.workers]
    assert len({*urls}) == 4
    assert yaml.safe_load(files[0].read_text())["model"] == "tiny"


def test_one_processor_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    with pytest.raises(UsageError, match="two processors"):
        stage.fleet()


def test_only_longs_are_handed_over_and_none_waits_for_another() -> None:
    arrivals = stage.workload().arrivals
    longs = [each.at for each in arrivals if each.klass == "long"]
    assert longs == [0.0, 4.0, 8.0, 12.0]
    above = {each.klass for each in arrivals if each.prompt_tokens > stage.ABOVE}
    assert above == {"long"}


def test_promises_are_judged_by_their_ratio() -> None:
    found = {each.what: each for each in verdict.verdicts(canned_comparison((2.0,), (0.5,)))}
    short = found["a short prompt, to its first token, p50"]
    assert short.ratio == pytest.approx(0.25)
    assert short.kept
    decode = found["p99 between two tokens of a running decode"]
    assert decode.ratio == pytest.approx(1.0)
    assert not decode.kept
    assert not verdict.Verdict("", None, None, None, 1.0).kept


def test_each_long_prompt_is_judged_by_the_slowest() -> None:
    compared = canned_comparison((1.0, 1.0, 1.0), (1.0, 1.0, 1.0))
    longs = [
        record
        for played in compared.candidate.rounds
        for record in played.records
        if record.klass == "long"
    ]
    found = verdict.slowest(compared)
    assert (found.ratio, found.kept) == (pytest.approx(1.0), True)
    one = longs[-1]
    one.ticks = [one.sent + 1.2 * (found.baseline or 0.0), *one.ticks[1:]]
    found = verdict.slowest(compared)
    assert (found.ratio, found.kept) == (pytest.approx(1.2), False)
    by_what = {each.what: each.ratio for each in verdict.verdicts(compared)}
    assert by_what["a 12,000-token prompt, to its first token, p50"] == pytest.approx(1.0)
    assert by_what[found.what] == pytest.approx(1.2)


def test_prompts_are_of_all_sizes_and_always_the_same() -> None:
    made = identical.prompts(100)
    sizes = sorted(map(len, made))
    assert (sizes[0], sizes[-1]) == (10, 12_000)
    assert made == identical.prompts(100)
    assert made != identical.prompts(100, seed=1)


@pytest.fixture
def asked() -> list[tuple[str, str]]:
    """Collect what servers were asked: the path, and whether they should say who answers."""
    return []


@pytest.fixture
async def servers(asked: list[tuple[str, str]]) -> AsyncIterator[dict[str, str]]:
    """Serve right answers, answers with other tokens, and the right tokens by another cache."""

    def answering(tokens: list[int], likely: float) -> web.Application:
        says = {"route": "", "fetches": "0"}
        fetched = [0]

        async def answer(request: web.Request) -> web.Response:
            asked.append((request.path, request.headers.get("X-Explain", "")))
            body = await request.json()
            choice: dict[str, Any] = {"token_ids": tokens, "logprobs": {"token_logprobs": [likely]}}
            assert body["temperature"] == 0
            fetched[0] += int(says["fetches"])
            return web.json_response({"choices": [choice]}, headers={"X-Route": says["route"]})

        async def forget(request: web.Request) -> web.Response:
            asked.append((request.path, ""))
            return web.Response()

        async def metrics(_: web.Request) -> web.Response:
            name = "vllm:nixl_xfer_time_seconds"
            text = f'{name}_sum{{engine="0"}} 9.0\n{name}_count{{engine="0"}} {fetched[0]}.0\n'
            return web.Response(text=text)

        async def tell(request: web.Request) -> web.Response:
            says.update(request.query)
            return web.Response()

        app = web.Application()
        app.router.add_post("/v1/completions", answer)
        app.router.add_post("/reset_prefix_cache", forget)
        app.router.add_post("/tell", tell)
        app.router.add_get("/metrics", metrics)
        return app

    told = {"right": ([7], -1.0), "near": ([7], -1.0001), "other": ([8], -1.0), "far": ([7], -1.1)}
    running = {name: TestServer(answering(*each)) for name, each in told.items()}
    for server in running.values():
        await server.start_server()
    yield {name: str(server.make_url("")).rstrip("/") for name, server in running.items()}
    for server in running.values():
        await server.close()


TWICE = (Pass("cold"), Pass("warm"))


async def test_what_differs_is_counted_by_pass(servers: dict[str, str]) -> None:
    routes = [Route(name, url, TWICE) for name, url in servers.items()]
    found = await identical.differing(routes, [[1], [2]], "m")
    assert {each.route: each.differ for each in found} == {
        "right, cold": 0, "right, warm": 0, "near, cold": 0, "near, warm": 0,
        "other, cold": 2, "other, warm": 2, "far, cold": 2, "far, warm": 2,
    }  # fmt: skip
    assert [each.wrong for each in found] == [False] * 4 + [True] * 4


async def test_caches_are_emptied_before_a_pass(
    servers: dict[str, str], asked: list[tuple[str, str]]
) -> None:
    url = servers["right"]
    route = Route("r", url, (Pass("cold", (url,)), Pass("warm")))
    await identical.differing([route], [[1]], "m")
    paths = [path for path, explain in asked]
    assert paths == ["/reset_prefix_cache", "/v1/completions", "/v1/completions"]
    assert [explain for _, explain in asked] == ["", "1", "1"]


@pytest.mark.parametrize(
    ("by", "fetches", "wrong"),
    [("d; prefill=p; reason=x", 1, False), ("d; prefill=p", 0, True), ("d; reason=x", 1, True)],
)
async def test_what_is_not_handed_over_is_wrong(
    servers: dict[str, str], monkeypatch: pytest.MonkeyPatch, by: str, fetches: int, wrong: bool
) -> None:
    monkeypatch.setattr(identical, "PAUSE_S", 0.0)
    says = {"route": by, "fetches": str(fetches)}
    url = servers["right"]
    told = "?" + "&".join(f"{key}={value}" for key, value in says.items())
    async with aiohttp.ClientSession() as session:
        await session.post(f"{url}/tell{told}")
    route = Route("handed over", url, TWICE, decode=url)
    found = await identical.differing([route], [[1], [2]], "m")
    assert [each.wrong for each in found] == [wrong, wrong]
    assert [each.fetched for each in found] == [2 * fetches] * 2
    assert found[0].handed_over == (2 if "prefill" in by else 0)


def test_routes_end_with_everything_handed_over(tmp_path: Path) -> None:
    config = stage.fleet()
    whole = stage.sides(config, tmp_path)[0].worker
    sized, handed = stage.routers(config, tmp_path)
    files = [Path(each.command[-1]) for each in (sized, handed)]
    by_size, halves = (parse(file.read_text(), file.name) for file in files)
    assert [worker.role for worker in by_size.workers] == ["short", "long"]
    assert (by_size.routing.policy, by_size.transfer) == ("length", None)
    assert halves.routing.disaggregate_above == 1
    assert not halves.routing.prefix_affinity
    routes = stage.routes(config, whole, sized, handed)
    everyone = tuple(worker.url for worker in config.workers)
    assert all(each.passes[0].forget == everyone for each in routes[:4])
    assert routes[3].decode == config.workers[3].url
    assert routes[3].passes[1].forget == (config.workers[3].url,)
    assert routes[4].passes == (Pass("warm"),)


@pytest.mark.parametrize(
    "arguments", [["--rounds=-1"], ["--rounds=0"], ["--save", "no/such/folder/f.json"]]
)
def test_what_makes_no_sense_is_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
