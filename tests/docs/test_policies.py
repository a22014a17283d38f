"""Every policy is told of in the docs, with all of its settings and their defaults."""

from __future__ import annotations

import re

import pytest
from pydantic.fields import FieldInfo

from tests.docs.test_snippets import ROOT
from vllm_sched.policies import registry

PAGE = (ROOT / "docs" / "policies.md").read_text()
OWN = {"long_prompt": "long-prompt.md", "deferred_prefill": "deferred-prefill.md"}
ROW = re.compile(r"^\| (`\w+` \| .*?) \| (.*) \|$", re.MULTILINE)


def default(field: FieldInfo) -> str:
    """Write a default as the pages do."""
    said = field.default
    if isinstance(said, bool) or said is None:
        return str(said).lower()
    return f"`{said}`" if isinstance(said, str) else f"{said:g}"


@pytest.mark.parametrize("name", registry.POLICIES)
def test_all_of_its_settings_are_told(name: str) -> None:
    fields = registry.POLICIES[name].settings_type.model_fields
    wanted = {f"`{key}` | {default(field)}": field.description for key, field in fields.items()}
    [part] = re.findall(rf"^## `{name}`\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    if name not in OWN:
        assert dict(ROW.findall(part)) == wanted
        return
    assert f"]({OWN[name]})" in part
    told = dict(ROW.findall((ROOT / "docs" / OWN[name]).read_text()))
    assert [*told] == [*wanted]  # which says more of each there


def test_the_order_and_what_contradicts_are_told() -> None:
    text = " ".join(PAGE.split())
    assert ", ".join(f"`{name}`" for name in registry.POLICIES) in text
    told = re.search(r"contradict each other and are refused: (.*?)\.", text)
    assert told
    pairs = set()
    for said in told[1].split(", and "):
        one, *others = re.findall(r"`(\w+)`", said)
        pairs |= {(one, other) for other in others}
    assert pairs == set(registry.CONFLICTS)
