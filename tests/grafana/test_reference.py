"""The metrics reference equals the declarations and describes each metric."""

from __future__ import annotations

from pathlib import Path

from grafana import declared, reference
from vllm_sched.cost.step_time import COEFFICIENTS


def test_reference_equals_the_declarations() -> None:
    assert reference.differing() == [], "run `python -m grafana.build`"


def test_missing_or_changed_reference_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "metrics.md"
    assert len(reference.differing(file)) == 1
    file.write_text(reference.written())
    assert reference.differing(file) == []
    file.write_text("otherwise")
    assert len(reference.differing(file)) == 1


def test_each_metric_has_a_row_and_a_description() -> None:
    families = declared.router_families() + declared.engine_families()
    assert len({family.name for family in families}) == len(families) > 100
    assert [family.name for family in families if len(family.help) < 10 or "|" in family.help] == []
    text = reference.FILE.read_text()
    assert all(f"\n| `{reference.name(family)}` |" in text for family in families)
    assert all(f"`vllm_sched_fit_{name}`" in text for name in COEFFICIENTS)
