"""Measure a body's prompt: bytes of text, and known or guessed tokens.

Only prompt fields are read. Values of a wrong type count as nothing; the worker refuses them. The
number of examined messages and parts is bounded; the rest is guessed from its length as JSON.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from typing import Any

import orjson

from proxy.core.learned.media_tokens import AUDIO, FIRST_SIZES, IMAGE, NONE, VIDEO, Numbers
from proxy.core.model.route_table import PromptFields

# Added by a chat template per message and per conversation.
TOKENS_PER_MESSAGE, TOKENS_PER_CHAT = 4, 3
# Default or learned sizes; real ones need decoding. Counted as `guessed`.
KINDS = (("image", IMAGE), ("audio", AUDIO), ("video", VIDEO))
EMBEDDED = "prompt_embeds"
EMBEDDED_BYTES = 10_923  # base64 of 4096 two-byte numbers
# An examined item blocks the event loop for up to 1 us.
MAX_EXAMINED = 20_000
BYTES_OF_A_TOKEN = 4  # of unexamined items
# Longer non-ASCII text is sampled, error about 1%: to encode 100 KB takes 70 us, a sample 10-20.
# The sampled characters are random, so that clients cannot exploit them.
LONG_TEXT_CHARS, SAMPLED_CHARS = 16_384, 4096
SAMPLE_STEP_FACTOR, SAMPLE_PHASE = random.uniform(0.5, 1.0), random.random()
# Larger numbers mean no limit; the cap keeps charges sane.
MAX_TOKENS = 2**31
# Text that pydantic, and so vLLM, reads as a whole number of at least 0.
NUMBER = re.compile(r"\s*(\+?[0-9]+(?:_[0-9]+)*|-0+(?:_0+)*)(?:\.0+)?\s*")
MAX_NUMBER_CHARS = 40
# Of pairs.
QUERY_KEYS = ("query", "queries", "data_1", "text_1")
DOCUMENT_KEYS = ("documents", "items", "data_2", "text_2")
QUERY_CUT, DOCUMENT_CUT = "max_tokens_per_query", "max_tokens_per_doc"  # per text; 0: no cut
BYTES_KEPT = 4  # per token, of cut text

JSON = Any


class PromptExtent:
    def __init__(
        self,
        text: int = 0,
        *,
        prompts: int = 1,
        largest_text: int = -1,
        examinable: int = MAX_EXAMINED,
        sizes: Numbers = FIRST_SIZES,
    ) -> None:
        self.text = text  # bytes
        self.tools = 0  # bytes of it: tools, documents
        self.tokens = 0  # exact or guessed, besides text
        self.guessed = 0  # guessed ones of `tokens`
        self.media: Numbers | None = None
        self.largest_text = largest_text  # largest prompt; -1 if only one
        self.largest_tokens = 0
        self.prompts = prompts
        self.plain = False  # a single text that /tokenize can count
        self.cut = False  # the worker cuts more text off
        self.examinable = examinable
        self.sizes = sizes  # tokens per medium


def measure(
    shape: PromptFields, body: dict[str, JSON], sizes: Numbers = FIRST_SIZES
) -> PromptExtent:
    extent = PromptExtent(sizes=sizes)
    reader = READERS.get(shape)
    if reader is not None:
        reader(extent, body)
    return extent


def parse_count(value: object) -> int | None:
    """Parse a number of tokens like vLLM; None if absent or refused."""
    if type(value) is int:
        return min(value, MAX_TOKENS) if value >= 0 else None
    if type(value) is float and math.isfinite(value) and value >= 0 and value.is_integer():
        return int(min(value, MAX_TOKENS))
    if type(value) is str and len(value) < MAX_NUMBER_CHARS and (digits := NUMBER.fullmatch(value)):
        return min(int(digits[1]), MAX_TOKENS)
    return int(value) if type(value) is bool else None


def text_bytes(text: str) -> int:
    """Return the length in UTF-8; sampled for long non-ASCII text."""
    if text.isascii():
        return len(text)
    length = len(text)
    if length <= LONG_TEXT_CHARS:
        return len(text.encode("utf-8", "surrogatepass"))
    step = int(length / SAMPLED_CHARS * SAMPLE_STEP_FACTOR) | 1  # odd: table columns are often even
    sample = text[int(step * SAMPLE_PHASE) :: step]
    return len(sample.encode("utf-8", "surrogatepass")) * length // len(sample)


def json_bytes(value: JSON) -> int:
    """Return the length as JSON, as a template prints it."""
    try:
        return len(orjson.dumps(value))
    except (TypeError, RecursionError):  # nested too deeply for orjson
        return _text_length(value)


def _text_length(value: JSON) -> int:
    """Return the length of all texts, plus 2 per other value."""
    length, left = 0, [value]
    while left:
        item = left.pop()
        length += len(item) if type(item) is str else 2
        if type(item) is list:
            left += item
        elif type(item) is dict:
            left += item.values()
    return length


def _longest_prompt(prompts: list[JSON]) -> int:
    if not {str, list} & set(map(type, prompts)):
        return 0
    sizes = [len(p) if type(p) is str else 4 * len(p) if type(p) is list else 0 for p in prompts]
    return max(sizes, default=0)


def _limit_values(extent: PromptExtent, values: list[JSON]) -> list[JSON]:
    """Return the values to examine; guess the rest."""
    left = extent.examinable
    if len(values) <= left:
        extent.examinable = left - len(values)
        return values
    extent.examinable = 0
    _guess_unexamined(extent, values[left:])
    return values[:left]


def _guess_unexamined(extent: PromptExtent, unexamined: JSON) -> None:
    tokens = json_bytes(unexamined) // BYTES_OF_A_TOKEN
    extent.tokens += tokens
    extent.guessed += tokens


def _add_messages(extent: PromptExtent, messages: JSON) -> None:
    if type(messages) is not list:
        return
    extent.tokens += TOKENS_PER_CHAT + TOKENS_PER_MESSAGE * len(messages)
    text = 0
    for message in _limit_values(extent, messages):
        if type(message) is not dict:
            continue
        members = len(message)
        has_others = members > 2  # besides the role and the content
        if has_others:
            if members > extent.examinable:
                extent.examinable = 0
                _guess_unexamined(extent, message)
                continue
            extent.examinable -= members
        content = message.get("content")
        if type(content) is str:
            text += len(content) if content.isascii() else text_bytes(content)
        elif type(content) is list:
            _add_parts(extent, content)
        if has_others or content is None:
            _add_other_members(extent, message)
    extent.text += text


def _add_other_members(extent: PromptExtent, message: dict[str, JSON]) -> None:
    """Count tool calls, names and reasoning."""
    for key, value in message.items():
        if key == "output" and type(value) is list:  # of a tool item
            _add_parts(extent, value)
        elif key not in ("role", "content"):
            extent.text += _value_bytes(value)


def _value_bytes(value: JSON) -> int:
    if type(value) is str:
        return text_bytes(value)
    return json_bytes(value) if type(value) in (list, dict) else 0


def _add_parts(extent: PromptExtent, parts: list[JSON], *, nested: bool = False) -> None:
    for part in _limit_values(extent, parts):
        if type(part) is str:
            extent.text += text_bytes(part)
        elif type(part) is dict:
            _add_part(extent, part, nested=nested)


def _add_part(extent: PromptExtent, part: dict[str, JSON], *, nested: bool) -> None:
    text = part.get("text")
    if type(text) is str:
        extent.text += text_bytes(text)
        return
    kind = part.get("type")
    if type(kind) is not str:
        kind = " ".join(part)  # {"image_url": "..."} is valid too
    for word, medium in KINDS:
        if word in kind:
            _add_medium(extent, medium, 1)
            return
    if EMBEDDED in kind:
        tokens = 1 + json_bytes(part) // EMBEDDED_BYTES
        extent.tokens += tokens
        extent.guessed += tokens
        return
    inner = part.get("content")
    if type(inner) is list and not nested:
        _add_parts(extent, inner, nested=True)
    else:
        extent.text += _value_bytes(inner if inner is not None else part)


def _add_medium(extent: PromptExtent, kind: int, number: int) -> None:
    tokens = number * extent.sizes[kind]
    extent.tokens += tokens
    extent.guessed += tokens
    counts = [*(extent.media or NONE)]
    counts[kind] += number
    extent.media = counts[IMAGE], counts[AUDIO], counts[VIDEO]


def _add_media(extent: PromptExtent, prompt_extent: PromptExtent, times: int = 1) -> None:
    if prompt_extent.media is not None:
        images, audios, videos = extent.media or NONE
        more = [times * number for number in prompt_extent.media]
        extent.media = images + more[IMAGE], audios + more[AUDIO], videos + more[VIDEO]


def _measure_chat(extent: PromptExtent, body: dict[str, JSON]) -> None:
    _add_messages(extent, body.get("messages"))
    system = body.get("system")
    if system is not None:
        _add_parts(extent, system if type(system) is list else [system])
    _add_tools(extent, body)
    extent.plain = not (extent.guessed or body.get("documents"))  # unknown to /tokenize


def _add_tools(extent: PromptExtent, body: dict[str, JSON]) -> None:
    """Count text that a template may omit."""
    documents = body.get("documents")
    if documents is None and type(more := body.get("chat_template_kwargs")) is dict:
        documents = more.get("documents")
    for item in (body.get("tools"), documents):
        if item:
            extent.tools += _value_bytes(item)
    extent.text += extent.tools


def _measure_chats(extent: PromptExtent, body: dict[str, JSON]) -> None:
    conversations = body.get("messages")
    if type(conversations) is list:
        _add_prompts(extent, conversations, _add_messages)


def _add_prompts(
    extent: PromptExtent, prompts: list[JSON], read: Callable[[PromptExtent, JSON], None]
) -> None:
    extent.prompts = max(len(prompts), 1)
    largest, largest_size = PromptExtent(), -1
    examined = _limit_values(extent, prompts)
    for prompt in examined:
        prompt_extent = PromptExtent(examinable=extent.examinable, sizes=extent.sizes)
        read(prompt_extent, prompt)
        extent.examinable = prompt_extent.examinable
        extent.text += prompt_extent.text
        extent.tokens += prompt_extent.tokens
        extent.guessed += prompt_extent.guessed
        _add_media(extent, prompt_extent)
        size = prompt_extent.text + 4 * prompt_extent.tokens
        if size > largest_size:
            largest, largest_size = prompt_extent, size
    longest = _longest_prompt(prompts[len(examined) :])
    if longest > largest_size:
        largest = PromptExtent(text=longest)
    extent.largest_text, extent.largest_tokens = largest.text, largest.tokens


def _add_prompt(extent: PromptExtent, prompt: JSON) -> None:
    if type(prompt) is str:
        extent.text += text_bytes(prompt)
    elif type(prompt) is list:
        if prompt and type(prompt[0]) is int:
            extent.tokens += len(prompt)
        else:
            _add_parts(extent, prompt)
    elif type(prompt) is dict:
        content = prompt.get("content")
        _add_parts(extent, content if type(content) is list else [prompt])


def _measure_prompt(extent: PromptExtent, prompt: JSON) -> None:
    if type(prompt) is list and prompt and type(prompt[0]) is not int:
        if type(prompt[0]) is dict and "role" in prompt[0]:
            _add_messages(extent, prompt)
        else:
            _add_prompts(extent, prompt, _add_prompt)
    else:
        _add_prompt(extent, prompt)


def _measure_completion(extent: PromptExtent, body: dict[str, JSON]) -> None:
    prompt, embedded = body.get("prompt"), body.get(EMBEDDED)
    if not embedded:
        _measure_prompt(extent, prompt)
        extent.plain = type(prompt) is str
        return
    # Each blob is a prompt, besides text and token ids.
    blobs = embedded if type(embedded) is list else [embedded]
    examined = blobs[: extent.examinable]  # `_add_prompts` charges them to `examinable`
    prompts: list[JSON] = [{"type": EMBEDDED, "data": item} for item in examined]
    if unexamined := len(blobs) - len(examined):
        _guess_unexamined(extent, blobs[len(examined) :])
    if type(prompt) is list and prompt and type(prompt[0]) is not int:
        prompts += prompt
    elif prompt is not None:
        prompts.append(prompt)
    _add_prompts(extent, prompts, _add_prompt)
    extent.prompts += unexamined


def _measure_input(extent: PromptExtent, body: dict[str, JSON]) -> None:
    for key in ("input", "messages", "texts", "inputs", "images"):
        value = body.get(key)
        if value is None:
            continue
        if key == "images" and type(value) is list:
            _add_medium(extent, IMAGE, len(value))
            extent.largest_text, extent.largest_tokens = 0, extent.sizes[IMAGE]
        elif key == "messages":
            _add_messages(extent, value)
        else:
            _measure_prompt(extent, value)
        return


def _measure_response(extent: PromptExtent, body: dict[str, JSON]) -> None:
    items = body.get("input")
    if type(items) is list:
        _add_messages(extent, items)
    else:
        _add_prompt(extent, items)
        extent.tokens += TOKENS_PER_CHAT + TOKENS_PER_MESSAGE
    extent.text += _value_bytes(body.get("instructions"))
    _add_tools(extent, body)


def _measure_tokens(extent: PromptExtent, body: dict[str, JSON]) -> None:
    ids = body.get("token_ids")
    if type(ids) is list:
        extent.tokens = len(ids)


def _measure_pairs(extent: PromptExtent, body: dict[str, JSON]) -> None:
    query_cut, document_cut = body.get(QUERY_CUT), body.get(DOCUMENT_CUT)
    sizes = extent.sizes
    queries = _measure_side(body, QUERY_KEYS, query_cut, MAX_EXAMINED, sizes)
    documents = _measure_side(body, DOCUMENT_KEYS, document_cut, queries.examinable, sizes)
    repeats = documents.prompts if queries.prompts == 1 else 1  # it is read for each document
    extent.prompts = documents.prompts
    extent.text = repeats * queries.text + documents.text
    extent.tokens = repeats * queries.tokens + documents.tokens
    extent.guessed = repeats * queries.guessed + documents.guessed
    _add_media(extent, queries, repeats)
    _add_media(extent, documents)
    extent.largest_text = queries.largest_text + documents.largest_text
    extent.largest_tokens = queries.largest_tokens + documents.largest_tokens
    extent.cut = queries.cut or documents.cut


def _measure_side(
    body: dict[str, JSON], keys: tuple[str, ...], cut: JSON, examinable: int, sizes: Numbers
) -> PromptExtent:
    """Measure all prompts of a side; the largest text and tokens may differ in prompt."""
    max_tokens = parse_count(cut) or 0
    value: JSON = next((body[key] for key in keys if body.get(key) is not None), "")
    many = type(value) is list and bool(value) and type(value[0]) is not int
    prompts = value if many else [value]
    side = PromptExtent(prompts=len(prompts), largest_text=0, examinable=examinable, sizes=sizes)
    examined = _limit_values(side, prompts)
    for prompt in examined:
        text, tokens = side.text, side.tokens
        _add_prompt(side, prompt)
        if max_tokens and side.text - text > max_tokens * BYTES_KEPT:
            side.text = text + max_tokens * BYTES_KEPT
            side.cut = True
        side.largest_text = max(side.largest_text, side.text - text)
        side.largest_tokens = max(side.largest_tokens, side.tokens - tokens)
    if len(examined) < len(prompts):
        longest = _longest_prompt(prompts[len(examined) :])
        side.largest_text = max(side.largest_text, min(longest, max_tokens * BYTES_KEPT or longest))
    return side


def _measure_state(extent: PromptExtent, body: dict[str, JSON]) -> None:
    for key in ("state", "questions", "instructions"):
        extent.text += _value_bytes(body.get(key))


def _measure_form(extent: PromptExtent, body: dict[str, JSON]) -> None:
    _add_medium(extent, AUDIO, 1)
    extent.text = _value_bytes(body.get("prompt"))


READERS: dict[PromptFields, Callable[[PromptExtent, dict[str, JSON]], None]] = {
    PromptFields.CHAT: _measure_chat,
    PromptFields.CHATS: _measure_chats,
    PromptFields.PROMPT: _measure_completion,
    PromptFields.INPUT: _measure_input,
    PromptFields.RESPONSE: _measure_response,
    PromptFields.TOKENS: _measure_tokens,
    PromptFields.PAIRS: _measure_pairs,
    PromptFields.STATE: _measure_state,
    PromptFields.FORM: _measure_form,
}
