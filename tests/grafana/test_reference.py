"""The metrics reference describes each metric."""

from __future__ import annotations

from grafana import declared, reference
from vllm_sched.cost.step_time import COEFFICIENTS


def test_each_metric_has_a_row_and_a_description() -> None:
    families = declared.router_families() + declared.engine_families()
    assert len({family.name for family in families}) == len(families) > 100
    assert [family.name for family in families if len(family.help) < 10 or "|" in family.help] == []
    text = reference.written()
    assert all(f"\n| `{family.sample_name}` |" in text for family in families)
    assert all(f"`vllm_sched_fit_{name}`" in text for name in COEFFICIENTS)
