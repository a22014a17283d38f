"""What is read of an input file, and what is wrong with one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.batches.types import InputLine, InputProblem
from proxy.batches.validate import (
    ENDPOINTS,
    MAX_PROBLEMS,
    SLICE_BYTES,
    InputFileCheck,
    read_line,
)
from tests.proxy.batches.office import CHAT, line


def read(content: bytes, max_lines: int = 1000) -> tuple[list[InputLine], list[InputProblem]]:
    """Read a whole file."""
    checking = InputFileCheck(len(content), CHAT, max_lines)
    found: list[InputLine] = []
    while True:
        found += some(checking, content)
        if checking.over:
            return found, checking.complaints


def some(checking: InputFileCheck, content: bytes) -> list[InputLine]:
    """Read a slice."""
    at, size = checking.wanted
    return checking.take(content[at : at + size])


def test_a_body_is_found_as_it_was_written() -> None:
    body = b'{ "model":"tiny" , "seed": 0.70000000000000000001, "body": {"model": "other"} }'
    raw = b'{"custom_id": "a", "body": 1, "method": "POST", "url": "%b", "b\\u006fdy" : %b }' % (
        CHAT.encode(),
        body,
    )
    content = b"\r\n\r\n" + raw + b"\r\n"
    [found], complaints = read(content)
    assert complaints == []
    assert (found.number, found.custom_id, found.model) == (3, "a", "tiny")
    assert content[found.start : found.start + found.size] == body


@pytest.mark.parametrize(
    ("changes", "code", "param"),
    [
        ({"custom_id": None}, "missing_required_parameter", "custom_id"),
        ({"custom_id": ""}, "invalid_custom_id", "custom_id"),
        ({"custom_id": 7}, "invalid_custom_id", "custom_id"),
        ({"custom_id": "x" * 513}, "invalid_custom_id", "custom_id"),
        ({"method": "GET"}, "invalid_method", "method"),
        ({"url": "/v1/completions"}, "invalid_url", "url"),
        ({"body": []}, "invalid_body", "body"),
        ({"body": {"model": "tiny", "stream": True}}, "invalid_body", "body.stream"),
    ],
)
def test_what_is_wrong_with_a_line(changes: dict[str, Any], code: str, param: str) -> None:
    raw = json.dumps(line("a") | changes).encode()
    found = read_line(raw, 5, 0, CHAT)
    assert isinstance(found, InputProblem)
    assert (found.code, found.param, found.line) == (code, param, 5)


@pytest.mark.parametrize("raw", [b"[]", b"7", b"{", b"\xff", b'"x"', b"null"])
def test_a_line_that_is_no_object(raw: bytes) -> None:
    found = read_line(raw, 1, 0, CHAT)
    assert isinstance(found, InputProblem)
    assert found.code == "invalid_json_line"


def test_a_line_of_countless_members() -> None:
    raw = json.dumps(line("a")).encode()
    found = read_line(b"{%b%b" % (b'"a":1,' * 3000, raw[1:]), 1, 0, CHAT)
    assert isinstance(found, InputProblem)
    assert (found.code, found.line) == ("invalid_request", 1)
    assert "more than 2,000 members" in found.message


@pytest.mark.parametrize("content", [b"\n", b"   ", b"\r\n\r\n"])
def test_a_file_without_lines(content: bytes) -> None:
    found, [complaint] = read(content)
    assert (found, complaint.code) == ([], "empty_file")


def test_too_many_lines() -> None:
    content = b"\n".join(json.dumps(line(f"r{n}")).encode() for n in range(4))
    assert [each.code for each in read(content, max_lines=3)[1]] == ["too_many_lines"]
    assert read(content, max_lines=4)[1] == []


def test_not_more_is_complained_of_than_anybody_reads() -> None:
    _, complaints = read(b"x\n" * 100_000)
    assert len(complaints) == MAX_PROBLEMS


def test_it_is_read_in_slices_and_nothing_is_lost_between_them() -> None:
    content = b"\n".join(json.dumps(line(f"r{n}", "x" * 999)).encode() for n in range(700))
    checking = InputFileCheck(len(content), CHAT, 1000)
    first = some(checking, content)
    assert not checking.over
    assert SLICE_BYTES // 1300 < len(first) < 700
    found = list(first)
    while not checking.over:
        found += some(checking, content)
    assert [each.custom_id for each in found] == [f"r{n}" for n in range(700)]


def test_what_a_batch_may_ask_for() -> None:
    assert {CHAT, "/v1/completions", "/v1/embeddings", "/v1/responses"} <= set(ENDPOINTS)
    assert not {"/v1/audio/transcriptions", "/tokenize"} & set(ENDPOINTS)
