"""Comparisons of three contenders, from canned rounds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bench.canned import canned_comparison, printed
from vllm_sched.bench.compare.compare import Contest


@pytest.fixture
def contest() -> Contest:
    """Return three contenders whose shorts wait 2 s, 0.5 s and 1 s."""
    two, other = canned_comparison((2.0,), (0.5,)), canned_comparison((2.0,), (1.0,))
    first, second = two.sides
    third = other.candidate
    second.role, second.label, third.role, third.label = "pools", "by length", "halves", "P/D"
    return Contest(two.plan, (first, second, third))


def test_contenders_are_compared_with_the_first(contest: Contest) -> None:
    pairs = [(pair.baseline.label, pair.candidate.label) for pair in contest.pairs]
    assert pairs == [("default", "by length"), ("default", "P/D")]
    assert not contest.failed
    text = printed(contest.table(), 160)
    line = next(line for line in text.splitlines() if "short prompts" in line)
    assert "TTFT p50" in line
    assert "2.00 s" in line
    assert "500 ms (0.25x)" in line
    assert "1.00 s (0.50x)" in line


def test_file_has_every_contender_once(contest: Contest, tmp_path: Path) -> None:
    contest.save(tmp_path / "c.json")
    saved = json.loads((tmp_path / "c.json").read_text())
    assert list(saved["sides"]) == ["baseline", "pools", "halves"]
    assert list(saved["figures"]) == ["pools", "halves"]
    assert saved["sides"]["halves"]["per_round"]


def test_failures_are_counted_per_contender(contest: Contest) -> None:
    contest.contenders[2].rounds[0].records[0].error = "gone"
    assert contest.failed
    text = printed(contest.table(), 160)
    last = next(line for line in text.splitlines() if "failed requests" in line)
    assert last.split()[-3:] == ["0", "0", "1"]
