"""What docs/policies.md tells of policies is so: their settings, defaults, order, conflicts."""

from __future__ import annotations

import re

import pytest
from pydantic.fields import FieldInfo

from tests.docs.test_snippets import ROOT
from vllm_sched.policies import registry

PAGE = (ROOT / "docs" / "policies.md").read_text()
PARTS = dict(re.findall(r"^## `(\w+)`\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE))
OWN = {"long_prompt": "long-prompt.md", "deferred_prefill": "deferred-prefill.md"}
ROW = re.compile(r"^\| (`\w+` \| .*?) \| (.*) \|$", re.MULTILINE)


def default(field: FieldInfo) -> str:
    """Write a default as the pages do."""
    said = field.default
    if isinstance(said, bool) or said is None:
        return str(said).lower()
    return f"`{said}`" if isinstance(said, str) else f"{said:g}"


@pytest.mark.parametrize("name", PARTS)
def test_all_settings_of_a_policy_are_told(name: str) -> None:
    fields = registry.find(name).settings_type.model_fields
    wanted = {f"`{key}` | {default(field)}": field.description for key, field in fields.items()}
    if name not in OWN:
        assert dict(ROW.findall(PARTS[name])) == wanted
        return
    assert f"]({OWN[name]})" in PARTS[name]
    told = dict(ROW.findall((ROOT / "docs" / OWN[name]).read_text()))
    assert [*told] == [*wanted]  # of each it says more there


def test_the_order_and_what_contradicts_are_told() -> None:
    text = " ".join(PAGE.split())
    order = [name for name in registry.POLICIES if name in PARTS]  # and not one of somebody's own
    assert len(order) == len(PARTS) >= 7
    assert ", ".join(f"`{name}`" for name in order) in text
    told = re.search(r"contradict each other and are refused: (.*?)\.", text)
    assert told
    pairs = set()
    for said in told[1].split(", and "):
        one, *others = re.findall(r"`(\w+)`", said)
        pairs |= {(one, other) for other in others}
    assert pairs == {pair for pair in registry.CONFLICTS if {*pair} <= {*PARTS}}
