"""A real worker's /metrics and trace."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections import Counter
from pathlib import Path

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families as read_text

from proxy.health.worker_metrics import parse
from tests.engine.test_trace import ENGINE, REQUESTS, check, slices
from tests.fleet.test_worker import DEADLINE_S, client_of, complete, page, prompt, settled
from vllm_sched.engine.metrics import COUNTERS, FACTS, GAUGES
from vllm_sched.workers.launch import Worker

LONGS, SHORTS = (10_000, 9000, 8000), (60, 50, 40, 30)
OUTPUT = 40
TRACED = ((9500, 300), (90, 4))  # tokens of prompt and output; the first runs longer


def families(worker: Worker) -> dict[str, Metric]:
    return {family.name: family for family in read_text(page(worker))}


def number(found: dict[str, Metric], sample: str, **labels: str) -> float:
    """Return the sum of the samples with this name and these labels."""
    return sum(
        s.value
        for family in found.values()
        for s in family.samples
        if s.name == f"vllm_sched_{sample}" and labels.items() <= s.labels.items()
    )


async def test_metrics_during_and_after_work(third: Worker) -> None:
    before = await asyncio.to_thread(families, third)

    def more(found: dict[str, Metric], sample: str, **labels: str) -> float:
        return number(found, sample, **labels) - number(before, sample, **labels)

    async with client_of(third) as client, asyncio.TaskGroup() as group:
        for seed, tokens in enumerate((*SHORTS, *LONGS)):
            group.create_task(complete(client, prompt(7000 + seed, tokens), OUTPUT))
        async with asyncio.timeout(DEADLINE_S):
            while True:
                found = await asyncio.to_thread(families, third)
                if number(found, "requests_held", policy="long_prompt"):
                    break
                await asyncio.sleep(0.02)
        assert number(found, "requests_held", reason="long_limit") in (1, 2)
        assert number(found, "prefills_running", **{"class": "long"}) == 1
        assert number(found, "requests_running", policy="long_prompt", lane="long") >= 1
        backlog = number(found, "prefill_backlog_tokens", **{"class": "long"})
        assert min(LONGS) <= backlog < sum(LONGS)
        scraped = parse(
            (await asyncio.to_thread(page, third)).encode(), at=0.0
        )  # as the router reads it
        assert scraped is not None
        assert (
            0
            < scraped.extra["backlog_long"]
            <= scraped.extra["backlog"]
            <= sum(LONGS) + sum(SHORTS)
        )
        assert scraped.extra["started"] == number(found, "start_time_seconds")
    await settled(third, running=0, waiting=0)
    found = await asyncio.to_thread(families, third)
    for gauge in ("requests_held", "requests_waiting", "requests_running", "prefills_running"):
        assert number(found, gauge) == 0, gauge
    assert number(found, "prefill_backlog_tokens") == 0
    assert more(found, "step_tokens_total", kind="prefill") == sum(LONGS) + sum(SHORTS)
    assert more(found, "step_tokens_total", kind="decode") == 7 * (OUTPUT - 1)
    assert more(found, "requests_admitted_total", lane="long") == 3
    assert more(found, "requests_admitted_total", lane="short") == 4
    assert more(found, "hold_seconds_count", policy="long_prompt") >= 2
    assert number(found, "steps_total") == number(found, "step_seconds_count") + number(
        found, "steps_total", kind="empty"
    )
    assert number(found, "steps_predicted_total") > 10
    assert number(found, "step_time_coefficient_seconds", coefficient="decode_fixed") > 0


def test_metrics_have_their_names_types_and_labels(third: Worker) -> None:
    found = families(third)
    kinds = {**dict.fromkeys([*GAUGES, *FACTS], "gauge"), **dict.fromkeys(COUNTERS, "counter")}
    for name, kind in kinds.items():
        family = found[f"vllm_sched_{name}"]
        assert family.type == kind
        _, labels = (GAUGES | FACTS | COUNTERS)[name]
        for sample in family.samples:
            assert set(sample.labels) == {"model_name", "engine", *labels}, name
            assert (sample.labels["model_name"], sample.labels["engine"]) == ("tiny", "0")
    (info,) = found["vllm_sched_info"].samples
    assert (info.labels["policies"], info.value) == ("long_prompt", 1)
    assert "vllm:num_requests_running" in found  # vLLM's own metrics are unchanged


def trace_events(file: Path) -> list[dict[str, object]]:
    """Return the events of a trace file."""
    return list(json.loads(file.read_text())["traceEvents"])


def request_trace(file: Path, sender: Worker) -> list[dict[str, object]]:
    """Make the worker write its trace; return the events."""
    before = file.stat().st_mtime_ns if file.exists() else 0
    assert sender.pid is not None
    os.kill(sender.pid, signal.SIGUSR1)
    give_up = time.monotonic() + DEADLINE_S
    while not file.exists() or file.stat().st_mtime_ns == before:
        assert time.monotonic() < give_up
        time.sleep(0.02)
    return trace_events(file)


async def test_trace_is_written_on_a_signal_and_at_the_end(third: Worker, trace_file: Path) -> None:
    async with client_of(third) as client:
        (long_tokens, long_output), (tokens, output) = TRACED
        long = asyncio.create_task(complete(client, prompt(8000, long_tokens), long_output))
        await settled(third, running=1, waiting=0)
        await complete(client, prompt(8001, tokens), output)
        assert not long.done()
        events = await asyncio.to_thread(request_trace, trace_file, third)
        await long
    check(events)
    assert any(name.endswith("(9,500 tokens)") for name in slices(events, REQUESTS))

    await asyncio.to_thread(third.stop)
    events = trace_events(trace_file)
    check(events)
    names = {e["name"] for e in events if e["ph"] == "X" and e["pid"] == ENGINE}
    assert names >= {"mixed", "decode"}
    tracks = slices(events, REQUESTS)
    for (tokens, output), chunks in zip(TRACED, (19, 1), strict=True):
        (track,) = [t for name, t in tracks.items() if name.endswith(f"({tokens:,} tokens)")]
        did = Counter(e["name"] for e in track)
        prefill = [e["args"]["tokens"] for e in track if e["name"] == "prefill"]
        assert len(prefill) >= chunks
        assert sum(prefill) == tokens
        assert did["decode"] == output - 1
