"""Tokens per image, audio clip and video, learned from `usage`."""

from __future__ import annotations

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
    return sizer.estimate(route(path), "m", body, 1000, "id")


def images(number: int) -> dict[str, Any]:
    return chat([TEXT_PART, *[IMAGE_PART] * number])


def teach(sizer: Sizer, body: dict[str, Any], tokens: int, times: int = 1) -> None:
    for _ in range(times):
        sizer.learn(size(sizer, body), Usage(tokens, 10))


@pytest.mark.parametrize("tokens_per_image", [6, 64, 576, 5000])
def test_image_size_follows_usage(tokens_per_image: int) -> None:
    sizer = Sizer()
    assert size(sizer, images(90)).prompt_tokens > 90 * IMAGE_TOKENS
    teach(sizer, images(90), 90 * tokens_per_image + TEXT_TOKENS + 7, 3)
    found = size(sizer, images(90))
    assert found.prompt_tokens == pytest.approx(90 * tokens_per_image + TEXT_TOKENS + 7, rel=0.1)
    assert found.prompt_error >= 0.4 * found.prompt_tokens, "the next images may have other sizes"
    assert size(sizer, images(1)).prompt_tokens < 2 * tokens_per_image + 100


def test_audio_clips_are_sized_apart_from_images() -> None:
    sizer = Sizer()
    teach(sizer, chat([AUDIO_PART]), 157, 5)
    assert size(sizer, chat([AUDIO_PART])).prompt_tokens == pytest.approx(157, rel=0.1)
    assert size(sizer, chat([IMAGE_PART])).prompt_tokens > IMAGE_TOKENS


def test_long_text_teaches_little_about_one_image() -> None:
    sizer = Sizer()
    body = chat([{"type": "text", "text": "x" * 400_000}, IMAGE_PART])
    teach(sizer, body, 90_000)
    assert sizer.learned("m", "chat/completions").media.tokens[0] > IMAGE_TOKENS / 4


def test_media_of_every_request_shape_is_learnt() -> None:
    sizer = Sizer()
    teach(sizer, {"images": ["data:,"] * 10}, 500, 3)
    info = size(sizer, {"images": ["data:,"] * 10}, "/v1/embeddings")
    assert info.prompt_tokens == 10 * IMAGE_TOKENS, "nothing is learned for this route yet"
    for _ in range(3):
        sizer.learn(size(sizer, {"images": ["data:,"] * 10}, "/v1/embeddings"), Usage(500))
    info = size(sizer, {"images": ["data:,"] * 10}, "/v1/embeddings")
    assert (info.prompt_tokens, info.largest_prompt) == (500, 50)
    chats = {"messages": [chat([IMAGE_PART])["messages"]] * 4}
    batch = "/v1/chat/completions/batch"
    for _ in range(3):
        sizer.learn(size(sizer, chats, batch), Usage(4 * 107, 10))
    assert size(sizer, chats, batch).largest_prompt == pytest.approx(107, rel=0.1)


@pytest.mark.parametrize(
    "body",
    [
        {**images(2), "truncate_prompt_tokens": 50},  # the prompt is cut: its usage is no sum
        chat([IMAGE_PART, {"type": "prompt_embeds", "data": "A" * 50_000}]),  # guessed as well
    ],
)
def test_cut_or_guessed_prompts_teach_no_media_size(body: dict[str, Any]) -> None:
    sizer = Sizer()
    teach(sizer, body, 50)
    assert sizer.learned("m", "chat/completions").media.tokens == FIRST_SIZES


def test_copy_keeps_sizes_and_resets_observation_counts() -> None:
    sizes = MediaSizes()
    sizes.set_mean(0, 50.0)
    sizes.seen[0] = 9.0
    copy = sizes.copy()
    assert (copy.tokens, copy.seen) == (sizes.tokens, [0.0, 0.0, 0.0])
    copy.set_mean(0, 70.0)
    assert sizes.tokens[0] == 50


def test_single_outlier_moves_the_mean_little_and_widens_the_band() -> None:
    sizes, alone = MediaSizes(), (1, 0, 0)
    assert sizes.error((2, 0, 0)) == IMAGE_TOKENS
    sizes.learn(RequestMedia(alone, 0, 1000.0 * IMAGE_TOKENS), 5 * IMAGE_TOKENS)
    assert 1.05 < sizes.means[0] / IMAGE_TOKENS < 1.15
    sizes = MediaSizes()
    sizes.learn(RequestMedia(alone, 0, 0.0), 2 * IMAGE_TOKENS)
    wide = sizes.spreads[0]
    assert wide == pytest.approx(IMAGE_TOKENS, rel=0.01)
    sizes.learn(RequestMedia(alone, 0, 0.0), 2 * IMAGE_TOKENS)
    assert sizes.spreads[0] < 0.6 * wide
