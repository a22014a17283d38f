"""docs/policies.md matches the policies' settings, defaults, order and conflicts."""

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
    value = field.default
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return f"`{value}`" if isinstance(value, str) else f"{value:g}"


@pytest.mark.parametrize("name", PARTS)
def test_all_settings_of_a_policy_are_documented(name: str) -> None:
    settings = registry.find(name).settings_type
    fields = {k: v for k, v in settings.model_fields.items() if k not in settings.former}
    wanted = {f"`{key}` | {default(field)}": field.description for key, field in fields.items()}
    if name not in OWN:
        assert dict(ROW.findall(PARTS[name])) == wanted
        return
    assert f"]({OWN[name]})" in PARTS[name]
    documented = dict(ROW.findall((ROOT / "docs" / OWN[name]).read_text()))
    assert [*documented] == [*wanted]  # that page describes each in more detail


def test_order_and_conflicts_are_documented() -> None:
    text = " ".join(PAGE.split())
    assert sorted(PARTS) == sorted(registry.POLICIES), "give it a heading in docs/policies.md"
    assert ", ".join(f"`{name}`" for name in registry.POLICIES) in text
    sentence = re.search(r"contradict each other and are refused: (.*?)\.", text)
    assert sentence
    pairs = set()
    for group in sentence[1].split(", and "):
        one, *others = re.findall(r"`(\w+)`", group)
        pairs |= {(one, other) for other in others}
    assert pairs == registry.CONFLICTS.keys()
