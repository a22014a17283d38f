"""`vllm-sched calibrate` on a real worker predicts its steps.

`tests/cli/model/test_calibrate.py` has the exact times, of a worker in virtual time.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import pytest

from tests.fleet.test_worker import Workers
from vllm_sched.bench.calibrate import step_times
from vllm_sched.cli.main import main
from vllm_sched.cost.step_time import STEP_KINDS, StepShape, StepTime

BUDGET, CONTEXT = 512, 4096
# Other processes come and go during the measurement, so only the order of magnitude is certain, of
# times, not of single coefficients.
FACTOR = 10.0


def test_saved_calibration_predicts_the_workers_steps(
    workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meet = step_times.StepMeter.read_model

    async def meet_one_of_short_context(meter: step_times.StepMeter) -> None:
        await meet(meter)
        meter.max_model_len = CONTEXT  # limits the duration

    monkeypatch.setattr(step_times.StepMeter, "read_model", meet_one_of_short_context)
    monkeypatch.setattr(step_times, "LONE_REPEATS", 1)
    cost = tmp_path / "cost.json"
    arguments = ["--url", workers["default"].url, "--budget", str(BUDGET), "--max-batch", "2"]
    assert main(["calibrate", *arguments, "--save", str(cost)]) == 0

    saved = json.loads(cost.read_text())
    assert saved["model"] == "tiny"
    assert saved["kv_tokens"] >= CONTEXT
    time = StepTime.from_json(saved["step_time"])
    assert all(low <= high for low, high in saved["intervals"].values())

    off: dict[str, list[float]] = {kind: [] for kind in STEP_KINDS}
    for step in saved["steps"]:
        took, held_out = step.pop("seconds"), step.pop("held_out")
        if held_out:
            shape = StepShape(**step)
            off[shape.kind].append(time.seconds(shape) / took)
    for kind, ratios in off.items():
        assert 1 / FACTOR < median(ratios) < FACTOR, kind

    # Times of whole prompts are not fitted: they are sums of steps.
    longs = [step for step in saved["whole_prompts"] if step["tokens"] > BUDGET]
    assert len(longs) == 2
    for step in longs:
        assert 1 / FACTOR < step["expected_s"] / step["seconds"] < FACTOR, step["tokens"]
