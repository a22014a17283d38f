"""Limits on the values of a JSON body, and the cost of measuring the largest bodies."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import orjson
import pytest

from proxy.core.model.types import Refusal
from proxy.core.request import json_limits
from proxy.core.request.json_limits import (
    LARGE_BODY_BYTES,
    MAX_NODES,
    MAX_VALUES,
    PIECE_BYTES,
    JsonMask,
    exceeded_bound,
    may_exceed,
)
from proxy.core.request.token_estimate import MAX_EXAMINED, measure
from tests.proxy.core.making import read, refused, route, router_of, spec


def bound_of(body: bytes) -> str:
    return exceeded_bound(JsonMask(body)) if may_exceed(body) else ""


def listed(unit: bytes, times: int, key: bytes = b"x") -> bytes:
    return b'{"%b":[' % key + b",".join([unit] * times) + b"]}"


@pytest.mark.parametrize(
    ("unit", "nodes"),
    [
        (b"[]", 1),
        (b"{}", 1),
        (b'""', 1),
        (b'"long enough to be no small matter"', 1),
        (b'{"a":1}', 2),
        (b'{"a":[{"b":""}]}', 6),
        (rb'"\\"', 1),
        (rb'"\""', 1),
        (rb'{"\"":"\\\\"}', 3),
        ('{"é": "[,"}'.encode(), 3),
    ],
)
def test_number_of_strings_lists_and_objects_is_limited(unit: bytes, nodes: int) -> None:
    limit = (MAX_NODES - 3) // nodes  # minus the object, its key and the list
    assert bound_of(listed(unit, limit)) == ""
    more = listed(unit, limit + 1)
    assert bound_of(more) == "200,000 strings, lists and objects"
    assert len(more) > LARGE_BODY_BYTES, "shorter bodies are not checked"


def test_number_of_values_is_limited() -> None:
    limit = MAX_VALUES - 3
    for unit in (b"7", b"123456"):
        assert bound_of(listed(unit, limit)) == ""
        assert bound_of(listed(unit, limit + 2)) == "1,100,000 values"


@pytest.mark.parametrize("mark", [b"\\", b'"', b'\\"', b'"\\', b'"' * (2 * MAX_NODES + 1)])
def test_invalid_json_does_not_break_the_count(mark: bytes) -> None:
    bound_of(b"{" + mark + b"[," * MAX_VALUES)


def test_nodes_at_a_piece_boundary_are_counted() -> None:
    head = b'{"messages":[' + b'"",' * (MAX_NODES - 1)
    body = (
        head
        + b" " * (-len(head) % PIECE_BYTES + PIECE_BYTES - 3)
        + b'"xxxxxx",'
        + b'{"a":1},' * 100_000
        + b"1]}"
    )
    assert bound_of(body) == "200,000 strings, lists and objects"


@pytest.mark.parametrize("at", range(0, 100, 7))
def test_nodes_in_one_part_of_a_text_are_counted(at: int) -> None:
    nodes, text = b'"",' * (MAX_NODES + 1), b"x" * 30_000
    before = b'"%b",' % text * at
    after = b'"%b",' % text * (100 - at)
    assert bound_of(b"[" + before + nodes + after + b"1]").startswith("200,000")


@pytest.mark.plain("replaces a part")
def test_a_text_with_few_values_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    count = json_limits._count_signs
    # At a random place, the last sample may reach beyond the text.
    monkeypatch.setattr(json_limits, "SAMPLE_PLACES", [0.5] * 128)
    monkeypatch.setattr(
        json_limits, "_count_signs", lambda text: counted.append(len(text)) or count(text)
    )
    assert bound_of(b'{"prompt":"%b"}' % (b"if x in {1, 2}: y(x)" * 40_000)) == ""
    assert counted == [len(json_limits.SAMPLE_PLACES) * json_limits.SAMPLE_BYTES]


# The most expensive bodies for each prompt shape.
N = MAX_NODES - 50
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
EXPENSIVE: list[tuple[str, bytes]] = [
    (CHAT, b'{"messages":[{"content":[%b1]}]}' % (b'{"a":1},' * (N // 2))),
    (CHAT, b'{"messages":[{"content":[%b1]}]}' % (b"{}," * N)),
    (CHAT, b'{"messages":[{"content":[%b1]}]}' % (b'"",' * N)),
    (CHAT, b'{"messages":[{"content":[%b1]}]}' % (b"1," * (MAX_VALUES - 50))),
    (CHAT, b'{"messages":[%b1]}' % (b"{}," * N)),
    (CHAT, b'{"messages":[%b1]}' % (b'{"content":[1]},' * (N // 3))),
    (CHAT, b'{"messages":[%b1]}' % (b'{"a":1,"b":[1],"c":{}},' * (N // 6))),
    (CHAT, b'{"messages":[{"content":[%b1]}]}' % (b'{"content":[{}]},' * (N // 4))),
    (CHAT, b'{"messages":[{%b"a":1}]}' % b"".join(b'"k%d":1,' % i for i in range(N))),
    (CHAT, b'{"messages":[],"system":[%b1]}' % (b"{}," * N)),
    ("/v1/chat/completions/batch", b'{"messages":[%b[]]}' % (b"[{}]," * (N // 2))),
    (COMPLETION, b'{"prompt":[%b[1]]}' % (b"[1]," * N)),
    (COMPLETION, b'{"prompt":[%b""]}' % (b'"",' * N)),
    (COMPLETION, b'{"prompt":[%b1]}' % (b'"",' + b"1," * (MAX_VALUES - 50))),
    (
        COMPLETION,
        b'{"prompt_embeds":[%b""],"prompt":[%b""]}' % (b'"",' * (N // 2), b'"",' * 99_000),
    ),
    ("/v1/embeddings", b'{"input":[%b""]}' % (b"{}," * N)),
    ("/v1/responses", b'{"input":[%b1]}' % (b'{"a":1,"b":1,"output":[{}]},' * (N // 6))),
    ("/v1/rerank", b'{"query":"x","documents":[%b""]}' % (b"{}," * N)),
    ("/v1/score", b'{"data_1":[%b""],"data_2":[%b""]}' % (b"{}," * (N // 2), b"{}," * (N // 2))),
]


@pytest.mark.parametrize("at", range(len(EXPENSIVE)))
def test_cost_of_measuring_expensive_bodies_is_bounded(at: int) -> None:
    path, body = EXPENSIVE[at]
    assert bound_of(body) == "", "the body must pass the limit"
    fields, shape, lines = orjson.loads(body), route(path).shape, 0

    def count(_frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        extent = measure(shape, fields)
    finally:
        sys.settrace(before)
    # One line per prompt that is not examined: its length.
    assert lines <= 40 * MAX_EXAMINED + MAX_NODES
    # The parts not examined are estimated.
    assert extent.text + 4 * extent.tokens >= 0.1 * len(body)


def test_messages_beyond_the_examined_are_estimated_by_length() -> None:
    router, message = router_of(spec("w")), {"content": "x" * 70}
    few, many = ({"messages": [message] * n} for n in (MAX_EXAMINED, 2 * MAX_EXAMINED))
    sure, doubtful = read(router, few), read(router, many)
    assert not isinstance(sure, Refusal)
    assert not isinstance(doubtful, Refusal)
    assert 2 * sure.prompt_tokens < doubtful.prompt_tokens < 3 * sure.prompt_tokens
    assert doubtful.least_prompt == sure.least_prompt
    assert doubtful.text_bytes == 0, "an estimate teaches nothing"


@pytest.mark.parametrize(
    ("path", "key", "more"),
    [
        (COMPLETION, "prompt", {}),
        ("/v1/embeddings", "input", {}),
        ("/v1/rerank", "documents", {"query": "q"}),
    ],
)
def test_largest_text_includes_prompts_not_examined(
    path: str, key: str, more: dict[str, str]
) -> None:
    fields = {key: ["a"] * MAX_EXAMINED + ["x" * 1_000_000]} | more
    assert measure(route(path).shape, fields).largest_text >= 1_000_000


def test_too_deeply_nested_content_counts_by_its_texts() -> None:
    deep: list[Any] = []
    for _ in range(500):
        deep = [deep]
    fields = {"messages": [{"content": [""] * MAX_EXAMINED + ["x" * 1_000_000, deep]}]}
    assert measure(route(CHAT).shape, fields).guessed >= 250_000


@pytest.mark.parametrize("at", [0, 8])
def test_transfer_params_after_unexamined_parts_are_found(at: int) -> None:
    path, body = EXPENSIVE[at]
    steers = body[:-1] + b',"kv_transfer_params":{"remote_host":"h"}}'
    assert refused(read(router_of(spec("w")), steers, path)).code == "forbidden_parameter"
