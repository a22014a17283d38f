"""The extent of a body's prompt."""

from __future__ import annotations

import random
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from proxy.core.learned.media_tokens import IMAGE_TOKENS
from proxy.core.model.route_table import PromptFields
from proxy.core.request.token_estimate import (
    BYTES_OF_A_TOKEN,
    EMBEDDED_BYTES,
    MAX_EXAMINED,
    MAX_TOKENS,
    SAMPLED_CHARS,
    TOKENS_PER_CHAT,
    TOKENS_PER_MESSAGE,
    PromptExtent,
    measure,
    parse_count,
    text_bytes,
)
from tests.proxy.core.making import chat

PICTURE = "data:image/png;base64," + "A" * 99_999
TEMPLATE = TOKENS_PER_CHAT + TOKENS_PER_MESSAGE
TEXT_PART = {"type": "text", "text": "1234"}
UNKNOWN_PART = {"type": "unknown", "value": "x"}
TOOL_RESULT = {"type": "tool_result", "content": [TEXT_PART]}


@pytest.mark.parametrize("share", [0.05, 0.5, 1.0])
def test_bytes_of_a_long_text_are_estimated_from_a_sample(share: float) -> None:
    chance = random.Random(3)  # with 1, the positions of one process in 500 give 3.6 %
    text = "".join("\u4e2d" if chance.random() < share else "a" for _ in range(200_000))
    assert text_bytes(text) == pytest.approx(len(text.encode()), rel=0.03)


