"""The isolation benchmark without workers."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from benchmarks.isolation import identical, stage, transfers, verdict
from benchmarks.isolation.identical import Pass, Route
from benchmarks.policies import promise
from proxy.config import parse
from tests.bench.canned import canned_comparison, record
from vllm_sched.bench.compare.compare import ComparisonPlan
from vllm_sched.bench.compare.runner import Round
from vllm_sched.errors import UsageError
from vllm_sched.workers import launch


@pytest.fixture(autouse=True)
def two_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that there are two processors and a CPU build."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 5})
    monkeypatch.setattr(launch, "on_cpu", lambda: True)


def test_both_pairs_use_the_same_two_processors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = stage.fleet()
    workers = stage.workers(config, tmp_path)
    assert [worker.cpus for worker in workers] == [(2,), (5,), (2,), (5,)]
    moved = ["--kv-transfer-config" in worker.command for worker in workers]
    assert moved == [False, False, True, True]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    with pytest.raises(UsageError, match="two processors"):
        stage.fleet()


def test_each_pair_has_its_own_router(tmp_path: Path) -> None:
    config = stage.fleet()
    sides = stage.sides(config, tmp_path, 700)
    files = [Path(side.worker.command[-1]) for side in sides]
    whole, halves = (parse(file.read_text(), file.name) for file in files)
    assert [worker.role for worker in whole.workers] == ["general", "general"]
    assert (whole.routing.policy, whole.transfer) == ("least_loaded", None)
    assert [worker.role for worker in halves.workers] == ["prefill", "decode"]
    assert halves.routing.disaggregate_above == 700
    assert stage.admin_url(sides[1].worker) == f"http://127.0.0.1:{halves.router.admin.port}"
    urls = [worker.url for config in (whole, halves) for worker in config.workers]
    assert len({*urls}) == 4
    assert whole.model == "tiny"
    longs = [each for each in stage.workload().arrivals if each.klass == "long"]
    assert [each.at for each in longs] == [0.0, 4.0, 8.0, 12.0]


def test_promises_are_judged_by_their_ratio() -> None:
    found = {each.what: each for each in verdict.verdicts(canned_comparison((2.0,), (0.5,)))}
    short = found["a short prompt, to its first token, p50"]
    assert short.ratio == pytest.approx(0.25)
    assert short.kept
    decode = found["p99 between two tokens of a running decode"]
    assert decode.ratio == pytest.approx(1.0)
    assert not decode.kept
    assert not verdict.Verdict("", None, None, None, 1.0).kept


def test_prefills_are_judged_by_the_slowest() -> None:
    compared = canned_comparison((1.0, 1.0, 1.0), (1.0, 1.0, 1.0))
    longs = [
        record
        for played in compared.contenders[1].rounds
        for record in played.records
        if record.klass == "long"
    ]
    half, slowest = verdict.prefills(compared)
    assert (slowest.ratio, slowest.kept) == (pytest.approx(1.0), True)
    one = longs[-1]
    one.ticks = [one.sent + 1.2 * (slowest.baseline or 0.0), *one.ticks[1:]]
    half, slowest = verdict.prefills(compared)
    assert (half.ratio, half.kept) == (pytest.approx(1.0), True)
    assert (slowest.ratio, slowest.kept) == (pytest.approx(1.2), False)
    by_what = {each.what: each for each in verdict.verdicts(compared)}
    assert by_what[slowest.what] == slowest
    assert half.what.startswith("long prompts that wait for no other (3; 3)")
    compared.contenders[1].rounds[:] = [Round(1, ())]
    assert [each.kept for each in verdict.prefills(compared)] == [False, False]


def sent_at(*times: float, took: float = 5.0, error: str = "") -> Round:
    """Return a round of long prompts with late first tokens."""
    records = [record("long", at, [at + took + index]) for index, at in enumerate(times)]
    for sent in records:
        sent.error = error
    return Round(1, tuple(records))


@pytest.mark.parametrize(
    ("played", "workers", "found"),
    [
        (sent_at(0.0, 4.0, 8.0), 1, [5.0]),  # the second is done at 10
        (sent_at(0.0, 4.0, 8.0), 2, [5.0, 6.0, 7.0]),
        (sent_at(0.0, 1.0, 2.0), 2, [5.0, 6.0]),
        (sent_at(0.0, 5.0, 11.0), 1, [5.0, 6.0, 7.0]),
        (sent_at(), 1, []),
        (sent_at(0.0, error="no answer"), 1, []),
    ],
)
def test_prefills_that_wait_for_another_or_fail_do_not_count(
    played: Round, workers: int, found: list[float]
) -> None:
    assert verdict.unhindered([played], workers) == pytest.approx(found)


# The router's metrics and decisions

PAGE = """\
# HELP proxy_handovers_total Hand-overs.
proxy_handovers_total{{outcome="prefilled"}} 9
proxy_handovers_total{{outcome="transferred"}} {0}
proxy_handover_warmups_total{{outcome="done"}} {1}
proxy_handover_warmups_total{{outcome="failed"}} 3
proxy_transfer_seconds_sum{{model="tiny"}} 1.5
proxy_transfer_seconds_count{{model="tiny"}} {0}
proxy_predicted_transfer_seconds_count{{model="tiny"}} 7
proxy_transfer_tokens_total{{model="tiny"}} {2}
proxy_transfer_bytes_total{{worker="decode-0",role="decode"}} {3}
proxy_transfer_bytes_total{{worker="prefill-0",role="prefill"}} 1000
"""
LONGS = 4  # per round


def decision(predicted_s: float, seen_s: float | None, tokens: int = 12_000) -> dict[str, Any]:
    times = {"transfer_s": predicted_s, "transferred_s": seen_s}
    return {"prefill_worker": "prefill-0", "prompt_tokens": tokens, **times}


def transfers_with(**changed: Any) -> transfers.Transfers:
    """Return a good run, with these changes."""
    counts = {"transferred": 8, "timed": 8, "tokens": 96_000, "bytes": 9.6e6} | changed
    usual = [*[decision(0.01, 0.05)] * LONGS, *[decision(0.045, 0.04)] * LONGS]
    decisions = counts.pop("decisions", usual)
    before = transfers.Counts(connections=counts.pop("connections", 1))
    return transfers.Transfers(before, transfers.Counts(1, **counts), 8, LONGS, decisions, 100)


def test_figures_of_a_good_run() -> None:
    found = transfers_with().promises
    handed, timed, predicted, moved_bytes, made, first = (each.measured for each in found)
    assert (handed, timed, made) == (8, 8, 1)
    assert predicted == pytest.approx(0.045 / 0.04)  # of the measured rounds
    assert moved_bytes == pytest.approx(1.0)
    assert first == pytest.approx(0.05 / 0.04)
    assert "predicted median transfer (45 ms), to the measured one (40 ms)" in found[2].what
    assert "(1.2 MB each)" in found[3].what
    assert {each["kept"] for each in promise.to_json(found)} == {True}
    verdicts = verdict.to_json(verdict.verdicts(canned_comparison()))
    assert json.loads(json.dumps(verdicts))[0]["at_most"] == 0.15


SLOW_FIRST = [decision(0.01, 2.0), *[decision(0.04, 0.04)] * 7]


@pytest.mark.parametrize(
    ("changed", "missed"),
    [
        ({}, set()),
        ({"decisions": [decision(0.04, 0.04)] * 7}, {0}),
        ({"transferred": 7}, {1}),
        ({"timed": 7}, {1}),
        ({"decisions": [decision(0.04 * 1.31, 0.04)] * 8}, {2}),
        ({"decisions": [decision(0.04 * 0.69, 0.04)] * 8}, {2}),
        ({"decisions": [decision(0.04, None)] * 8}, {2, 5}),
        ({"bytes": 0.0}, {3}),
        ({"bytes": 2e7}, {3}),
        ({"tokens": 0, "bytes": 0}, {3}),
        ({"connections": 0}, {4}),
        ({"decisions": SLOW_FIRST}, {5}),
    ],
)
def test_promises_are_kept_or_missed(changed: dict[str, Any], missed: set[int]) -> None:
    run = transfers_with(**changed)
    kept = [each.kept for each in run.promises]
    assert {index for index, each in enumerate(kept) if not each} == missed
    assert run.missing == (0 in missed)


async def test_counts_and_decisions_are_read_from_the_router(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfers, "POLL_S", 0.0)
    monkeypatch.setattr(transfers, "SETTLE_S", 0.0)
    numbers = iter([(0, 0, 0, 0), (0, 1, 0, 0), (0, 1, 0, 0), (8, 1, 96_000, 2e8)])
    wanted: list[dict[str, str]] = []

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text=PAGE.format(*next(numbers)))

    async def decisions(request: web.Request) -> web.Response:
        wanted.append(dict(request.query))
        return web.json_response([decision(2.0, 2.0, 100), decision(1.0, 3.0), decision(4.0, 5.0)])

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/admin/decisions", decisions)
    async with TestServer(app) as server:
        url = str(server.make_url("")).rstrip("/")
        before = await transfers.wait_connected(url)
        plan = ComparisonPlan("tiny", stage.workload(longs=LONGS), 1)
        found = await transfers.fetch(url, url, before, plan, 2048)
    assert before == transfers.Counts(connections=1, bytes=1000)
    assert found.after == transfers.Counts(1, 8, 8, 96_000, 2e8 + 1000)
    assert [each["transfer_s"] for each in found.handed_over] == [4.0, 1.0]  # oldest first
    assert (found.sent, found.warming, found.token_bytes) == (8, 4, 2048)
    assert wanted == [{"reason": "handover", "limit": "1000"}]


def test_prompts_have_all_sizes_and_depend_only_on_the_seed() -> None:
    made = identical.prompts(100)
    sizes = sorted(map(len, made))
    assert (sizes[0], sizes[-1]) == (10, 12_000)
    assert made == identical.prompts(100)
    assert made != identical.prompts(100, seed=1)


class Answers:
    """A worker with a fixed answer, which counts its transfers and keeps what it got."""

    def __init__(
        self, token: int = 7, logprob: float = -1.0, by: str = "", fetches: int = 0
    ) -> None:
        logprobs = {"token_logprobs": [logprob]}
        self.choice: dict[str, Any] = {"token_ids": [token], "logprobs": logprobs}
        self.by, self.fetches, self.fetched = by, fetches, 0
        self.requests: list[str] = []

    async def answer(self, request: web.Request) -> web.Response:
        self.requests.append(f"{request.path} {request.headers.get('X-Explain', '')}".strip())
        if request.path == "/reset_prefix_cache":
            return web.Response()
        if request.path == "/metrics":
            name = "vllm:nixl_xfer_time_seconds"
            text = f'{name}_sum{{engine="0"}} 9.0\n{name}_count{{engine="0"}} {self.fetched}.0\n'
            return web.Response(text=text)
        assert (await request.json())["temperature"] == 0
        self.fetched += self.fetches
        return web.json_response({"choices": [self.choice]}, headers={"X-Route": self.by})


@asynccontextmanager
async def served(*answers: Answers) -> AsyncIterator[list[str]]:
    async with AsyncExitStack() as stack:
        urls = []
        for each in answers:
            app = web.Application()
            app.router.add_route("*", "/{path:.*}", each.answer)
            server = await stack.enter_async_context(TestServer(app))
            urls.append(str(server.make_url("")).rstrip("/"))
        yield urls


async def test_different_answers_are_counted_per_pass() -> None:
    right = Answers()
    near, far = Answers(logprob=-1.0001), Answers(logprob=-1.1)
    async with served(right, near, Answers(token=8), far) as urls:
        twice = Pass("cold", (urls[0],)), Pass("warm")
        names = ("right", "near", "other", "far")
        routes = [Route(name, url, twice) for name, url in zip(names, urls, strict=True)]
        found = await identical.compare(routes, [[1], [2]], "m")
    assert {each.route: each.differ for each in found} == {
        f"{name}, {cache}": 2 * (name in ("other", "far"))
        for name in names
        for cache in ("cold", "warm")
    }
    assert [each.wrong for each in found] == [False] * 4 + [True] * 4
    # The caches are reset before the first pass of each route.
    assert right.requests[:5] == ["/reset_prefix_cache", *["/v1/completions 1"] * 4]


@pytest.mark.parametrize(
    ("by", "fetches", "wrong"),
    [("d; prefill=p; reason=x", 1, False), ("d; prefill=p", 0, True), ("d; reason=x", 1, True)],
)
async def test_route_without_hand_overs_is_wrong(
    monkeypatch: pytest.MonkeyPatch, by: str, fetches: int, wrong: bool
) -> None:
    monkeypatch.setattr(identical, "POLL_S", 0.0)
    async with served(Answers(by=by, fetches=fetches)) as [url]:
        route = Route("handed over", url, (Pass("cold"), Pass("warm")), decode=url)
        found = await identical.compare([route], [[1], [2]], "m")
    assert [each.wrong for each in found] == [wrong, wrong]
    assert [each.fetched for each in found] == [2 * fetches] * 2
    assert found[0].handed_over == (2 if "prefill" in by else 0)


def test_last_routes_hand_everything_over(tmp_path: Path) -> None:
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
