"""Traces in Mooncake's format, valid and invalid."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from vllm_sched.bench.traffic import traces
from vllm_sched.bench.traffic.traces import RequestTrace
from vllm_sched.errors import UsageError

GOOD: list[dict[str, Any]] = [
    {"timestamp": 3000, "input_length": 1100, "output_length": 52, "hash_ids": [0, 1, 2]},
    {"timestamp": 3000, "input_length": 600, "output_length": 5, "hash_ids": [0, 9]},
    {"timestamp": 4500.5, "input_length": 1, "output_length": 1, "tenant": "a", "class": "chat"},
]


def written(folder: Path, *lines: Any) -> Path:
    path = folder / "some.jsonl"
    path.write_text(
        "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    )
    return path


def test_trace_is_read(tmp_path: Path) -> None:
    trace = RequestTrace(written(tmp_path, GOOD[0], "", *GOOD[1:]))
    first, second, third = trace.requests(random.Random())
    assert (first.at, second.at, third.at) == (0.0, 0.0, pytest.approx(1.5005))
    assert (first.prompt_tokens, first.output_tokens) == (1100, 52)
    assert first.shared == ((0, 512), (1, 512), (2, 76))
    assert second.shared[0] == first.shared[0]
    assert (third.tenant, third.klass, first.klass) == ("a", "chat", "some")
    assert (trace.count, trace.timed) == (3, True)
    assert trace.rate == pytest.approx(3 / 1.5005)
    empty = GOOD[0] | {"class": None, "tenant": None, "hash_ids": None}
    [request] = RequestTrace(written(tmp_path, empty)).requests(random.Random())
    assert (request.klass, request.tenant, request.shared) == ("some", "", ())
    path = written(tmp_path, *GOOD)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())  # a byte order mark
    assert [*RequestTrace(path).requests(random.Random())] == [first, second, third]


def test_trace_from_a_pipe_can_be_played_repeatedly(tmp_path: Path) -> None:
    beside = written(tmp_path, *(line | {"class": "chat"} for line in GOOD))
    reading, writing = os.pipe()
    os.write(writing, beside.read_bytes())
    os.close(writing)
    trace = RequestTrace(Path(f"/dev/fd/{reading}"))
    for _ in range(2):
        assert [*trace.requests(random.Random())] == [
            *RequestTrace(beside).requests(random.Random())
        ]
    os.close(reading)
    assert trace.count == 3


def piped(folder: Path, *lines: Any) -> RequestTrace:
    reading, writing = os.pipe()
    os.write(writing, written(folder, *lines).read_bytes())
    os.close(writing)
    with os.fdopen(reading):
        return RequestTrace(Path(f"/dev/fd/{reading}"))


@pytest.mark.parametrize("line", [GOOD[0] | {"session_id": "a"}, {"turns": [{"text": "hi"}]}])
def test_sessions_from_a_pipe_are_refused(tmp_path: Path, line: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"line 2: sessions are not read from a pipe; write them"):
        piped(tmp_path, GOOD[0], line)


def test_trace_from_a_pipe_is_limited_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces, "MAX_REQUESTS", len(GOOD))
    assert piped(tmp_path, *GOOD).count == len(GOOD)
    with pytest.raises(UsageError, match=r"pipe's requests are kept in memory, at most 3; write"):
        piped(tmp_path, *GOOD, GOOD[-1], "{not read")
    assert RequestTrace(written(tmp_path, *GOOD, GOOD[-1])).count == len(GOOD) + 1


def test_trace_name_that_is_not_utf8_is_escaped(tmp_path: Path) -> None:
    path = written(tmp_path, *GOOD).rename(tmp_path / os.fsdecode(b"a\xff.jsonl"))
    trace = RequestTrace(path)
    assert trace.name == r"a\xff"
    assert next(trace.requests(random.Random())).klass == trace.name


def test_block_tokens_sets_the_block_length(tmp_path: Path) -> None:
    line = GOOD[1] | {"hash_ids": list(range(38))}
    path = written(tmp_path, line)
    with pytest.raises(UsageError, match=r"line 1: hash_ids has 38 names.*--block-tokens"):
        RequestTrace(path)
    [request] = RequestTrace(path, 16).requests(random.Random())
    assert request.shared_tokens == 600
    assert request.shared[-1] == (37, 8)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{oops", r"is not a JSON object, as each line must be: '\{oops'"),
        ("[1]", r"is not a JSON object, as each line must be: '\[1\]'"),
        ({k: v for k, v in GOOD[0].items() if k != "timestamp"}, r"timestamp is missing"),
        (GOOD[0] | {"timestamp": "soon"}, r"timestamp is 'soon'; it must be milliseconds"),
        (GOOD[0] | {"timestamp": -1}, r"timestamp is -1"),
        (GOOD[0] | {"timestamp": True}, r"timestamp is True"),
        ('{"timestamp": NaN, "input_length": 1, "output_length": 1}', r"timestamp is nan"),
        (GOOD[0] | {"timestamp": 10}, r"timestamp goes back in time"),
        (GOOD[0] | {"input_length": 0}, r"input_length is 0; it must be a number of tokens"),
        (GOOD[0] | {"input_length": 1.5}, r"input_length is 1.5"),
        (GOOD[0] | {"output_length": None}, r"output_length is None"),
        (GOOD[0] | {"hash_ids": [[1]]}, r"hash_ids is \[\[1\]\]; it must be numbers"),
        (GOOD[0] | {"hash_ids": 7}, r"hash_ids is 7"),
        (GOOD[0] | {"hash_ids": 0}, r"hash_ids is 0"),
        (GOOD[0] | {"hash_ids": [True]}, r"hash_ids is \[True\]; it must be numbers"),
        (GOOD[0] | {"timestamp": 10**400}, r"timestamp is 1000"),
        (GOOD[0] | {"input_length": 10**400}, r"input_length is 1000.*1 to 100,000,000"),
        (GOOD[0] | {"class": 7}, r"class is 7; it must be a line of text"),
        (GOOD[0] | {"class": "a\nb"}, r"class is 'a\\nb'; it must be a line of text"),
        (GOOD[0] | {"tenant": ["a"]}, r"tenant is \['a'\]; it must be a line of text"),
        (GOOD[0] | {"tenant": "\ud800"}, r"tenant is '\\ud800'"),
    ],
)
def test_invalid_line_is_reported_with_its_number(tmp_path: Path, line: Any, message: str) -> None:
    path = written(tmp_path, GOOD[0], "", line)
    with pytest.raises(UsageError, match=rf"some\.jsonl, line 3: {message}") as caught:
        RequestTrace(path)
    assert "\n" not in str(caught.value)


def test_empty_and_binary_traces_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the trace is empty"):
        RequestTrace(written(tmp_path, ""))
    path = tmp_path / "binary.jsonl"
    path.write_bytes(b"\xff\xfe\x00\n")
    with pytest.raises(UsageError, match=r"line 1: is not UTF-8"):
        RequestTrace(path)
    with pytest.raises(UsageError, match="Is a directory"):
        RequestTrace(tmp_path)
    with pytest.raises(UsageError, match="the trace is empty"):
        RequestTrace(Path(os.devnull))  # a device, which is read once


@pytest.mark.parametrize("tokens", [0, -512])
def test_block_tokens_below_one_is_refused(tmp_path: Path, tokens: int) -> None:
    with pytest.raises(UsageError, match=rf"--block-tokens {tokens}: must be 1 or more"):
        RequestTrace(written(tmp_path, *GOOD), tokens)
