from __future__ import annotations

import importlib.util
import io
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

from tests.bench.canned import StillWorker, canned_comparison, canned_round, printed
from tests.present import present
from vllm_sched.bench.compare.compare import ComparisonPlan, Contender, ProgressReporter
from vllm_sched.bench.compare.workloads import long_blocks_short
from vllm_sched.workers.launch import Side


@pytest.fixture(scope="module")
def knob() -> ModuleType:
    path = Path(__file__).parents[3] / "benchmarks" / "upstream_knob.py"
    spec = present(importlib.util.spec_from_file_location("upstream_knob", path))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    present(spec.loader).exec_module(module)
    return module


def test_settings_are_the_flag_off_fixed_and_adaptive(knob: ModuleType) -> None:
    flag = "--long-prefill-token-threshold"
    assert {name: side.extra for name, side in knob.settings([64, 128]).items()} == {
        "off": (),
        "64": (f"{flag}=64",),
        "128": (f"{flag}=128",),
        "64 adaptive": (f"{flag}=64", f"{flag}-adaptive"),
        "128 adaptive": (f"{flag}=128", f"{flag}-adaptive"),
    }


async def test_survey_compares_every_setting_under_every_load(
    knob: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    up: list[str] = []
    met: list[tuple[str, int]] = []

    @asynccontextmanager
    async def running(workers: list[Any], _: ProgressReporter) -> AsyncIterator[None]:
        up.extend(worker.name for worker in workers)
        yield
        for worker in workers:
            up.remove(worker.name)

    async def measure(
        pair: tuple[Contender, Contender], plan: ComparisonPlan, _: ProgressReporter
    ) -> None:
        assert up == [each.worker.name for each in pair]
        assert not any(each.rounds for each in pair)
        met.append((pair[1].role, plan.rounds))
        for each in pair:
            each.rounds.append(canned_round(1, 1.0))

    def contender(role: str, side: Side, _: ComparisonPlan) -> Contender:
        still: Any = StillWorker(name=role)
        return Contender(role, side.label, still)

    for name, fake in (("running", running), ("measure", measure), ("contender", contender)):
        monkeypatch.setattr(knob, name, fake)
    plans = [ComparisonPlan("m", long_blocks_short(), rounds) for rounds in (1, 2)]
    reporter = ProgressReporter(Console(file=io.StringIO()))
    duels = await knob.survey(Side.parse("long_prompt"), knob.settings([64]), plans, reporter)
    names = ["off", "64", "64 adaptive"]
    assert met == [(f"threshold {name}", rounds) for name in names for rounds in (1, 2)]
    assert [[duel.setting for duel in found] for found in duels] == [names, names]
    assert not up


def test_contender_becomes_a_table_line(knob: ModuleType) -> None:
    line = knob.summarise(canned_comparison((2.0,)).contenders[0])
    assert line.failed == 0
    assert (line.short_p50, line.long_mean, line.long_max) == pytest.approx((2.0, 3.9, 3.9))
    text = printed(knob.table("2 long prompts", "ours", [knob.Duel("64", line, line)]), 100)
    assert text.count("2.00 s") == 4  # p50 and p99 of both sides
    silent = canned_comparison().contenders[0]
    for record in silent.rounds[0].records:
        record.error = "gone"
    assert knob.summarise(silent).short_p99 == knob.summarise(silent).long_max == float("inf")


def test_verdict_names_wins_and_losses(knob: ModuleType) -> None:
    ours: Any = knob.Result(0.1, 0.2, 3.0, 5.0, 4000, 0)
    duels = [
        knob.Duel("slower", replace(ours, short_p99=0.3), ours),
        knob.Duel("trade", replace(ours, short_p99=0.1, long_mean=6.0), ours),
        knob.Duel("winner", replace(ours, tokens_per_s=4100), ours),
    ]
    words = knob.verdict("ours", duels)
    assert "ours beats 1 (slower)" in words
    assert "loses to 1 (winner)" in words
    assert "trade: TTFT p99 100 ms against ours 200 ms" in words
    assert "loses to none" in knob.verdict("ours", duels[:2])
