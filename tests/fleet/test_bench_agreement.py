"""`vllm bench serve` and `vllm-sched bench` agree on one real worker."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest

from benchmarks.two_tools import Load, ours, theirs
from vllm_sched.workers.launch import Worker

REQUESTS, RATE, PROMPT, OUTPUT = 30, 10.0, 200, 16
# A busy machine delays either tool. So `vllm-sched bench` measures before and after, and vLLM's
# figures may differ by this factor. A wrong unit differs by more.
NEAR = 2.0
# A stall during one of the three runs disturbs it, so they are repeated.
TRIES = 3


def differences(
    before: dict[str, Any], other: dict[str, Any], after: dict[str, Any]
) -> dict[str, Any]:
    """Return the figures on which the tools disagree."""
    found = {}
    # Arrival times are different draws of the same rate.
    for key in ("duration", "request_throughput", "output_throughput", "request_goodput"):
        if any(own[key] != pytest.approx(other[key], rel=0.5) for own in (before, after)):
            found[key] = before[key], other[key], after[key]
    for measure in ("ttft", "tpot", "itl", "e2el"):
        key = f"median_{measure}_ms"
        around = (before[key], after[key])
        if not min(around) / NEAR <= other[key] <= max(around) * NEAR:
            found[key] = before[key], other[key], after[key]
    return found


async def test_both_tools_agree_on_a_real_worker(
    workers: dict[str, Worker], tmp_path: Path
) -> None:
    load = Load(workers["default"].url, "tiny", REQUESTS, RATE, PROMPT, OUTPUT)
    for number in range(TRIES):
        # Different seeds, because sent prompts are in the prefix cache.
        before = await ours(load, tmp_path, seed=1 + 2 * number)
        upstream = await theirs(load, tmp_path, seed=number)
        after = await ours(load, tmp_path, seed=2 + 2 * number)
        if not (differ := differences(before, upstream, after)):
            break
    assert differ == {}

    for own in (before, after):
        for key in ("completed", "failed", "total_output_tokens", "output_lens", "request_rate"):
            assert own[key] == upstream[key], key
        # Different texts of the same length, by the worker's count and by a tokenizer.
        assert own["total_input_tokens"] == pytest.approx(upstream["total_input_tokens"], rel=0.05)
        assert sum(own["input_lens"]) == own["total_input_tokens"]
    for result in (before, upstream, after):
        # The figures have the same definitions.
        latencies = result["mean_ttft_ms"] + (OUTPUT - 1) * result["mean_tpot_ms"]
        assert result["mean_e2el_ms"] == pytest.approx(latencies, rel=0.02)
        gaps = statistics.fmean(gap for gaps in result["itls"] for gap in gaps)
        assert result["mean_itl_ms"] == pytest.approx(gaps * 1000, rel=0.01)
