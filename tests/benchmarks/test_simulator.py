"""The comparison of a real and a simulated fleet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from benchmarks.simulator import BUDGET, COSTS, Pair, cases, order, print_comparison
from proxy.config import parse
from vllm_sched.cost.step_time import StepTime
from vllm_sched.sim.fleet.models import worker_models


def figures(scale: float) -> dict[str, Any]:
    keys = ("median_ttft_ms", "p99_ttft_ms", "p99_itl_ms", "output_throughput")
    return dict.fromkeys(keys, 100.0 * scale)


def played(shorts: float, longs: float = 1.0) -> dict[str, Any]:
    classes = {
        "short": {**figures(shorts), "completed": 8},
        "long": {**figures(longs), "completed": 2},
    }
    return {**figures(1.0), "classes": classes, "client_busy": 0.1}


def test_large_differences_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    pairs = [
        Pair("default", played(3.0), played(3.3)),
        Pair("long_prompt", played(1.0), played(1.0, 1.3)),
    ]
    # The four figures of long prompts, by 30 %.
    assert print_comparison(pairs, Console(width=120)) == 4
    out = capsys.readouterr().out
    assert "+30%" in out
    assert "['long_prompt', 'default']: the same" in out
    pairs = [Pair("a", played(1.0), played(2.0)), Pair("b", played(2.0), played(1.0))]
    assert (order(pairs, "real"), order(pairs, "simulated")) == (["a", "b"], ["b", "a"])
    print_comparison(pairs, Console(width=120))
    assert "NOT the same" in capsys.readouterr().out


def test_fleets_can_be_simulated(tmp_path: Path) -> None:
    for name in COSTS.values():
        (tmp_path / name).write_text('{"step_time": {}}')
    for name, blocks in cases([0, 1]).items():
        text = yaml.safe_dump({"model": "tiny", **blocks})
        for model in worker_models(parse(text, name), tmp_path / "f.yaml").values():
            assert model.time == StepTime()
            assert (model.max_num_batched_tokens, model.kv_tokens) == (BUDGET, 65_536)
            assert not model.async_scheduling
