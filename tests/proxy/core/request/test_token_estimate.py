"""What a body asks to be read."""

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
    count,
    measure,
    text_bytes,
)
from tests.proxy.core.making import chat

PICTURE = "data:image/png;base64," + "A" * 99_999
TEMPLATE = TOKENS_PER_CHAT + TOKENS_PER_MESSAGE


@pytest.mark.parametrize("share", [0.05, 0.5, 1.0])
def test_a_long_text_is_reckoned_from_some_of_its_letters(share: float) -> None:
    chance = random.Random(1)
    text = "".join("\u4e2d" if chance.random() < share else "a" for _ in range(200_000))
    assert text_bytes(text) == pytest.approx(len(text.encode()), rel=0.03)


def test_which_letters_they_are_no_client_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    step = int(200_000 / SAMPLED_CHARS) | 1
    made = "a".join("\u4e2d" * (step - 1) for _ in range(200_000 // step))
    monkeypatch.setattr("proxy.core.request.token_estimate.SAMPLE_STEP_FACTOR", 0.7)
    monkeypatch.setattr("proxy.core.request.token_estimate.SAMPLE_PHASE", 0.4)
    assert text_bytes(made) > 0.9 * len(made.encode())


def test_text_is_counted_in_bytes_as_it_is_not_as_it_is_escaped() -> None:
    content = orjson.loads(b'"a\\n\\u00e9\\"\\ud83d\\ude00"')
    assert measure(PromptFields.CHAT, chat(content)).text == 1 + 1 + 2 + 1 + 4


def test_tools_and_calls_count_as_they_are_printed() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    plain = measure(PromptFields.CHAT, chat("x")).text
    assert measure(PromptFields.CHAT, chat("x", tools=tools)).text == plain + len(
        orjson.dumps(tools)
    )
    calls = {"messages": [{"role": "assistant", "tool_calls": tools}]}
    assert measure(PromptFields.CHAT, calls).text == len(orjson.dumps(tools))


def test_images_have_a_stated_size_and_their_bytes_are_no_text() -> None:
    picture = {"type": "image_url", "image_url": {"url": PICTURE}}
    extent = measure(PromptFields.CHAT, chat([{"type": "text", "text": "what?"}, picture, picture]))
    assert extent.text == 5
    assert extent.tokens == TEMPLATE + 2 * IMAGE_TOKENS
    assert extent.guessed == 2 * IMAGE_TOKENS
    assert not extent.plain


@pytest.mark.parametrize(
    ("part", "tokens"),
    [
        ({"image_url": PICTURE}, IMAGE_TOKENS),
        ({"type": None, "image_url": {"url": PICTURE}, "uuid": "a"}, IMAGE_TOKENS),
        ({"video_url": PICTURE}, VIDEO_TOKENS),
        ({"type": "prompt_embeds", "data": "A" * 9 * EMBEDDED_BYTES}, 10),
    ],
)
def test_what_is_no_text_is_known_by_its_keys_too(part: dict[str, Any], tokens: int) -> None:
    extent = measure(PromptFields.CHAT, chat([part]))
    assert (extent.text, extent.tokens, extent.guessed) == (0, TEMPLATE + tokens, tokens)


def test_embedded_prompts_are_prompts_beside_the_others() -> None:
    blob = "A" * 9 * EMBEDDED_BYTES
    extent = measure(PromptFields.PROMPT, {"prompt": None, "prompt_embeds": blob})
    assert (extent.text, extent.tokens, extent.guessed, extent.prompts) == (0, 10, 10, 1)
    both = {"prompt": ["ab", "c"], "prompt_embeds": [blob, blob + blob]}
    extent = measure(PromptFields.PROMPT, both)
    assert (extent.text, extent.tokens, extent.prompts) == (3, 29, 4)
    assert (extent.largest_text, extent.largest_tokens) == (0, 19)
    assert not measure(PromptFields.PROMPT, {"prompt": "ab", "prompt_embeds": blob}).plain
    assert measure(PromptFields.PROMPT, {"prompt": [1, 2], "prompt_embeds": blob}).prompts == 2


def test_embedded_prompts_are_looked_at_as_all_prompts_are() -> None:
    """Each as a prompt, and as its part."""
    most = MAX_EXAMINED // 2
    extent = measure(PromptFields.PROMPT, {"prompt_embeds": ["A"] * most})
    assert (extent.tokens, extent.prompts) == (most, most)
    extent = measure(PromptFields.PROMPT, {"prompt_embeds": ["A"] * 50_000})
    assert extent.prompts == 50_000
    assert extent.tokens > 20_000


def test_documents_count_as_they_are_printed_and_no_worker_can_count_them() -> None:
    documents = [{"title": "t", "text": "x" * 4000}]
    extent = measure(PromptFields.CHAT, chat("x", documents=documents))
    assert extent.text == 1 + len(orjson.dumps(documents))
    assert extent.tools == extent.text - 1
    assert not extent.plain
    inner = measure(PromptFields.CHAT, chat("x", chat_template_kwargs={"documents": documents}))
    assert (inner.text, inner.plain) == (extent.text, True)


def test_a_tools_output_may_be_a_picture() -> None:
    parts = [{"type": "input_text", "text": "seen:"}, {"type": "input_image", "image_url": PICTURE}]
    item = {"type": "function_call_output", "call_id": "c1", "output": parts}
    extent = measure(PromptFields.RESPONSE, {"input": [item]})
    assert extent.guessed == IMAGE_TOKENS
    assert extent.text == len("seen:" + "function_call_output" + "c1")


def test_a_tools_result_in_parts_is_read() -> None:
    result = {"type": "tool_result", "content": [{"type": "text", "text": "1234"}]}
    assert measure(PromptFields.CHAT, chat([result])).text == 4


def test_system_prompts_beside_the_messages() -> None:
    assert measure(PromptFields.CHAT, chat("x", system="abc")).text == 4
    parts = [{"type": "text", "text": "abc"}]
    assert measure(PromptFields.CHAT, chat("x", system=parts)).text == 4


def test_token_ids_are_exact() -> None:
    extent = measure(PromptFields.PROMPT, {"prompt": [1, 2, 3]})
    assert (extent.text, extent.tokens, extent.prompts) == (0, 3, 1)
    assert measure(PromptFields.TOKENS, {"token_ids": [1] * 7}).tokens == 7


def test_inputs_of_embeddings() -> None:
    assert measure(PromptFields.INPUT, {"input": "abc"}).text == 3
    assert measure(PromptFields.INPUT, {"input": ["abc", "d"]}).prompts == 2
    assert measure(PromptFields.INPUT, {"texts": ["abc", "d"]}).text == 4
    assert measure(PromptFields.INPUT, chat("abc")).text == 3
    assert measure(PromptFields.INPUT, {"images": ["data:..."] * 2}).tokens == 2 * IMAGE_TOKENS


def test_responses() -> None:
    extent = measure(PromptFields.RESPONSE, {"input": "abc", "instructions": "de"})
    assert (extent.text, extent.tokens) == (5, TEMPLATE)
    items = [{"role": "user", "content": [{"type": "input_text", "text": "abc"}]}]
    assert measure(PromptFields.RESPONSE, {"input": items}).text == 3


def test_one_query_is_read_again_for_each_document() -> None:
    extent = measure(PromptFields.PAIRS, {"query": "qq", "documents": ["a", "bbb"]})
    assert (extent.text, extent.prompts, extent.largest_text) == (2 + 1 + 2 + 3, 2, 5)
    extent = measure(PromptFields.PAIRS, {"text_1": ["a", "bb"], "text_2": ["ccc", "dddd"]})
    assert (extent.text, extent.prompts) == (10, 2)


def test_conversations_in_a_batch_are_prompts() -> None:
    batch = {"messages": [chat("abc")["messages"], chat("de")["messages"]]}
    extent = measure(PromptFields.CHATS, batch)
    assert (extent.text, extent.prompts, extent.largest_text) == (5, 2, 3)


@pytest.mark.parametrize(
    ("value", "tokens"),
    [
        (0, 0),
        (7, 7),
        (7.0, 7),
        ("7", 7),
        (" +0_7.00\n", 7),
        ("-0", 0),
        (10**30, MAX_TOKENS),
        ("9" * 30, MAX_TOKENS),
        (1e300, MAX_TOKENS),
        (-1, None),
        (-1.0, None),
        (0.5, None),
        (float("inf"), None),
        (float("nan"), None),
        ("seven", None),
        ("-7", None),
        ("9" * 50, None),
        ("٣", None),
        (True, 1),
        (None, None),
        ([], None),
        ({}, None),
    ],
)
def test_numbers_as_clients_write_them(value: object, tokens: int | None) -> None:
    assert count(value) == tokens


@given(st.one_of(st.integers(), st.floats(), st.text(), st.booleans(), st.none()))
def test_a_number_is_sane_or_none(value: object) -> None:
    assert (tokens := count(value)) is None or 0 <= tokens <= MAX_TOKENS


@given(st.text(alphabet="0123456789+-_. \t\n\u2003e", max_size=12))
def test_a_number_in_a_text_is_none_but_what_the_worker_s_parser_takes_it_for(value: str) -> None:
    """Of odd ones, as `0__1`, it is nothing here."""
    try:
        theirs = TypeAdapter(int).validate_python(value)
    except ValidationError:
        theirs = None
    assert count(value) in (None, None if theirs is None else min(theirs, MAX_TOKENS))
    if value.isdigit():
        assert count(value) == theirs


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
def test_no_body_breaks_it(shape: PromptFields, body: dict[str, Any]) -> None:
    extent = measure(shape, body)
    assert extent.text >= 0
    assert extent.tokens >= extent.guessed >= 0
    assert extent.prompts >= 1


@pytest.mark.parametrize("shape", list(PromptFields))
@pytest.mark.parametrize("key", ["messages", "prompt", "input", "tools", "documents", "state"])
def test_the_deepest_nesting_does_not_break_it(shape: PromptFields, key: str) -> None:
    deep: Any = "x"
    for _ in range(500):
        deep = [{"content": deep}]
    assert isinstance(measure(shape, {key: deep}), PromptExtent)
