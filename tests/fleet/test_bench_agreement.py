"""`vllm bench serve` and `vllm-sched bench` on one real worker: the same figures."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest

from benchmarks.two_tools import Load, ours, theirs
from vllm_sched.workers.launch import Worker

REQUESTS, RATE, PROMPT, OUTPUT = 30, 10.0, 200, 16
# A machine that is busy with other things makes either wait: so ours measures before and after, and
# theirs may be so much off what came between. Another unit would be much further off.
NEAR = 2.0
# Where it is held up for seconds in one of the three they are another load's: then once more.
TRIES = 3


def apart(before: dict[str, Any], other: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Return what took so long that the tools do not agree."""
    found = {}
    # The times of arrival are other draws of the same rate.
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
        # Of another seed each: what was sent once is in the prefix cache.
        before = await ours(load, tmp_path, seed=1 + 2 * number)
        other = await theirs(load, tmp_path, seed=number)
        after = await ours(load, tmp_path, seed=2 + 2 * number)
        if not (differ := apart(before, other, after)):
            break
    assert differ == {}

    for own in (before, after):
        for key in ("completed", "failed", "total_output_tokens", "output_lens", "request_rate"):
            assert own[key] == other[key], key
        # Other texts, but of the same length by the worker's count and by a tokenizer's.
        assert own["total_input_tokens"] == pytest.approx(other["total_input_tokens"], rel=0.05)
        assert sum(own["input_lens"]) == own["total_input_tokens"]
    for each in (before, other, after):
        # The same is meant by the names, whatever it came to.
        latencies = each["mean_ttft_ms"] + (OUTPUT - 1) * each["mean_tpot_ms"]
        assert each["mean_e2el_ms"] == pytest.approx(latencies, rel=0.02)
        gaps = statistics.fmean(gap for gaps in each["itls"] for gap in gaps)
        assert each["mean_itl_ms"] == pytest.approx(gaps * 1000, rel=0.01)
