"""The player against an endpoint with known latencies."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from tests.bench.fake_openai import FakeOpenAI, serving, tokens
from vllm_sched.bench.client.endpoint import CHAT, EndpointOptions, probe_endpoint
from vllm_sched.bench.client.player import PlayedRun, RunProgress, play
from vllm_sched.bench.results.outcome import Outcome
from vllm_sched.bench.traffic.catalogue import find
from vllm_sched.bench.traffic.schedule import Schedule


def schedule(workload: str = "20x4", **settings: Any) -> Schedule:
    return Schedule(source=find(workload), **settings)


async def played(fake: FakeOpenAI, planned: Schedule, path: str = "", **settings: Any) -> PlayedRun:
    async with serving(fake):
        endpoint = await probe_endpoint(
            EndpointOptions(fake.url, **({"path": path} if path else {}))
        )
        return await play(endpoint, planned, **settings)


@pytest.mark.parametrize("path", ["", CHAT])
async def test_every_request_is_sent_and_answered_completely(path: str) -> None:
    fake = FakeOpenAI()
    progress = RunProgress()
    result = await played(fake, schedule(rate=200, count=30), path, progress=progress)
    assert [o.error for o in result.outcomes] == [""] * 30
    assert {(len(o.ticks), o.completed) for o in result.outcomes} == {(4, 4)}
    assert all(abs(o.prompt_tokens - 20) <= 1 for o in result.outcomes)
    assert len(fake.played) == 30
    assert len({str(body) for body in fake.played}) == 30  # all prompts differ
    assert (progress.sent, progress.done, progress.tokens, progress.in_flight) == (30, 30, 120, 0)
    for outcome in result.outcomes:
        assert (
            outcome.at <= outcome.sent <= outcome.ticks[0] <= outcome.ticks[-1] <= result.duration
        )
    assert not result.interrupted
    assert result.short == result.cut == 0


async def test_open_loop_does_not_wait_for_answers() -> None:
    progress = RunProgress()
    fake = FakeOpenAI(ttft_s=0.3, itl_s=0.03, failing=(2, 5))
    result = await played(fake, schedule(rate=1000, count=20), progress=progress)
    assert fake.most_under_way == 18  # and two refusals, which affect no other request
    failed = [each.error for each in result.outcomes if each.error]
    assert failed == ['HTTP 503: {"error": {"message": "no\\nroom"}}'] * 2
    assert (progress.done, progress.failed) == (18, 2)
    for outcome in result.outcomes:
        if outcome.good:
            assert outcome.ttft >= 0.3
            assert outcome.tpot is not None
            assert outcome.tpot >= 0.03


async def test_latency_counts_from_the_scheduled_time() -> None:
    early, late = (Outcome(1.0, "a", 10, 5, sent=sent) for sent in (0.9997, 1.5))
    assert PlayedRun((early, early), duration=1.0, busy=0.1, stall=0.0).late_p99 == 0.0
    assert PlayedRun((early, late), duration=1.0, busy=0.1, stall=0.0).late_p99 > 0.4
    async with serving(FakeOpenAI()) as fake:
        endpoint = await probe_endpoint(EndpointOptions(fake.url))
        running = asyncio.create_task(play(endpoint, schedule(rate=20, count=10)))
        await fake.begun.wait()
        time.sleep(0.6)  # noqa: ASYNC251 - stalls the client
        result = await running
    late = [each for each in result.outcomes if each.late > 0.05]
    assert late
    assert all(each.ttft >= each.late for each in late)
    assert max(each.ttft for each in result.outcomes) > 0.3
    assert result.stall > 0.4
    words = " ".join(result.warnings())
    assert "could not keep up" in words
    assert "had no CPU" in words


async def test_closed_loop_keeps_the_concurrency() -> None:
    fake = FakeOpenAI(itl_s=0.005)
    result = await played(fake, schedule(concurrency=4, count=20))
    assert len(result.outcomes) == 20
    assert fake.most_under_way == 4
    assert all(each.late < 0.05 for each in result.outcomes)


async def test_closed_loop_ends_after_its_duration() -> None:
    result = await played(FakeOpenAI(itl_s=0.01), schedule(concurrency=2, duration_s=0.3))
    assert 4 <= len(result.outcomes) < 60
    assert all(each.at < 0.3 and each.good for each in result.outcomes)


@pytest.mark.parametrize(("retry_after", "min_wait_s"), [("", 0.1), ("1", 1.0), ("tomorrow", 0.1)])
async def test_closed_loop_waits_after_a_refusal(retry_after: str, min_wait_s: float) -> None:
    fake = FakeOpenAI(failing=(1,), retry_after=retry_after)
    result = await played(fake, schedule(concurrency=1, count=2))
    first, second = result.outcomes
    assert first.error
    assert second.good
    assert second.at - first.at >= min_wait_s


@pytest.mark.parametrize(("retry_after", "most"), [("", 10), ("3600", 2)])
async def test_closed_loop_limits_its_retries(retry_after: str, most: int) -> None:
    fake = FakeOpenAI(failing=tuple(range(100_000)), retry_after=retry_after)
    planned = schedule(concurrency=2, duration_s=0.45)
    result = await asyncio.wait_for(played(fake, planned), 60)
    assert 2 <= len(result.outcomes) <= most


async def test_request_without_answer_times_out() -> None:
    result = await played(FakeOpenAI(hangs=True), schedule(rate=100, count=3), timeout_s=0.1)
    assert [each.error for each in result.outcomes] == ["no complete response within 0.1 s"] * 3


async def test_stopped_run_returns_partial_results() -> None:
    stop = asyncio.Event()
    async with serving(FakeOpenAI(hangs=True)) as fake:
        endpoint = await probe_endpoint(EndpointOptions(fake.url))
        running = asyncio.create_task(play(endpoint, schedule(rate=5, count=1000), stop=stop))
        await fake.begun.wait()
        stop.set()
        result = await asyncio.wait_for(running, 5)
    assert result.interrupted
    assert 1 <= len(result.outcomes) < 1000
    assert all(each.interrupted and not each.error for each in result.outcomes)


async def test_prompts_beyond_the_context_are_cut_and_counted() -> None:
    fake = FakeOpenAI(max_model_len=200)
    result = await played(fake, schedule("5000x20", rate=100, count=4))
    assert result.cut == 4
    assert not any(each.error for each in result.outcomes)
    assert all(tokens(body) + 20 <= 200 for body in fake.played)
    assert "shortened to fit the model" in " ".join(result.warnings())


@pytest.mark.parametrize("path", ["", CHAT])
async def test_events_are_counted_and_reported_without_usage(path: str) -> None:
    fake = FakeOpenAI(tells_usage=False)
    result = await played(fake, schedule(rate=200, count=3), path)
    assert [(each.error, each.completed) for each in result.outcomes] == [("", 4)] * 3
    assert result.uncounted == 3
    assert "3 responses had no usage: each event counts" in " ".join(result.warnings())
    assert (await played(FakeOpenAI(), schedule(rate=200, count=3), path)).uncounted == 0


async def test_salt_changes_words_and_keeps_lengths_and_workers_are_named() -> None:
    fake = FakeOpenAI(workers=("s0", "l0"))
    async with serving(fake):
        endpoint = await probe_endpoint(EndpointOptions(fake.url, explain=True))
        result = await play(endpoint, schedule("400x2", rate=500, count=20, prefix_hit=0.5))
        heads = [" ".join(body["prompt"].split()[:60]) for body in fake.played]
        assert len(set(heads)) < 15
        assert {each.worker for each in result.outcomes} == {"s0", "l0"}
        fake.bodies.clear()
        for salt in ("a", "b", "a"):
            await play(endpoint, schedule(rate=500, count=3), salt=salt)
    first, second, again = (
        sorted(body["prompt"] for body in fake.played[i : i + 3]) for i in (0, 3, 6)
    )
    assert first == again
    assert not {text[:30] for text in first} & {text[:30] for text in second}
    assert sorted(map(len, map(str.split, first))) == sorted(map(len, map(str.split, second)))
