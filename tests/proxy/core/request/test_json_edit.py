"""Setting and removing members of JSON text without other changes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.request.json_edit import edit_members, members
from proxy.core.request.json_limits import JsonMask


@pytest.mark.parametrize(
    ("body", "after"),
    [
        (b'{"a":1,"c":2~}', b'{"a":1,"c":2,"b":3~}'),
        (b'{"c":2~,"a":0}', b'{"c":2~,"a":1,"b":3}'),
        (b'{"c":2,~"d":4,"a":1}', b'{"c":2,"a":1,"b":3}'),
        (b'{~"d":4,"a":1}', b'{~"a":1,"b":3}'),
    ],
)
@pytest.mark.parametrize("size", [1, 8191, 8192, 8193])
def test_blanks_are_kept(body: bytes, after: bytes, size: int) -> None:
    blanks = (b" \t\r\n" * size)[:size]
    changes: dict[str, bytes | None] = {"a": b"1", "b": b"3", "d": None}
    found = edit_members(body.replace(b"~", blanks), changes)
    assert found == after.replace(b"~", blanks)


def test_blanks_cost_at_most_ten_times_parsing() -> None:
    def cost(work: Callable[[bytes], object]) -> float:
        best = 1e9
        for _ in range(5):
            began = time.process_time()
            work(body)
            best = min(best, time.process_time() - began)
        return best

    body = b'{"a":1' + b" " * (2 << 20) + b"}"
    limit = 10 * cost(orjson.loads)  # it was 80 times
    assert cost(lambda body: edit_members(body, {"b": b"1"}, {"a"})) < limit
    body = b'{"a":1,' + b" " * (2 << 20) + b'"b":1}'
    assert cost(lambda body: edit_members(body, {"b": None}, {"a", "b"})) < limit


@pytest.mark.parametrize(
    ("body", "fields", "after"),
    [
        (b'{"a":1}', {"a": b"2"}, b'{"a":2}'),
        (b'{"a": 1 , "b":[1.50]}', {"a": b"2"}, b'{"a": 2 , "b":[1.50]}'),
        (b'{"b":0.7000}', {"a": b"2"}, b'{"b":0.7000,"a":2}'),
        (b' {"b":1 }\n', {"a": b"2"}, b' {"b":1,"a":2 }\n'),
        (b"{}", {"a": b"2"}, b'{"a":2}'),
        (b"{ }", {"a": b"2", "b": b"3"}, b'{"a":2,"b":3 }'),
        (b'{"a":1}', {"a": None}, b"{}"),
        (b'{ "a" : 1 }', {"a": None}, b"{  }"),
        (b'{"a":1, "b":2}', {"a": None}, b'{"b":2}'),
        (b'{"b":2 , "a":1}', {"a": None}, b'{"b":2}'),
        (b'{"b":2,"a":1,"c":3}', {"a": None}, b'{"b":2,"c":3}'),
        (b'{"a":1,"b":2,"c":3}', {"a": None, "b": None}, b'{"c":3}'),
        (b'{"a":1,"b":2,"c":3}', {"a": None, "b": None, "c": None}, b"{}"),
        (b'{"a":1,"b":2}', {"a": None, "b": None, "d": b"4"}, b'{"d":4}'),
        (b'{"a":1,"b":2,"c":3}', {"b": b"9", "a": None, "d": b"4"}, b'{"b":9,"c":3,"d":4}'),
        (b'{"a":1}', {}, b'{"a":1}'),
        (b'{"b":1}', {"a": None}, b'{"b":1}'),
    ],
)
def test_members_are_set_and_removed(
    body: bytes, fields: dict[str, bytes | None], after: bytes
) -> None:
    assert edit_members(body, fields) == after


NAMES = st.sampled_from(["a", "b", "max_tokens", 'q"', "s\\", "é", "[", ""])
PLAIN = st.sampled_from(["a", "b", "max_tokens"])  # one with a `_`, which has its own search
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6) | st.sampled_from(['"', "\\"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)
SPACE = st.text(" \t\r\n", max_size=2)


@st.composite
def texts(draw: st.DrawFn) -> tuple[bytes, list[tuple[str, Any]]]:
    """Draw the JSON text of an object, with repeated members and escaped keys, and its pairs."""
    pairs = draw(st.lists(st.tuples(NAMES, VALUES), max_size=5))
    ascii_only, indent = draw(st.booleans()), draw(st.sampled_from([None, 1]))
    written = []
    for name, value in pairs:
        escaped = "".join(f"\\u{ord(char):04x}" for char in name)
        key = f'"{escaped}"' if draw(st.booleans()) else json.dumps(name, ensure_ascii=ascii_only)
        text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
        written.append(f"{draw(SPACE)}{key}{draw(SPACE)}:{draw(SPACE)}{text}{draw(SPACE)}")
    return f"{draw(SPACE)}{{{','.join(written)}}}{draw(SPACE)}".encode(), pairs


def pairs_of(text: bytes) -> list[tuple[str, Any]]:
    return [
        (member.name.decode(), json.loads(text[member.value : member.end]))
        for member in members(text)
    ]


def edits_of(fields: dict[str, Any]) -> dict[str, bytes | None]:
    """Return the edits that set these values, and remove those that are None."""
    return {n: None if value is None else json.dumps(value).encode() for n, value in fields.items()}


@given(texts(), st.dictionaries(PLAIN, st.none() | VALUES))
def test_spliced_agrees_with_a_json_parser(
    drawn: tuple[bytes, list[tuple[str, Any]]], fields: dict[str, Any]
) -> None:
    body, pairs = drawn
    assert pairs_of(body) == pairs
    assert edit_members(body, {"absent": None}) == body
    for member in members(body):
        name = member.name.decode()
        if name in fields and [name for name, _ in pairs].count(name) == 1:
            assert edit_members(body, {name: body[member.value : member.end]}) == body
    after = edit_members(body, edits_of(fields))
    expected = [(n, fields.get(n, v)) for n, v in pairs if fields.get(n, 0) is not None]
    names = {name for name, _ in pairs}
    expected += [(n, v) for n, v in fields.items() if n not in names and v is not None]
    assert json.loads(after) == dict(expected)
    assert pairs_of(after) == expected


@given(texts(), st.dictionaries(PLAIN, st.none() | VALUES), st.sampled_from(["", "x" * 9000]))
def test_known_names_do_not_change_the_result(
    drawn: tuple[bytes, list[tuple[str, Any]]], fields: dict[str, Any], long: str
) -> None:
    body, _ = drawn
    if long:  # beyond the search limit for unknown names
        comma = b"," if json.loads(body) else b""
        body = body.replace(b"{", b'{"p": "%b \\"a\\" \\\\"%b' % (long.encode(), comma), 1)
    wanted = edits_of(fields)
    names = frozenset(json.loads(body))
    after = edit_members(body, wanted)
    assert edit_members(body, wanted, names) == after
    found = [member for member in members(body, JsonMask(body)) if member.name.decode() in wanted]
    assert edit_members(body, wanted, known_members=found) == after


LONG = 'please tell me more\n "stream" ' * 1000
STREAM_BODIES = {
    "once": rb'{"p":%b,"stream" : true}',
    "in front": rb'{"stream":true,"p":%b}',
    "twice": rb'{"stream":false,"p":%b,"stream":true}',
    "an escape": rb'{"str\u0065am":false,"p":%b,"stream":true}',
    "an escape alone": rb'{"p":%b,"str\u0065am":false}',
    "deeper too": rb'{"t":{"stream":1},"p":%b,"stream":true}',
    "deeper too, and escaped": rb'{"t":{"stream":1},"p":%b,"\u0073tream":true}',
    "a value": rb'{"t":"stream","p":%b,"stream":true}',
    "the end of a key": rb'{"t\"stream":1,"p":%b,"stream":true}',
    "the end of a string": rb'{"t":"a \"stream","p":%b,"stream":true}',
    "an object": rb'{"p":%b,"stream":{"}":"\"}","x":[{}]}}',
    "a long object": rb'{"p":%b,"stream":{"x":[' + b"1," * 500 + b"1]}}",
    "a string": rb'{"p":%b,"stream":"\\\" }"}',
    "a long string": rb'{"p":%b,"stream":"' + rb"\"" * 500 + b'"}',
    "a list": rb'{"p":%b,"stream":["]",2]}',
}


@pytest.mark.parametrize("name", STREAM_BODIES)
@pytest.mark.parametrize("prompt", ["", LONG, LONG + "\u00e9"], ids=["short", "long", "escaped"])
@pytest.mark.parametrize("text", [b"false", None])
def test_known_name_is_edited_wherever_it_is(name: str, prompt: str, text: bytes | None) -> None:
    body = STREAM_BODIES[name] % json.dumps(prompt).encode()
    names = frozenset(json.loads(body))
    assert "stream" in names
    fields = {"stream": text, "kv": b"{}"}
    after = edit_members(body, fields, names)
    assert after == edit_members(body, fields)
    pairs = [pair for pair in pairs_of(body) if pair[0] != "stream" or text is not None]
    pairs = [(key, False if key == "stream" else value) for key, value in pairs]
    assert pairs_of(after) == [*pairs, ("kv", {})]
