"""What names a request's session."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.core.request.session_key import MAX_LOOKED_AT, id_in_body, id_in_headers
from tests.proxy.core import making
from tests.proxy.core.making import router_of, sized, spec

TURN = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
LATER = [*TURN, {"role": "assistant", "content": "a"}, {"role": "user", "content": "go on"}]


def key_of(
    fields: dict[str, Any],
    header: bytes = b"",
    tenant: str = "",
    path: str = "/v1/chat/completions",
    **settings: Any,
) -> tuple[int, bool]:
    """Return the session of a request, and whether its response will name it."""
    router = router_of(spec("w"), **settings)
    owner = making.tenant(tenant) if tenant else None
    router.remember("resp_1", "w", owner)
    info = sized(router, {"model": "m", **fields}, path, owner, session=header)
    return info.session, info.is_chained


@pytest.mark.parametrize(
    ("headers", "found"),
    [
        ({}, b""),
        ({b"x-session-id": b""}, b""),
        ({b"x-session-id": b"a", b"x-session-affinity": b"b"}, b"a"),  # OpenCode
        ({b"x-claude-code-session-id": b"a"}, b"a"),
        ({b"x-claude-code-session-id": b"a", b"x-claude-code-agent-id": b"b"}, b"a b"),
        ({b"session-id": b"a", b"thread-id": b"b"}, b"b"),  # Codex
        ({b"session_id": b"a"}, b"a"),  # its earlier versions
    ],
)
def test_id_is_in_the_headers_of_known_clients(headers: dict[bytes, bytes], found: bytes) -> None:
    assert id_in_headers(headers) == found


def test_header_goes_before_the_body() -> None:
    in_body = {"messages": LATER, "prompt_cache_key": "b"}
    assert key_of({"messages": TURN}, b"a") == key_of(in_body, b"a")
    assert key_of({"messages": TURN}, b"b") == key_of(in_body)
    assert key_of({"messages": TURN}) == (0, False)


def test_key_is_of_one_tenant_and_model() -> None:
    assert len({key_of({"messages": TURN}, b"a", tenant)[0] for tenant in ("", "s", "t")}) == 3


def test_without_an_id_later_turns_are_known_by_the_first_user_message() -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    with_parts = [TURN[0], {"role": "user", "content": parts}, *LATER[2:]]
    first = key_of({"messages": LATER})
    assert first[0]
    assert key_of({"messages": [*LATER, *LATER[2:]]}) == first
    assert key_of({"messages": with_parts}) == first
    assert key_of({"messages": [TURN[0], *LATER[2:], *LATER[2:]]}) != first


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": 3},
        {"messages": ["x"] * 9},
        {"messages": [{"role": "system"}] * (MAX_LOOKED_AT + 2)},
        {"prompt_cache_key": 3},
        {"prompt_cache_key": ""},
    ],
)
def test_odd_bodies_name_no_session(fields: dict[str, Any]) -> None:
    assert id_in_body(fields) == b""


def test_response_names_the_session_of_the_request_that_continues_it() -> None:
    path = "/v1/responses"
    assert key_of({"input": "hi"}, path=path) == (0, True)
    later, chained = key_of({"input": "hi", "previous_response_id": "resp_1"}, path=path)
    assert (later != 0, chained) == (True, True)
    assert key_of({"input": "hi", "previous_response_id": "resp_1"}, b"a", path=path)[1] is False


@pytest.mark.parametrize(
    "fields",
    [{"prefix_affinity": False}, {"policy": "round_robin"}, {"path": "/v1/embeddings"}],
    ids=["no affinity", "a rule without caches", "another route"],
)
def test_sessions_are_ignored_where_caches_are(fields: dict[str, Any]) -> None:
    assert key_of({"messages": LATER, "input": "hi"}, b"a", **fields) == (0, False)
