"""Which requests can be served in two legs."""

from __future__ import annotations

import json

import pytest

from proxy.core.model.role import Role
from proxy.core.request.json_edit import edit_members
from proxy.core.router import Router
from proxy.core.tenants.tenants import Tenant, TenantSpec
from tests.present import present
from tests.proxy.core.making import chat, router_of, sized, spec

IMAGE = [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]
FUNCTION = {"type": "function", "name": "f"}


@pytest.fixture
def router() -> Router:
    """Return a router that hands over."""
    return router_of(spec("p0", Role.PREFILL), spec("d0", Role.DECODE), transfer=True)


@pytest.mark.parametrize(
    ("path", "fields", "reason"),
    [
        ("/v1/chat/completions", chat("hi"), ""),
        (
            "/v1/chat/completions",
            chat("hi", n=1, logprobs=True, seed=1, stop=["x"], min_tokens=3),
            "",
        ),
        ("/v1/chat/completions", chat("hi", tools=[FUNCTION], tool_choice="required"), ""),
        ("/v1/chat/completions", chat("hi", prompt_logprobs=None, echo=False, max_tokens=2), ""),
        ("/v1/completions", {"prompt": "hi", "best_of": 1, "logprobs": 3}, ""),
        ("/v1/completions", {"prompt": "hi", "n": "+1", "best_of": True}, ""),
        ("/v1/completions", {"prompt": ["hi"]}, ""),
        ("/v1/completions", {"prompt": [1, 2, 3]}, ""),
        ("/v1/messages", chat("hi", max_tokens=9, tool_choice={"type": "auto"}), ""),
        ("/v1/responses", {"input": "hi", "tools": [FUNCTION]}, ""),
        ("/v1/responses", {"input": "hi", "tools": []}, ""),
        ("/v1/responses", {"input": "hi", "request_id": None}, ""),
        ("/v1/chat/completions", chat("hi", request_id="mine"), ""),
        ("/v1/chat/completions", chat("hi", n=2), "samples"),
        *(
            ("/v1/chat/completions", chat("hi", n=n), "samples")
            for n in ("2", "+2", " 2", "2\n", "0_2", "2.0", "2_0", 2.0, "0" * 60 + "2", "two", [2])
        ),
        ("/v1/chat/completions", chat("hi", use_beam_search=True), "beam_search"),
        ("/v1/chat/completions", chat("hi", prompt_logprobs=0), "prompt_logprobs"),
        ("/v1/chat/completions", chat("hi", max_tokens=1), "one_token"),
        ("/v1/chat/completions", chat("hi", max_completion_tokens=0), "one_token"),
        ("/v1/chat/completions", chat(IMAGE), "not_text"),
        ("/v1/chat/completions", chat("hi", echo=True), "echo"),
        ("/v1/chat/completions", chat("hi", truncate_prompt_tokens=-1), "truncated"),
        ("/v1/responses", {"input": "hi", "truncation": "auto"}, "truncated"),
        ("/v1/completions", {"prompt": ["a", "b"]}, "samples"),
        ("/v1/completions", {"prompt": [[1], [2]]}, "samples"),
        ("/v1/completions", {"prompt": "a", "best_of": 2}, "samples"),
        ("/v1/completions", {"prompt": "a", "best_of": "+2"}, "samples"),
        ("/v1/completions", {"prompt": "a", "prompt_embeds": "x"}, "not_text"),
        ("/v1/messages", chat("hi", tool_choice={"type": "tool", "name": "f"}), "tools"),
        ("/v1/responses", {"input": "hi", "tools": [{"type": "code_interpreter"}]}, "tools"),
        ("/v1/responses", {"input": "hi", "background": True}, "stored"),
        ("/v1/responses", {"input": "hi", "request_id": "resp_mine"}, "own_id"),
        ("/inference/v1/generate", {"token_ids": [1, 2]}, "route"),
        ("/v1/embeddings", {"input": "hi"}, "route"),
    ],
)
def test_why_a_request_cannot_be_split(
    router: Router, path: str, fields: dict[str, object], reason: str
) -> None:
    assert sized(router, fields, path).why_whole == reason


def test_what_a_split_needs_is_kept(router: Router) -> None:
    info = sized(router, chat("hi", min_tokens=4))
    assert info.has_min_tokens
    assert info.field_names == chat("hi", min_tokens=4).keys()
    assert not sized(router, chat("hi")).has_min_tokens
    assert sized(router, chat("hi", n=2)).field_names is None
    without_transfer = sized(router_of(spec("w0")), chat("hi", n=2))
    assert (without_transfer.why_whole, without_transfer.field_names) == ("", None)


def test_member_names_are_those_of_the_body_sent(router: Router) -> None:
    """Members that the router sets are included; removed members are not."""
    body = json.dumps(chat("hi", stream=True, priority=3)).encode()
    info = sized(router, body, owner=Tenant(TenantSpec("a", salted=True)))
    assert info.field_names == json.loads(edit_members(body, present(info.edits))).keys()
    assert {"cache_salt", "stream_options"} <= info.field_names
    assert "priority" not in info.field_names
