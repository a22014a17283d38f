"""What images, audio clips and videos come to, learnt from `usage`."""

from __future__ import annotations

import random
from typing import Any

import pytest

from proxy.core.learned.media_tokens import FIRST_SIZES, IMAGE_TOKENS, MediaSizes, RequestMedia
from proxy.core.model.types import RequestInfo, Usage
from proxy.core.request.sizing import Sizer
from tests.proxy.core.making import chat, route

IMAGE_PART = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
AUDIO_PART = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
TEXT_PART = {"type": "text", "text": "what is this? " * 10}
TEXT_TOKENS = 35


def size(sizer: Sizer, body: dict[str, Any], path: str = "/v1/chat/completions") -> RequestInfo:
    return sizer.ask(route(path), "m", body, 1000, "id")


def images(number: int) -> dict[str, Any]:
    return chat([TEXT_PART, *[IMAGE_PART] * number])


def taught(sizer: Sizer, body: dict[str, Any], tokens: int, times: int = 1) -> None:
    for _ in range(times):
        sizer.learn(size(sizer, body), Usage(tokens, 10))


@pytest.mark.parametrize("each", [6, 64, 576, 5000])
def test_images_are_sized_as_usage_says(each: int) -> None:
    sizer = Sizer()
    assert size(sizer, images(90)).prompt_tokens > 90 * IMAGE_TOKENS
    taught(sizer, images(90), 90 * each + TEXT_TOKENS + 7, 3)
    found = size(sizer, images(90))
    assert found.prompt_tokens == pytest.approx(90 * each + TEXT_TOKENS + 7, rel=0.1)
    assert found.prompt_error >= 0.4 * found.prompt_tokens, "the next images may be others"
    assert size(sizer, images(1)).prompt_tokens < 2 * each + 100


def test_an_audio_clip_is_sized_apart_from_images() -> None:
    sizer = Sizer()
    taught(sizer, chat([AUDIO_PART]), 157, 5)
    assert size(sizer, chat([AUDIO_PART])).prompt_tokens == pytest.approx(157, rel=0.1)
    assert size(sizer, chat([IMAGE_PART])).prompt_tokens > IMAGE_TOKENS


def test_sizes_that_differ_have_a_wide_band() -> None:
    sizer, chance, inside = Sizer(), random.Random(2), 0
    for _ in range(300):
        ask = size(sizer, images(1))
        tokens = chance.choice([60, 1200]) + TEXT_TOKENS + 7
        inside += abs(tokens - ask.prompt_tokens) <= ask.prompt_error
        sizer.learn(ask, Usage(tokens, 10))
    assert inside > 230
    assert ask.prompt_error == ask.largest_prompt, "no band is wider than its estimate"


def test_a_long_text_teaches_little_of_the_one_image_beside_it() -> None:
    sizer = Sizer()
    body = chat([{"type": "text", "text": "x" * 400_000}, IMAGE_PART])
    taught(sizer, body, 90_000)
    assert sizer.learnt("m", "chat/completions").media.tokens[0] > IMAGE_TOKENS / 4


def test_every_shape_that_has_media_teaches() -> None:
    sizer = Sizer()
    taught(sizer, {"images": ["data:,"] * 10}, 500, 3)
    ask = size(sizer, {"images": ["data:,"] * 10}, "/v1/embeddings")
    assert ask.prompt_tokens == 10 * IMAGE_TOKENS, "of another route nothing is known"
    for _ in range(3):
        sizer.learn(size(sizer, {"images": ["data:,"] * 10}, "/v1/embeddings"), Usage(500))
    ask = size(sizer, {"images": ["data:,"] * 10}, "/v1/embeddings")
    assert (ask.prompt_tokens, ask.largest_prompt) == (500, 50)
    chats = {"messages": [chat([IMAGE_PART])["messages"]] * 4}
    batch = "/v1/chat/completions/batch"
    for _ in range(3):
        sizer.learn(size(sizer, chats, batch), Usage(4 * 107, 10))
    assert size(sizer, chats, batch).largest_prompt == pytest.approx(107, rel=0.1)


@pytest.mark.parametrize(
    "body",
    [
        {**images(2), "truncate_prompt_tokens": 50},  # cut: its usage is no sum
        chat([IMAGE_PART, {"type": "prompt_embeds", "data": "A" * 50_000}]),  # guessed, too
    ],
)
def test_what_is_cut_or_guessed_otherwise_teaches_nothing(body: dict[str, Any]) -> None:
    sizer = Sizer()
    taught(sizer, body, 50)
    assert sizer.learnt("m", "chat/completions").media.tokens == FIRST_SIZES


def test_a_copy_is_as_if_nothing_was_seen() -> None:
    sizes = MediaSizes()
    sizes.take(0, 50.0)
    sizes.seen[0] = 9.0
    copy = sizes.copy()
    assert (copy.tokens, copy.seen) == (sizes.tokens, [0.0, 0.0, 0.0])
    copy.take(0, 70.0)
    assert sizes.tokens[0] == 50


def test_a_size_that_is_far_off_by_itself_teaches_little_and_widens_the_band() -> None:
    sizes, alone = MediaSizes(), (1, 0, 0)
    assert sizes.error((2, 0, 0)) == IMAGE_TOKENS
    sizes.see(RequestMedia(alone, 0, 1000.0 * IMAGE_TOKENS), 5 * IMAGE_TOKENS)
    assert 1.05 < sizes.means[0] / IMAGE_TOKENS < 1.15
    sizes = MediaSizes()
    sizes.see(RequestMedia(alone, 0, 0.0), 2 * IMAGE_TOKENS)
    wide = sizes.spreads[0]
    assert wide == pytest.approx(IMAGE_TOKENS, rel=0.01)
    sizes.see(RequestMedia(alone, 0, 0.0), 2 * IMAGE_TOKENS)
    assert sizes.spreads[0] < 0.6 * wide
