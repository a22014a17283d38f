"""`vllm bench serve` and `vllm-sched bench` on one endpoint: the same keys, the same figures."""

from __future__ import annotations

import asyncio
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest

from benchmarks import two_tools
from benchmarks.two_tools import THEIRS, Load, ours, theirs
from tests.bench.fake_openai import FakeOpenAI, serving

pytest.importorskip("vllm")

REQUESTS, RATE = 60, 20.0
PROMPT, OUTPUT = 50, 16
TTFT_S, ITL_S = 0.08, 0.02
# A stalled machine disturbs a measurement, so it is repeated.
TRIES = 3


async def run(*command: str) -> None:
    """Run vLLM's tool in a copy of this process, as an import of vLLM takes many seconds."""
    if THEIRS not in command:
        await in_new_process(*command)
        return
    child = os.fork()
    if not child:
        status = 1
        try:
            sys.argv = [sys.executable, *command[3:]]
            exec(THEIRS, {})  # noqa: S102
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    _, ended = await asyncio.to_thread(os.waitpid, child, 0)
    assert ended == 0


in_new_process = two_tools.run


def differences(own: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return the figures on which the tools disagree."""
    rates = ("duration", "request_throughput", "output_throughput", "request_goodput")
    found = [key for key in rates if own[key] != pytest.approx(other[key], rel=0.2)]
    for measure in ("ttft", "tpot", "itl", "e2el"):
        key = f"median_{measure}_ms"
        # A busy machine delays either tool; a wrong unit or clock differs by more.
        if not other[key] / 3 <= own[key] <= other[key] * 3:
            found.append(key)
    return {key: (own[key], other[key]) for key in found}


async def test_vllm_bench_serve_and_vllm_sched_bench_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(two_tools, "run", run)
    async with serving(FakeOpenAI(ttft_s=TTFT_S, itl_s=ITL_S)) as fake:
        load = Load(fake.url, "fake", REQUESTS, RATE, PROMPT, OUTPUT)
        for _ in range(TRIES):
            upstream = await theirs(load, tmp_path)
            own = await ours(load, tmp_path)
            if not (differ := differences(own, upstream)):
                break
    assert differ == {}

    # Generated texts are not kept: they take most of the memory.
    assert set(upstream) - set(own) <= {"generated_texts"}
    for key in ("completed", "failed", "total_output_tokens", "num_prompts", "output_lens"):
        assert own[key] == upstream[key], key
    for key in ("request_rate", "burstiness", "max_concurrency", "backend", "endpoint_type"):
        assert own[key] == upstream[key], key
    # The fake counts words; only vllm-sched measures tokens per word first.
    assert own["total_input_tokens"] == pytest.approx(PROMPT * REQUESTS, rel=0.03)
    for result in (own, upstream):
        assert result["median_ttft_ms"] >= TTFT_S * 1000
        assert result["median_itl_ms"] >= ITL_S * 1000
        assert result["median_tpot_ms"] >= ITL_S * 1000
        assert result["median_e2el_ms"] >= (TTFT_S + (OUTPUT - 1) * ITL_S) * 1000
    for key in ("ttfts", "itls", "latencies", "start_times", "queue_times", "errors"):
        assert len(own[key]) == len(upstream[key]) == REQUESTS
    assert {len(gaps) for gaps in own["itls"]} == {len(gaps) for gaps in upstream["itls"]}
