"""The page of metrics is what is declared, and says of each what it is."""

from __future__ import annotations

from pathlib import Path

from grafana import declared, reference
from vllm_sched.cost.step_time import COEFFICIENTS


def test_it_is_written_as_they_are_declared() -> None:
    assert reference.differing() == [], "run `python -m grafana.build`"


def test_one_that_is_not_so_is_told(tmp_path: Path) -> None:
    file = tmp_path / "metrics.md"
    assert len(reference.differing(file)) == 1
    file.write_text(reference.written())
    assert reference.differing(file) == []
    file.write_text("otherwise")
    assert len(reference.differing(file)) == 1


def test_each_has_a_line_of_its_own_and_words() -> None:
    families = declared.router_families() + declared.engine_families()
    assert len({each.name for each in families}) == len(families) > 100
    assert [each.name for each in families if len(each.help) < 10 or "|" in each.help] == []
    text = reference.FILE.read_text()
    assert all(f"\n| `{reference.name(each)}` |" in text for each in families)
    assert all(f"`vllm_sched_fit_{name}`" in text for name in COEFFICIENTS)
