"""Every endpoint states every fact, and no other module names an endpoint."""

from __future__ import annotations

import ast
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

import proxy
from proxy.core.model import route_table
from proxy.core.model.route_table import (
    BY_NAME,
    OWN,
    ROUTES,
    STORED,
    ErrorFormat,
    PromptFields,
    Route,
)
from proxy.core.request.token_estimate import measure
from proxy.http.error_formats import format_of

# The modules that name an endpoint, and the fact that no column of the table holds.
NAMING_MODULES = {
    "core/request/split_check.py": "members of one API's body that forbid a split",
    "admin/schemas.py": "an explanation is of a chat",
    "health/warmup.py": "a warm-up is a completion",
}


@pytest.mark.plain("a compiled class has no fields to look at")
def test_every_fact_but_response_id_is_required() -> None:
    optional = {field.name for field in fields(Route) if field.default is not MISSING}
    assert optional == {"response_id"}  # filled in for each request


def test_rows_of_one_name_state_the_same_facts() -> None:
    rows = (*ROUTES.values(), *STORED.values(), *OWN.values())
    assert all(BY_NAME[route.name] == route for route in rows)


@pytest.mark.parametrize("path", ROUTES)
def test_facts_of_a_route_agree(path: str) -> None:
    route = ROUTES[path]
    assert format_of(path) is route.error_format
    assert bool(route.output_limits) == route.may_be_split
    assert route.generates or not (route.ends_with_done or route.begins_with_token)
    text = route.shape in (PromptFields.CHAT, PromptFields.PROMPT)
    assert not route.countable or (text and route.error_format is ErrorFormat.OPENAI)
    assert not route.usage_by_option or route.ends_with_done
    assert not route.generates or route.shape not in (PromptFields.INPUT, PromptFields.PAIRS)
    assert not (route.truncates and route.truncates_if_asked)


@pytest.mark.parametrize(
    "path",
    [path for path, route in ROUTES.items() if route.shape is not PromptFields.OPAQUE],
)
def test_member_that_an_error_names_has_the_prompt(path: str) -> None:
    route = ROUTES[path]
    word: dict[str, object] = {"role": "user", "content": "word" * 100}
    prompts = {
        PromptFields.CHAT: [word],
        PromptFields.CHATS: [[word]],
        PromptFields.TOKENS: [7] * 400,
    }
    extent = measure(route.shape, {route.prompt_param: prompts.get(route.shape, "word" * 100)})
    assert max(extent.text, extent.tokens) >= 400


def test_stored_responses_have_the_path_of_the_route_that_stores_them() -> None:
    stores = {route.name for route in ROUTES.values() if route.stores}
    assert stores == {name.partition("/")[0] for name in STORED}


@pytest.mark.plain("reads sources")
def test_no_other_module_names_an_endpoint() -> None:
    root = Path(proxy.__file__).parent
    names = {*ROUTES, *(name for name in BY_NAME if "/" in name)}
    found = set()
    for path in root.rglob("*.py"):
        text = path.read_text()
        if not any(name in text for name in names):
            continue  # parsing takes longer
        strings = {
            node.value
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        if strings & names:
            found.add(path.relative_to(root).as_posix())
    own = Path(route_table.__file__).relative_to(root).as_posix()
    assert found - {own} == NAMING_MODULES.keys()