def test_sampled_positions_are_random(monkeypatch: pytest.MonkeyPatch) -> None:
    step = int(200_000 / SAMPLED_CHARS) | 1
    text = "a".join("\u4e2d" * (step - 1) for _ in range(200_000 // step))
    monkeypatch.setattr("proxy.core.request.token_estimate.SAMPLE_STEP_FACTOR", 0.7)
    monkeypatch.setattr("proxy.core.request.token_estimate.SAMPLE_PHASE", 0.4)
    assert text_bytes(text) > 0.9 * len(text.encode())


CHAT, CHATS, PROMPT = PromptFields.CHAT, PromptFields.CHATS, PromptFields.PROMPT
INPUT, RESPONSE, PAIRS = PromptFields.INPUT, PromptFields.RESPONSE, PromptFields.PAIRS
BLOB = "A" * 9 * EMBEDDED_BYTES  # ten tokens
IMAGE = {"type": "image_url", "image_url": {"url": PICTURE}}
TOOLS = [{"type": "function", "function": {"name": "f"}}]
OUTPUT = [{"type": "input_text", "text": "seen:"}, {"type": "input_image", "image_url": PICTURE}]
CALL_OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": OUTPUT}
TEXTS = [{"title": "t", "text": "x" * 4000}]
TWO_CHATS = {"messages": [chat("abc")["messages"], chat("de")["messages"]]}


def size(value: object) -> int:
    return len(orjson.dumps(value))


@pytest.mark.parametrize(
    ("shape", "body", "extent"),
    [
        (CHAT, chat('a\n\u00e9"\U0001f600'), {"text": 1 + 1 + 2 + 1 + 4}),
        (CHAT, chat("x", system="abc"), {"text": 4, "tokens": TEMPLATE}),
        (CHAT, chat("x", system=[TEXT_PART]), {"text": 5, "tokens": TEMPLATE}),
        (CHAT, chat([TOOL_RESULT]), {"text": 4, "tokens": TEMPLATE}),
        (CHAT, chat([{"type": "tool_result", "content": "1234"}]), {"text": 4}),
        (CHAT, chat([UNKNOWN_PART]), {"text": size(UNKNOWN_PART)}),
        (CHAT, chat("x", tools=TOOLS), {"text": 1 + size(TOOLS)}),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": TOOLS}]}, {"text": size(TOOLS)}),
        # A worker's /tokenize counts no documents.
        (CHAT, chat("x", documents=TEXTS), {"tools": size(TEXTS), "plain": False}),
        (CHAT, chat("x", documents=TEXTS), {"text": 1 + size(TEXTS)}),
        (CHAT, chat("x", chat_template_kwargs={"documents": TEXTS}), {"plain": True}),
        (CHAT, chat("x", chat_template_kwargs={"documents": TEXTS}), {"text": 1 + size(TEXTS)}),
        (CHAT, chat([TEXT_PART, IMAGE, IMAGE]), {"text": 4, "guessed": 2 * IMAGE_TOKENS}),
        (CHAT, chat([IMAGE]), {"tokens": TEMPLATE + IMAGE_TOKENS, "plain": False}),
        (CHATS, TWO_CHATS, {"text": 5, "prompts": 2, "largest_text": 3}),
        (PROMPT, {"prompt": [1, 2, 3]}, {"text": 0, "tokens": 3, "prompts": 1}),
        (PROMPT, {"prompt": None, "prompt_embeds": BLOB}, {"tokens": 10, "guessed": 10}),
        (PROMPT, {"prompt": None, "prompt_embeds": BLOB}, {"text": 0, "prompts": 1}),
        (PROMPT, {"prompt": ["ab", "c"], "prompt_embeds": [BLOB] * 2}, {"text": 3, "prompts": 4}),
        (PROMPT, {"prompt": "ab", "prompt_embeds": [BLOB, 2 * BLOB]}, {"tokens": 29}),
        (PROMPT, {"prompt": "ab", "prompt_embeds": [BLOB, 2 * BLOB]}, {"largest_tokens": 19}),
        (PROMPT, {"prompt": "ab", "prompt_embeds": BLOB}, {"largest_text": 0, "plain": False}),
        (PROMPT, {"prompt": [1, 2], "prompt_embeds": BLOB}, {"prompts": 2}),
        (PromptFields.TOKENS, {"token_ids": [1] * 7}, {"tokens": 7}),
        (INPUT, {"input": "abc"}, {"text": 3}),
        (INPUT, {"input": ["abc", "d"]}, {"prompts": 2}),
        (INPUT, {"input": [[TEXT_PART, TEXT_PART], [TEXT_PART]]}, {"text": 12, "largest_text": 8}),
        (INPUT, {"texts": ["abc", "d"]}, {"text": 4}),
        (INPUT, chat("abc"), {"text": 3}),
        (INPUT, {"images": ["data:..."] * 2}, {"tokens": 2 * IMAGE_TOKENS}),
        (RESPONSE, {"input": "abc", "instructions": "de"}, {"text": 5, "tokens": TEMPLATE}),
        (RESPONSE, {"input": chat([TEXT_PART])["messages"]}, {"text": 4}),
        (RESPONSE, {"input": [CALL_OUTPUT]}, {"text": 27, "guessed": IMAGE_TOKENS}),
        # A query counts once per document.
        (PAIRS, {"query": "qq", "documents": ["a", "bbb"]}, {"text": 8, "largest_text": 5}),
        (PAIRS, {"text_1": ["a", "bb"], "text_2": ["ccc", "dddd"]}, {"text": 10, "prompts": 2}),
        (PAIRS, {"query": [1, 2], "documents": [[3], [4, 5, 6]]}, {"tokens": 8, "prompts": 2}),
        (PAIRS, {"query": [1, 2], "documents": [[3], [4, 5, 6]]}, {"largest_tokens": 5}),
    ],
)
def test_extent_of_each_shape(
    shape: PromptFields, body: dict[str, Any], extent: dict[str, int]
) -> None:
    found = measure(shape, body)
    assert {name: getattr(found, name) for name in extent} == extent


def test_examined_prompt_embeds_are_limited() -> None:
    """Each counts as a prompt and as its part."""
    limit = MAX_EXAMINED // 2
    extent = measure(PromptFields.PROMPT, {"prompt_embeds": ["A"] * limit})
    assert (extent.tokens, extent.prompts) == (limit, limit)
    extent = measure(PromptFields.PROMPT, {"prompt_embeds": ["A"] * 50_000})
    assert extent.prompts == 50_000
    assert extent.tokens > 20_000


@pytest.mark.parametrize(
    ("value", "tokens"),
    [
        *((zero, 0) for zero in (0, "-0")),
        *((seven, 7) for seven in (7, 7.0, "7", " +0_7.00\n")),
        *((large, MAX_TOKENS) for large in (10**30, "9" * 30, 1e300)),
        *((no, None) for no in (-1, -1.0, 0.5, float("inf"), float("nan"), None, [], {})),
        *((text, None) for text in ("seven", "-7", "9" * 50, "٣")),
        (True, 1),
    ],
)
def test_count_reads_numbers_in_every_spelling(value: object, tokens: int | None) -> None:
    assert parse_count(value) == tokens


@given(st.one_of(st.integers(), st.floats(), st.text(), st.booleans(), st.none()))
def test_count_is_none_or_within_bounds(value: object) -> None:
    assert (tokens := parse_count(value)) is None or 0 <= tokens <= MAX_TOKENS


@given(st.text(alphabet="0123456789+-_. \t\n\u2003e", max_size=12))
def test_count_of_a_text_agrees_with_pydantic(value: str) -> None:
    """Odd numbers, such as `0__1`, are None here."""
    try:
        parsed = TypeAdapter(int).validate_python(value)
    except ValidationError:
        parsed = None
    assert parse_count(value) in (None, None if parsed is None else min(parsed, MAX_TOKENS))
    if value.isdigit():
        assert parse_count(value) == parsed


KEYS = [
    *("messages", "prompt", "input", "texts", "inputs", "images", "token_ids", "query", "queries"),
    *("documents", "items", "data_1", "text_1", "tools", "system", "instructions", "state"),
    *("questions", "content", "text", "type", "role", "tool_calls", "prompt_embeds"),
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS), inner),
    max_leaves=20,
)


