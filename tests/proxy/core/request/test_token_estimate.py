"""The extent of a body's prompt."""

from __future__ import annotations

import random
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from proxy.core.learned.media_tokens import IMAGE_TOKENS, VIDEO_TOKENS
from proxy.core.model.route_table import PromptFields
from proxy.core.request.token_estimate import (
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
TOOL_RESULT = {"type": "tool_result", "content": [TEXT_PART]}


@pytest.mark.parametrize("share", [0.05, 0.5, 1.0])
def test_bytes_of_a_long_text_are_estimated_from_a_sample(share: float) -> None:
    chance = random.Random(1)
    text = "".join("\u4e2d" if chance.random() < share else "a" for _ in range(200_000))
    assert text_bytes(text) == pytest.approx(len(text.encode()), rel=0.03)


def test_sampled_positions_are_random(monkeypatch: pytest.MonkeyPatch) -> None:
    step = int(200_000 / SAMPLED_CHARS) | 1
    text = "a".join("\u4e2d" * (step - 1) for _ in range(200_000 // step))
    monkeypatch.setattr("proxy.core.request.token_estimate.SAMPLE_STEP_FACTOR", 0.7)
    monkeypatch.setattr("proxy.core.request.token_estimate.SAMPLE_PHASE", 0.4)
    assert text_bytes(text) > 0.9 * len(text.encode())


def test_text_is_counted_in_unescaped_bytes() -> None:
    content = orjson.loads(b'"a\\n\\u00e9\\"\\ud83d\\ude00"')
    assert measure(PromptFields.CHAT, chat(content)).text == 1 + 1 + 2 + 1 + 4


def test_tools_and_tool_calls_count_as_json() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    plain = measure(PromptFields.CHAT, chat("x")).text
    with_tools = measure(PromptFields.CHAT, chat("x", tools=tools)).text
    assert with_tools == plain + len(orjson.dumps(tools))
    calls = {"messages": [{"role": "assistant", "tool_calls": tools}]}
    assert measure(PromptFields.CHAT, calls).text == len(orjson.dumps(tools))


@pytest.mark.parametrize(
    ("part", "tokens"),
    [
        ({"image_url": PICTURE}, IMAGE_TOKENS),
        ({"type": None, "image_url": {"url": PICTURE}, "uuid": "a"}, IMAGE_TOKENS),
        ({"video_url": PICTURE}, VIDEO_TOKENS),
        ({"type": "prompt_embeds", "data": "A" * 9 * EMBEDDED_BYTES}, 10),
    ],
)
def test_media_parts_are_recognised_by_their_keys(part: dict[str, Any], tokens: int) -> None:
    extent = measure(PromptFields.CHAT, chat([part]))
    assert (extent.text, extent.tokens, extent.guessed) == (0, TEMPLATE + tokens, tokens)


def test_prompt_embeds_count_as_prompts() -> None:
    blob = "A" * 9 * EMBEDDED_BYTES
    extent = measure(PromptFields.PROMPT, {"prompt": None, "prompt_embeds": blob})
    assert (extent.text, extent.tokens, extent.guessed, extent.prompts) == (0, 10, 10, 1)
    both = {"prompt": ["ab", "c"], "prompt_embeds": [blob, blob + blob]}
    extent = measure(PromptFields.PROMPT, both)
    assert (extent.text, extent.tokens, extent.prompts) == (3, 29, 4)
    assert (extent.largest_text, extent.largest_tokens) == (0, 19)
    assert not measure(PromptFields.PROMPT, {"prompt": "ab", "prompt_embeds": blob}).plain
    assert measure(PromptFields.PROMPT, {"prompt": [1, 2], "prompt_embeds": blob}).prompts == 2


def test_examined_prompt_embeds_are_limited() -> None:
    """Each counts as a prompt and as its part."""
    limit = MAX_EXAMINED // 2
    extent = measure(PromptFields.PROMPT, {"prompt_embeds": ["A"] * limit})
    assert (extent.tokens, extent.prompts) == (limit, limit)
    extent = measure(PromptFields.PROMPT, {"prompt_embeds": ["A"] * 50_000})
    assert extent.prompts == 50_000
    assert extent.tokens > 20_000


def test_documents_count_as_json_and_are_not_countable() -> None:
    documents = [{"title": "t", "text": "x" * 4000}]
    extent = measure(PromptFields.CHAT, chat("x", documents=documents))
    assert extent.text == 1 + len(orjson.dumps(documents))
    assert extent.tools == extent.text - 1
    assert not extent.plain
    inner = measure(PromptFields.CHAT, chat("x", chat_template_kwargs={"documents": documents}))
    assert (inner.text, inner.plain) == (extent.text, True)


def test_images_in_tool_output_are_measured() -> None:
    parts = [{"type": "input_text", "text": "seen:"}, {"type": "input_image", "image_url": PICTURE}]
    item = {"type": "function_call_output", "call_id": "c1", "output": parts}
    extent = measure(PromptFields.RESPONSE, {"input": [item]})
    assert extent.guessed == IMAGE_TOKENS
    assert extent.text == len("seen:" + "function_call_output" + "c1")


@pytest.mark.parametrize(
    ("shape", "body", "text", "tokens", "prompts"),
    [
        (PromptFields.PROMPT, {"prompt": [1, 2, 3]}, 0, 3, 1),
        (PromptFields.TOKENS, {"token_ids": [1] * 7}, 0, 7, 1),
        (PromptFields.INPUT, {"input": "abc"}, 3, 0, 1),
        (PromptFields.INPUT, {"input": ["abc", "d"]}, 4, 0, 2),
        (PromptFields.INPUT, {"texts": ["abc", "d"]}, 4, 0, 2),
        (PromptFields.INPUT, chat("abc"), 3, TEMPLATE, 1),
        (PromptFields.INPUT, {"images": ["data:..."] * 2}, 0, 2 * IMAGE_TOKENS, 1),
        (PromptFields.RESPONSE, {"input": "abc", "instructions": "de"}, 5, TEMPLATE, 1),
        (PromptFields.RESPONSE, {"input": chat([TEXT_PART])["messages"]}, 4, TEMPLATE, 1),
        (PromptFields.CHAT, chat("x", system="abc"), 4, TEMPLATE, 1),
        (PromptFields.CHAT, chat("x", system=[TEXT_PART]), 5, TEMPLATE, 1),
        (PromptFields.CHAT, chat([TOOL_RESULT]), 4, TEMPLATE, 1),
    ],
)
def test_extent_of_each_shape(
    shape: PromptFields, body: dict[str, Any], text: int, tokens: int, prompts: int
) -> None:
    extent = measure(shape, body)
    assert (extent.text, extent.tokens, extent.prompts) == (text, tokens, prompts)


def test_query_counts_once_per_document() -> None:
    extent = measure(PromptFields.PAIRS, {"query": "qq", "documents": ["a", "bbb"]})
    assert (extent.text, extent.prompts, extent.largest_text) == (2 + 1 + 2 + 3, 2, 5)
    extent = measure(PromptFields.PAIRS, {"text_1": ["a", "bb"], "text_2": ["ccc", "dddd"]})
    assert (extent.text, extent.prompts) == (10, 2)
    extent = measure(PromptFields.PAIRS, {"query": [1, 2], "documents": [[3], [4, 5, 6]]})
    assert (extent.tokens, extent.prompts, extent.largest_tokens) == (2 + 1 + 2 + 3, 2, 5)


def test_conversations_of_a_batch_count_as_prompts() -> None:
    batch = {"messages": [chat("abc")["messages"], chat("de")["messages"]]}
    extent = measure(PromptFields.CHATS, batch)
    assert (extent.text, extent.prompts, extent.largest_text) == (5, 2, 3)


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
