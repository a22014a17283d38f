from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.bench.fake_openai import dumped, event
from vllm_sched.bench.client.events import EventStream, text_of
from vllm_sched.bench.results.outcome import Outcome

USAGE = b"data: " + dumped({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 4}})
END = b"data: [DONE]\n\n"
ANSWER = b"".join(
    (
        b": ping\n\n",
        event({"delta": {"role": "assistant", "content": ""}}),
        event({"delta": {"content": " a"}}),
        event({"delta": {"content": ""}}),  # half a character is a token too
        event({"delta": {"reasoning_content": "b"}}),
        event({"delta": {"content": "role"}, "finish_reason": "length"}),
        event({"delta": {}, "finish_reason": "stop"}),
        USAGE + b"\n\n",
        END,
    )
)


def read(*chunks: bytes) -> tuple[Outcome, bool]:
    outcome = Outcome(0.0, "a", 1, 4)
    stream = EventStream(outcome)
    for number, chunk in enumerate(chunks):
        stream.feed(chunk, float(number))
    return outcome, stream.done


@given(st.sets(st.integers(0, len(ANSWER)), max_size=12), st.booleans())
def test_tokens_are_counted_however_the_answer_is_split(cuts: set[int], crlf: bool) -> None:
    answer = ANSWER.replace(b"\n", b"\r\n") if crlf else ANSWER
    edges = [0, *sorted(cuts), len(answer)]
    outcome, done = read(*(answer[a:b] for a, b in pairwise(edges)))
    assert (len(outcome.ticks), outcome.completed, outcome.prompt_tokens) == (4, 4, 9)
    assert (outcome.error, done) == ("", True)


@pytest.mark.parametrize(
    ("choice", "ticks"),
    [
        ({"text": "a"}, 1),
        ({"text": ""}, 1),
        ({"delta": {"content": "a", "role": "assistant"}}, 1),
        ({"delta": {"content": None, "role": "assistant"}}, 0),
        ({"delta": {"role": "assistant"}}, 0),
        ({"delta": {}}, 0),
        ({"delta": {"tool_calls": [{"index": 0}]}}, 1),
    ],
)
def test_choices_that_count_as_a_token(choice: dict[str, object], ticks: int) -> None:
    assert len(read(event(choice))[0].ticks) == ticks


@pytest.mark.parametrize(
    ("events", "completed", "prompt"),
    [
        (b'data: {"choices":[{"text":"a"}],"usage":{"completion_tokens":1}}', 1, 1),
        (b'data: {"usage":{"prompt_tokens":9,"completion_tokens":2}}', 2, 9),
        (b'data: {"choices":[],"usage":{"prompt_tokens":"9","completion_tokens":[4]}}', 0, 1),
    ],
    ids=["in a token event", "without choices", "not a number"],
)
def test_usage_counts_wherever_it_is(events: bytes, completed: int, prompt: int) -> None:
    outcome, done = read(event({"text": "a"}), events + b"\n\n", END)
    assert (outcome.error, done) == ("", True)
    assert (outcome.completed, outcome.prompt_tokens) == (completed, prompt)
    assert len(outcome.ticks) == 1 + (b"text" in events)


@pytest.mark.parametrize(
    "end", [b"data:[DONE]\n\n", b"data: [DONE] \n\n", b"id: 7\nevent: done\ndata: [DONE]\n\n"]
)
def test_other_spellings_of_the_end_are_accepted(end: bytes) -> None:
    usage = b"event: usage\n" + USAGE + b"\nretry: 10\n\n"
    outcome, done = read(event({"text": "a"}), b"retry: 10\n\n", usage, end)
    assert (outcome.error, done, outcome.completed) == ("", True, 4)


@pytest.mark.parametrize("data", [b"{}", b'{"type": "ping"}', b"2026-11-23 01:00"])
@pytest.mark.parametrize("name", [b"event: ping\n", b"event:ping\r\n"])
def test_ping_event_is_no_error(name: bytes, data: bytes) -> None:
    ping = name + b"data: " + data + b"\n\n"
    outcome, done = read(ping, event({"text": "a"}), ping, event({"text": "b"}), END)
    assert (outcome.error, len(outcome.ticks), done) == ("", 2, True)


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("cut", range(1, len(END)))
def test_end_needs_no_empty_line(end: bytes, cut: int) -> None:
    text, word = event({"text": "[DONE]"}), END.rstrip() + end
    assert read(text, word)[1]
    assert read(text + word[:cut], word[cut:])[1]
    assert read(text, b"event: end\n" + word)[1]
    assert not read(text, word.replace(b"]", b""))[1]
    assert not read(text, text[:cut])[1]


PAYLOADS = [
    b'{"error":{"message":"engine died"}}', b"gibberish", b'{"choices": null}', b'{"choices": [7]}',
    b"[1, 2, 3]", b"[" * 100_000, b'{"error":{"message":"no"},"usage":{"completion_tokens":1}}',
    b'{"usage":null}',
]  # fmt: skip


@pytest.mark.parametrize("payload", PAYLOADS)
@pytest.mark.parametrize("named", [b"", b"event: error\n"])
def test_error_event_is_recorded(payload: bytes, named: bytes) -> None:
    outcome, _ = read(event({"text": "a"}), named + b"data: " + payload + b"\n\n")
    assert payload.decode()[:9] in outcome.error
    assert len(outcome.ticks) == 1


def test_the_answers_text_is_kept_if_wanted() -> None:
    answer: list[bytes] = []
    stream = EventStream(Outcome(0.0, "a", 1, 4), answer)
    usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}
    broken = b'data: {"choices":[{"x\n\n'
    for chunk in (ANSWER, event({"text": "z", "index": 0}), broken, END):
        stream.feed(chunk, 0.0)
    stream.feed(b"data: " + dumped({"choices": [], "usage": usage}) + b"\n\n", 0.0)
    assert text_of(answer) == " arolez"
    assert stream.cached_tokens == 4
