"""Requests that go on from their text alone."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.core.model.route_table import PromptFields
from proxy.core.request.continuable import why_not_continued
from proxy.core.request.continued_text import TextSoFar, why_not_by_text, with_text

CHAT, PROMPT = PromptFields.CHAT, PromptFields.PROMPT
MESSAGES = [{"role": "user", "content": "q"}]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({}, ""),
        ({"add_generation_prompt": True, "tools": [None, {"function": None}]}, ""),
        ({"stop": ["x"], "min_tokens": 3, "tools": [{"function": {"name": "f"}}]}, ""),
        ({"tools": None, "tool_choice": "auto", "response_format": None}, ""),
        ({"response_format": {"type": "text"}}, ""),
        ({"stream_options": {"include_usage": True}}, ""),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": {"role": "user"}}, "messages"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        ({"include_reasoning": False}, "include_reasoning"),
        ({"include_stop_str_in_output": True}, "include_stop_str_in_output"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tools": [{"function": {"name": "f", "strict": True}}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"thinking_token_budget": 9}, "thinking_token_budget"),
        ({"truncate_prompt_tokens": 9}, "truncate_prompt_tokens"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"stream_options": {"continuous_usage_stats": True}}, "stream_options"),
    ],
)
def test_the_field_that_prevents_it_is_named(fields: dict[str, Any], why: str) -> None:
    body = json.dumps({"model": "m", "messages": MESSAGES, **fields}).encode()
    assert why_not_continued(body) == ""
    assert why_not_by_text(body, CHAT) == why


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"prompt": "", "stream_options": {"include_usage": True}}, ""),
        # Workers ignore the fields of chats.
        ({"prompt": "x", "tools": 5, "tool_choice": "required", "stream_options": []}, ""),
        ({}, "prompt"),
        ({"prompt": [1, 2]}, "prompt"),
        ({"prompt": ["text"]}, "prompt"),
    ],
)
def test_the_field_of_a_completion_is_named(fields: dict[str, Any], why: str) -> None:
    assert why_not_by_text(json.dumps({"model": "m", **fields}).encode(), PROMPT) == why


def continued(fields: dict[str, Any], shape: PromptFields, text: str, tokens: int) -> TextSoFar:
    found = with_text(json.dumps(fields).encode(), shape, text, tokens)
    assert found is not None
    return found


def test_a_chat_gets_the_text_as_its_last_message() -> None:
    fields = {"messages": MESSAGES, "max_tokens": 9, "add_generation_prompt": True}
    found = continued(fields, CHAT, 'a "b"\nö', 4)
    message = {"role": "assistant", "content": 'a "b"\nö'}
    assert json.loads(found.body) == {
        "messages": [*MESSAGES, message], "max_tokens": 5, "add_generation_prompt": False,
        "continue_final_message": True,
    }  # fmt: skip
    assert (found.space, found.tokens) == ("", 4)


def test_the_space_at_the_end_of_a_chat_is_generated_again() -> None:
    found = continued({"messages": MESSAGES}, CHAT, "a \n\n", 4)
    assert json.loads(found.body)["messages"][-1]["content"] == "a"
    assert (found.space, found.tokens) == (" \n\n", 3)
    body = json.dumps({"messages": MESSAGES}).encode()
    only = with_text(body, CHAT, "\n", 1)
    assert only is not None
    assert (only.body, only.space, only.tokens) == (body, "\n", 0)


@pytest.mark.parametrize("tokens", [9, 10])
def test_no_token_is_left(tokens: int) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        body = json.dumps({"messages": MESSAGES, name: 9}).encode()
        assert with_text(body, CHAT, "x", tokens) is None


@pytest.mark.parametrize(
    ("fields", "left"),
    [
        ({}, {}),
        ({"max_tokens": None, "max_completion_tokens": 8}, {"max_completion_tokens": 3}),
        ({"max_tokens": 4, "max_completion_tokens": 8}, {"max_completion_tokens": 3}),
        ({"max_tokens": 8, "max_completion_tokens": None}, {"max_tokens": 3}),
        ({"max_tokens": "8"}, {"max_tokens": 3}),
        ({"min_tokens": 3}, {"min_tokens": 0}),
        ({"min_tokens": 9}, {"min_tokens": 4}),
    ],
)
def test_limits_of_a_chat_count_what_is_left(fields: dict[str, Any], left: dict[str, int]) -> None:
    body = json.loads(continued({"messages": MESSAGES, **fields}, CHAT, "x", 5).body)
    assert {name: body.get(name) for name in {**fields, **left}} == {**fields, **left}


@pytest.mark.parametrize(
    ("fields", "left"),
    [({}, 11), ({"max_tokens": None}, 11), ({"max_completion_tokens": "abc"}, 11),
     ({"max_tokens": 9, "max_completion_tokens": 2}, 4)],
)  # fmt: skip
def test_a_completion_has_a_default_limit(fields: dict[str, Any], left: int) -> None:
    body = json.loads(continued({"prompt": "p", **fields}, PROMPT, "x", 5).body)
    assert body == {"prompt": "px", **fields, "max_tokens": left}