@given(st.sampled_from(PromptFields), st.dictionaries(st.sampled_from(KEYS), JSON))
def test_extent_of_any_body_is_valid(shape: PromptFields, body: dict[str, Any]) -> None:
    extent = measure(shape, body)
    assert extent.text >= 0
    assert extent.tokens >= extent.guessed >= 0
    assert extent.prompts >= 1


@pytest.mark.parametrize("shape", list(PromptFields))
@pytest.mark.parametrize("key", ["messages", "prompt", "input", "tools", "documents", "state"])
def test_deep_nesting_is_measured(shape: PromptFields, key: str) -> None:
    deep: Any = "x"
    for _ in range(500):
        deep = [{"content": deep}]
    assert isinstance(measure(shape, {key: deep}), PromptExtent)


SHORT, CALL = {"role": "user", "content": "abcd"}, {"role": "user", "content": "a", "index": 1}
MOST_CALLS = MAX_EXAMINED // (1 + len(CALL))
LARGE = {str(n): "abcd" for n in range(MAX_EXAMINED)}


@pytest.mark.parametrize(
    ("messages", "text", "guessed"),
    [
        ([SHORT] * MAX_EXAMINED, 4 * MAX_EXAMINED, 0),
        ([SHORT] * (MAX_EXAMINED + 5), 4 * MAX_EXAMINED, size([SHORT] * 5)),
        ([CALL] * MOST_CALLS, MOST_CALLS, 0),
        ([CALL] * (MOST_CALLS + 1), MOST_CALLS - 1, 2 * size(CALL)),
        ([SHORT, LARGE], 4, size(LARGE)),
        (["no message", SHORT], 4, 0),
    ],
    ids=[
        "messages",
        "too many messages",
        "members",
        "too many members",
        "large message",
        "invalid",
    ],
)
def test_unexamined_rest_of_a_chat_is_guessed_from_its_length(
    messages: list[object], text: int, guessed: int
) -> None:
    extent = measure(CHAT, {"messages": messages})
    assert extent.text == text
    assert extent.tokens == TOKENS_PER_CHAT + len(messages) * TOKENS_PER_MESSAGE + extent.guessed
    assert extent.guessed == pytest.approx(guessed / BYTES_OF_A_TOKEN, abs=2)
