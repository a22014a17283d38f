"""The comparison of rounds measured by two tools."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import two_tools
from benchmarks.two_tools import (
    EXACTLY,
    LATENCIES,
    RATES,
    Figure,
    Load,
    read_rounds,
)
from tests.bench.fake_openai import FakeOpenAI
from tests.cli.bench.endpoint import running

LOAD = Load("", "tiny", 100, 10.0, 200, 32)


def figures_of(value: float) -> dict[str, float]:
    return dict.fromkeys((*EXACTLY, *RATES, *LATENCIES), value)


def test_figures_are_apart_beyond_a_tools_own_spread() -> None:
    assert not Figure("median_ttft_ms", [20.0, 24.0, 21.0], [22.0, 23.0, 24.0]).apart
    assert Figure("median_ttft_ms", [20.0, 20.5, 21.0], [22.0, 23.0, 22.5]).apart
    # One round has no spread, so any difference is apart.
    assert Figure("median_ttft_ms", [20.0], [20.1]).apart
    assert not Figure("completed", [100, 100], [100, 100]).apart
    assert Figure("completed", [100, 99], [100, 100]).apart


def test_rounds_are_added_to_rounds_of_the_same_load(tmp_path: Path) -> None:
    path = tmp_path / "tools.json"
    assert read_rounds(path, LOAD) == {"ours": [], "theirs": []}
    kept = {"ours": [figures_of(1.0)], "theirs": [figures_of(2.0)]}
    path.write_text(json.dumps({"load": asdict(LOAD), "rounds": kept}))
    assert read_rounds(path, LOAD) == kept
    with pytest.raises(SystemExit, match="of another load"):
        read_rounds(path, Load("", "tiny", 100, 20.0, 200, 32))


def test_tools_measure_in_turn_and_every_round_is_saved(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @contextmanager
    def worker(**_: object) -> Iterator[SimpleNamespace]:
        with running(FakeOpenAI(itl_s=0.001)) as fake:
            yield SimpleNamespace(url=fake.url)

    path = tmp_path / "tools.json"
    words = ["--rounds", "1", "--num-requests", "4", "--prompt", "20", "--output", "3"]
    monkeypatch.setattr("vllm_sched.workers.launch.worker", worker)
    monkeypatch.setattr(two_tools, "MODEL", "fake")
    monkeypatch.setitem(two_tools.TOOLS, "theirs", two_tools.ours)  # vLLM's tool starts slowly
    monkeypatch.setattr(
        sys, "argv", ["two_tools", *words, "--concurrency", "2", "--add", str(path)]
    )
    two_tools.main()  # a tool may by chance differ from itself
    assert "1 rounds; told apart: " in capsys.readouterr().out
    kept = json.loads(path.read_text())["rounds"]
    for tool in two_tools.TOOLS:
        (saved,) = kept[tool]
        assert (saved["completed"], saved["total_output_tokens"]) == (4, 12)
