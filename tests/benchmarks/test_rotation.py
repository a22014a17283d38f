"""`python -m benchmarks.rotation`: the loads, and the main effects of the policy."""

from __future__ import annotations

import math

import pytest

from benchmarks import rotation
from benchmarks.frontier.cells import UPSTREAM
from benchmarks.rotation import HEADINGS, LOADS, VARIANTS, Load, main, ratios

EQUAL = next(iter(LOADS.values()))


def test_equal_prompts_end_together_and_later() -> None:
    found = ratios(EQUAL, seeds=1)
    assert found[UPSTREAM][:3] == (1.0, 1.0, 1.0)
    spread, mean, longest, chats = found["rotation"]
    assert spread < 0.5
    assert mean > 1.2
    assert longest < 1.05
    assert math.isnan(chats)


def test_every_load_has_a_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rotation, "DOCUMENTS", 4)
    monkeypatch.setattr(rotation, "PROMPTS", 4)
    monkeypatch.setattr("sys.argv", ["rotation", "--seeds", "1"])
    main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(LOADS) * (1 + len(VARIANTS))
    assert all(line.count(" | ") == len(HEADINGS) for line in lines)
    assert [line for line in lines if line.startswith("vLLM")][2] == "vLLM" + 4 * " | 1.00x"


def test_load_is_the_same_for_a_seed() -> None:
    load = Load(rotation.mixed, 2048)
    found = [rotation.play(load, {}, seed) for seed in (1, 1, 2)]
    assert found[0][:3] == found[1][:3] != found[2][:3]
