"""Requests that another worker continues exactly."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.core.request.continuable import why_not_continued, with_output


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({}, ""),
        ({"temperature": 0.7, "top_p": 0.9, "stop": ["x"], "min_tokens": 3}, ""),
        ({"n": 1, "tools": [], "response_format": {"type": "text"}, "presence_penalty": 0.0}, ""),
        ({"seed": 3, "temperature": 0}, ""),
        ({"seed": None, "logprobs": None, "anything": None}, ""),
        ({"seed": 3}, "seed"),
        ({"seed": 3, "temperature": 0.1}, "seed"),
        ({"n": 2}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 5}, "logprobs"),
        ({"frequency_penalty": 0.1}, "frequency_penalty"),
        ({"tools": [{"strict": True}], "tool_choice": "required", "reasoning_effort": "low"}, ""),
        ({"tools": [{}], "tool_choice": {"type": "any"}, "parallel_tool_calls": False}, ""),
        ({"system": "s", "thinking": {"type": "enabled", "budget_tokens": 1024}}, ""),
        ({"output_config": {"effort": "low"}, "context_management": {"edits": []}}, ""),
        ({"response_format": {"type": "json_object"}}, ""),
        ({"structured_outputs": {"regex": "a"}}, ""),
        ({"kv_transfer_params": {}}, "kv_transfer_params"),
        ({"of_a_later_version": 1}, "of_a_later_version"),
    ],
)
def test_the_field_that_prevents_it_is_named(fields: dict[str, Any], why: str) -> None:
    body = json.dumps({"model": "m", "messages": [], "stream": True, **fields}).encode()
    assert why_not_continued(body) == why


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"\xff"])
def test_other_bodies_are_not_continued(body: bytes) -> None:
    assert why_not_continued(body) == "body"


def test_the_tokens_are_added_to_the_body() -> None:
    body = b'{"model": "m", "prompt": "p"}'
    assert json.loads(with_output(body, [1, 2])) == {
        "model": "m", "prompt": "p", "vllm_xargs": {"output_so_far": [1, 2]},
    }  # fmt: skip
