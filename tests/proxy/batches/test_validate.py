"""Validation of input files."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.batches.types import InputLine, InputProblem
from proxy.batches.validate import ENDPOINTS, MAX_PROBLEMS, SLICE_BYTES, InputFileCheck, read_line
from tests.proxy.batches.harness import CHAT, content_of, line, lines


def read(content: bytes, max_lines: int = 1000) -> tuple[list[InputLine], list[InputProblem]]:
    check = InputFileCheck(len(content), CHAT, max_lines)
    found: list[InputLine] = []
    while True:
        found += read_slice(check, content)
        if check.is_done:
            return found, check.problems


def read_slice(check: InputFileCheck, content: bytes) -> list[InputLine]:
    at, size = check.next_slice
    return check.validate(content[at : at + size])


def test_body_is_located_as_written() -> None:
    body = b'{ "model":"tiny" , "seed": 0.70000000000000000001, "body": {"model": "other"} }'
    raw = b'{"custom_id": "a", "body": 1, "method": "POST", "url": "%b", "b\\u006fdy" : %b }' % (
        CHAT.encode(),
        body,
    )
    content = b"\r\n\r\n" + raw + b"\r\n"
    [found], problems = read(content)
    assert problems == []
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
def test_invalid_line_reports_code_and_parameter(
    changes: dict[str, Any], code: str, param: str
) -> None:
    raw = json.dumps(line("a") | changes).encode()
    found = read_line(raw, 5, 0, CHAT)
    assert isinstance(found, InputProblem)
    assert (found.code, found.param, found.line) == (code, param, 5)


@pytest.mark.parametrize("raw", [b"[]", b"7", b"{", b"\xff", b'"x"', b"null"])
def test_line_that_is_no_object_is_refused(raw: bytes) -> None:
    found = read_line(raw, 1, 0, CHAT)
    assert isinstance(found, InputProblem)
    assert found.code == "invalid_json_line"


def test_line_with_too_many_members_is_refused() -> None:
    raw = json.dumps(line("a")).encode()
    found = read_line(b"{%b%b" % (b'"a":1,' * 3000, raw[1:]), 1, 0, CHAT)
    assert isinstance(found, InputProblem)
    assert (found.code, found.line) == ("invalid_request", 1)
    assert "more than 2,000 members" in found.message


@pytest.mark.parametrize("content", [b"\n", b"   ", b"\r\n\r\n"])
def test_file_without_lines_is_refused(content: bytes) -> None:
    found, [problem] = read(content)
    assert (found, problem.code) == ([], "empty_file")


def test_too_many_lines_are_refused() -> None:
    content = content_of(lines(4))
    assert [problem.code for problem in read(content, max_lines=3)[1]] == ["too_many_lines"]
    assert read(content, max_lines=4)[1] == []


def test_number_of_reported_problems_is_limited() -> None:
    _, problems = read(b"x\n" * 100_000)
    assert len(problems) == MAX_PROBLEMS


def test_file_is_read_in_slices_without_loss() -> None:
    content = content_of(line(f"r{n}", "x" * 999) for n in range(700))
    check = InputFileCheck(len(content), CHAT, 1000)
    first = read_slice(check, content)
    assert not check.is_done
    assert SLICE_BYTES // 1300 < len(first) < 700
    found = list(first)
    while not check.is_done:
        found += read_slice(check, content)
    assert [entry.custom_id for entry in found] == [f"r{n}" for n in range(700)]


def test_endpoints_of_batches() -> None:
    assert {CHAT, "/v1/completions", "/v1/embeddings", "/v1/responses"} <= set(ENDPOINTS)
    assert not {"/v1/audio/transcriptions", "/tokenize"} & set(ENDPOINTS)
