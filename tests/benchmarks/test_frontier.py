"""The comparison of policies on modelled GPUs."""

from __future__ import annotations

import random
from collections.abc import Iterable
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.frontier import __main__ as frontier
from benchmarks.frontier import report
from benchmarks.frontier.baseline import HoldAndCap, HoldAndCapScheduler
from benchmarks.frontier.cells import DEFAULT, UPSTREAM, VARIANTS, Cell, play_cell
from benchmarks.frontier.loads import LOADS, prefill_s, saturated
from benchmarks.frontier.play import Figures
from tests.engine.schedulers import make_scheduler
from tests.present import present
from vllm_sched.engine import policy_setup
from vllm_sched.policies import registry

SMALL = Figures(1.0, 2.0, 0.1, 1000.0)


@pytest.mark.parametrize("load", LOADS)
def test_load_is_the_same_for_a_seed(load: str) -> None:
    model = Cell("B200 8B", 8192, load).model
    first, again, other = (
        sorted((at, job.id, job.prompt_tokens) for at, job in LOADS[load](model, random.Random(n)))
        for n in (1, 1, 2)
    )
    assert first == again != other
    assert all(tokens <= model.max_model_len for _, _, tokens in first)


def test_figure_that_is_better_in_all_but_noise_dominates() -> None:
    better = Figures(0.8, 2.0, 0.1, 1000.0)
    assert better.dominates(SMALL, 0.05)
    assert not SMALL.dominates(SMALL)
    assert not Figures(0.8, 2.1, 0.1, 1000.0).dominates(SMALL)
    assert Figures(0.5, None, None, 1000.0).dominates(Figures(1.0, None, None, 1000.0))


def test_missed_targets_are_named() -> None:
    found = {UPSTREAM: [SMALL], DEFAULT: [Figures(0.5, 2.2, 0.2, 900.0)]}
    assert report.missed_targets("bursts of 8", found) == [
        "tokens/s x0.900",
        "longs x1.10",
        "ITL x2.00, 200 ms",
        "shorts x0.50",
    ]
    assert report.missed_targets("agents", {UPSTREAM: [SMALL], DEFAULT: [SMALL]}) == []


@pytest.mark.parametrize("variants", [["threshold 512"], [DEFAULT, "threshold 512"]], ids=len)
def test_any_variants_can_be_compared_and_drawn(
    variants: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    def figures_of(_: object, jobs: Iterable[object]) -> Iterable[Figures]:
        return (SMALL for _ in jobs)

    here = nullcontext(SimpleNamespace(map=figures_of))
    monkeypatch.setattr(frontier, "ProcessPoolExecutor", lambda *_: here)
    few = ["--machines", "B200 8B", "--budgets", "2048", "--loads", "agents", "chats only"]
    assert frontier.main([*few, "--variants", *variants, "--plot", str(tmp_path / "out.svg")]) == 0
    verdict = f"{DEFAULT} meets its targets in 2 of 2 cells" in capsys.readouterr().out
    assert verdict is (DEFAULT in variants)
    assert (tmp_path / "out.svg").stat().st_size > 0


def test_baseline_runs_in_a_real_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    before = HoldAndCapScheduler.default_policies
    monkeypatch.setattr(HoldAndCapScheduler, "default_policies", before)  # to restore it
    made = make_scheduler()
    policy_setup.check_configuration(made.vllm_config, HoldAndCapScheduler)
    (policy,) = make_scheduler(scheduler_cls=HoldAndCapScheduler)._policies
    assert policy.name not in registry.POLICIES
    assert isinstance(policy, HoldAndCap)


def test_cell_is_played_by_all_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOADS, "few", lambda *drawn: islice(saturated(*drawn), 14))
    cell = Cell("H100 30B-A3B", 8192, "few")
    found = {name: [play_cell((cell, name, 1))] for name in VARIANTS}
    assert report.table(str(cell), found).row_count == len(VARIANTS)
    model = Cell("H100 8B", 2048, "agents").model
    assert prefill_s(model, 4096) < prefill_s(model, 4096, context=50_000) < 1.0


def test_cell_shows_the_gain_of_the_default() -> None:
    cell = Cell("B200 8B", 8192, "saturated")
    found = {name: [play_cell((cell, name, 1))] for name in (UPSTREAM, DEFAULT)}
    assert report.ratios(found, UPSTREAM) == (1.0, 1.0, 1.0, 1.0)
    short, _, _, rate = report.ratios(found, DEFAULT)
    assert present(short) < 0.7
    assert present(rate) > 0.98
