"""Traces of sessions in AIPerf's formats."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from vllm_sched.bench.traffic.catalogue import find
from vllm_sched.bench.traffic.sessions.conversation import PlannedTurn, plan_session
from vllm_sched.bench.traffic.traces import RequestTrace
from vllm_sched.bench.traffic.types import Request, TrafficSource
from vllm_sched.errors import UsageError


def opened(folder: Path, *entries: Any) -> TrafficSource:
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return find(str(path), sessions=True)


def begun(source: TrafficSource) -> list[Request]:
    return list(source.requests(random.Random(0)))


def sizes(turns: tuple[PlannedTurn, ...]) -> list[tuple[int, int]]:
    return [(turn.request.prompt_tokens, turn.request.output_tokens) for turn in turns]


GENERATED = (
    {"session_id": "a", "input_length": 1536, "output_length": 320, "hash_ids": [0, 1],
     "timestamp": 500.0, "group_id": 4},
    {"session_id": "b", "input_length": 700, "output_length": 256, "hash_ids": [0], "timestamp": 0},
    {"session_id": "a", "input_length": 768, "output_length": 180, "hash_ids": [7, 8],
     "delay": 2450.5},
)  # fmt: skip


def test_the_lines_of_a_session_are_its_turns(tmp_path: Path) -> None:
    source = opened(tmp_path, *GENERATED)
    b, a = begun(source)
    assert (source.count, source.timed, b.at, a.at) == (2, True, 0.0, 0.5)
    turns = plan_session(a)
    assert sizes(turns) == [(1536, 320), (1536 + 320 + 768, 180)]
    assert turns[1].think_s == 2.4505
    assert turns[0].request.shared[:2] == ((0, 512), (1, 512))
    assert plan_session(b)[0].request.shared[0] == (0, 512)


def test_sessions_that_all_begin_at_once_have_no_times(tmp_path: Path) -> None:
    entries = [{**entry, "timestamp": 0} for entry in GENERATED[:2]]
    assert not opened(tmp_path, *entries).timed


def test_a_line_may_hold_a_whole_conversation(tmp_path: Path) -> None:
    system = {"role": "system", "text": "s" * 400}
    source = opened(
        tmp_path,
        {"session_id": "x", "turns": [
            system, {"text": "q" * 40, "output_length": 50},
            {"texts": ["r" * 4, {"contents": ["r" * 4]}], "delay": 1500},
        ]},
        {"turns": [system, {"text": "other"}], "tenant": "ann", "class": "chat"},
    )  # fmt: skip
    first, second = begun(source)
    assert sizes(plan_session(first)) == [(110, 50), (162, 128)]
    assert plan_session(first)[1].think_s == 1.5
    assert first.shared == second.shared == ((first.shared[0][0], 100),)
    assert (second.tenant, second.klass) == ("ann", "chat")


def test_a_request_may_hold_its_new_text(tmp_path: Path) -> None:
    said = {"role": "user", "content": "c" * 12}
    (begin,) = begun(
        opened(
            tmp_path,
            {"session_id": "a", "text_input": "t" * 40, "output_length": 5},
            {"session_id": "a", "messages": [said], "message_mode": "delta", "output_length": 6},
        )
    )
    assert sizes(plan_session(begin)) == [(10, 5), (18, 6)]


def test_forks_and_spawns_are_sub_agents(tmp_path: Path) -> None:
    def said(text: str, **more: Any) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": text}], "max_tokens": 10, **more}

    (root,) = begun(
        opened(
            tmp_path,
            {
                "session_id": "r",
                "turns": [said("a" * 40, forks=["f"], spawns=["s"]), said("b" * 4)],
            },
            {"session_id": "f", "turns": [said("c" * 8)]},
            {"session_id": "s", "turns": [said("d" * 12)]},
        )
    )
    turns = plan_session(root)
    fork, spawn = turns[0].forks
    assert sizes(turns) == [(10, 10), (21, 10)]
    assert (sizes(fork), sizes(spawn)) == ([(22, 10)], [(3, 10)])


def test_a_message_with_tool_calls_has_no_text(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "a" * 40}, {"role": "assistant", "content": None}]
    (begin,) = begun(opened(tmp_path, {"turns": [{"messages": messages}]}))
    assert sizes(plan_session(begin)) == [(10, 128)]


TURN = {"text": "hi"}


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([{"session_id": "a", "output_length": 4}], "line 1: input_length is missing"),
        ([{"session_id": 7, "input_length": 4}], "line 1: session_id is 7"),
        (
            [*GENERATED, {"session_id": "b", "input_length": 9, "timestamp": 9}],
            "line 4: a later turn of a session takes delay",
        ),
        ([{"session_id": "a", "turns": []}], "line 1: turns is []"),
        ([{"turns": [{"delay": 3}]}], "line 1: a turn must have one of text"),
        ([{"turns": [{"text": "x", "image": "y.png"}]}], "line 1: image is not supported"),
        ([{"turns": [{"text": "x", "delay": -1}]}], "line 1: delay is -1"),
        (
            [{"turns": [TURN, {"text": "x", "delay": 86_400_001}]}],
            "line 1: delay is 86400001; it must be milliseconds, 0 to 86,400,000",
        ),
        ([{"turns": [{"text": "x", "output_length": 0}]}], "line 1: output_length is 0"),
        ([{"turns": [TURN]}, {"turns": [{"text": 3}]}], "line 2: a turn's text is 3"),
        ([{"session_id": "a", "turns": [TURN]}] * 2, "line 2: session_id 'a' is in line 1 too"),
        ([{"turns": [{**TURN, "forks": ["n"]}]}], "line 1: sub-agent 'n' has no line"),
        ([{"turns": [{**TURN, "forks": "n"}]}], "line 1: forks is 'n'"),
        (
            [{"session_id": "a", "turns": [{**TURN, "forks": ["a"]}]}],
            "line 1: session 'a' is a sub-agent of itself",
        ),
        (
            [{"turns": [{**TURN, "forks": ["c", "c"]}]}, {"session_id": "c", "turns": [TURN]}],
            "line 1: sub-agent 'c' has more than one parent",
        ),
        (
            [{"session_id": str(n), "turns": [{**TURN, "forks": [str(n + 1)]}]} for n in range(600)]
            + [{"session_id": "600", "turns": [TURN]}],
            "line 51: sub-agents are nested deeper than 50 levels",
        ),
        ([{"session_id": "a", "messages": []}], "line 1: messages need message_mode"),
        ([{"turns": [TURN], "pre_session_spawns": ["b"]}], "pre_session_spawns is not supported"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, entries: list[Any], message: str) -> None:
    with pytest.raises(UsageError) as raised:
        opened(tmp_path, *entries)
    assert message in str(raised.value)


def test_a_trace_without_sessions_is_one_of_requests(tmp_path: Path) -> None:
    entry = {"timestamp": 0, "input_length": 10, "output_length": 2}
    assert isinstance(opened(tmp_path, entry), RequestTrace)
