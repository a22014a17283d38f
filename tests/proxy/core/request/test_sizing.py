"""Estimated and learned sizes of requests."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.learned.bytes_per_token import USUAL_OUTPUT
from proxy.core.model.route_table import ROUTES
from proxy.core.model.types import RequestInfo, Usage
from proxy.core.request.sizing import Sizer, enlarge, shrink_to_fit
from proxy.core.request.token_estimate import TOKENS_PER_CHAT, TOKENS_PER_MESSAGE
from tests.proxy.core.making import chat, make_info, route

TEMPLATE = TOKENS_PER_CHAT + TOKENS_PER_MESSAGE


def size(
    body: dict[str, Any], path: str = "/v1/chat/completions", sizer: Sizer | None = None
) -> RequestInfo:
    return (sizer or Sizer()).estimate(route(path), "m", body, 1000, "id")


def test_count_and_usage_of_one_prompt_teach_once() -> None:
    sizer = Sizer()
    info = size(chat("x" * 8000), sizer=sizer)
    assert info.countable
    sizer.apply_count(info, 4000 + TEMPLATE)
    assert info.prompt_tokens == info.largest_prompt == 4000 + TEMPLATE
    assert info.prompt_error == 0
    learned = sizer.learned("m", "chat/completions")
    assert learned.bytes_per_token == pytest.approx(2, rel=0.1)
    sizer.learn(info, Usage(4000 + TEMPLATE, 40))
    assert (learned.seen, learned.output) == (1, 40)


def test_stored_turns_teach_no_rate() -> None:
    sizer = Sizer()
    info = size({"input": "and then?", "previous_response_id": "r"}, "/v1/responses", sizer)
    info.pinned = "w0"  # set by the parser
    sizer.learn(info, Usage(9000, 40))
    learned = sizer.learned("m", "responses")
    assert (learned.seen, learned.fixed, learned.output) == (0, 0, 40)


def test_routes_and_models_learn_apart() -> None:
    sizer = Sizer()
    sizer.learn(size(chat("x" * 4000), sizer=sizer), Usage(4000, 10))
    assert sizer.learned("m", "chat/completions").bytes_per_token < 2
    assert sizer.learned("m", "completions").bytes_per_token == 4
    assert sizer.learned("n", "chat/completions").bytes_per_token == 4


CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
TWO_PROMPTS = {"prompt": ["x" * 400, "y" * 4000], "max_tokens": 9, "n": 2}
LONG = "x" * 32_000
TOOLS = ["t" * 3996]  # 4,000 bytes


@pytest.mark.parametrize(
    ("path", "body", "sizes"),
    [
        (COMPLETIONS, TWO_PROMPTS, {"prompt_tokens": 1100, "largest_prompt": 1000, "samples": 4}),
        (COMPLETIONS, TWO_PROMPTS, {"needed_context": 1009, "expected_tokens": 1100 + 4 * 9}),
        (EMBEDDINGS, {"input": ["x" * 40] * 3}, {"needed_context": 10, "largest_prompt": 10}),
        (
            EMBEDDINGS,
            {"input": ["x"] * 3},
            {"generates": False, "expected_output": 0, "samples": 3},
        ),
        # The output limit, in every spelling; workers read True as 1.
        (CHAT, chat("x", max_tokens="7"), {"output_tokens": 7}),
        (CHAT, chat("x", max_completion_tokens=7.0), {"output_tokens": 7}),
        (CHAT, chat("x", max_tokens=9, max_completion_tokens=7), {"output_tokens": 7}),
        (CHAT, chat("x", max_tokens=9, max_completion_tokens=None), {"output_tokens": 9}),
        (CHAT, chat("x", max_tokens=None), {"output_tokens": None}),
        (CHAT, chat("x", max_tokens=True), {"output_tokens": 1}),
        # Tools count once, and may be missing in the template.
        (CHAT, chat("x" * 4000, tools=TOOLS), {"prompt_tokens": 2000 + TEMPLATE}),
        (CHAT, chat("x" * 4000, tools=TOOLS), {"prompt_error": 718, "least_prompt": 250}),
        # The least size of a prompt; the tokens of a template are not certain.
        (CHAT, chat("x" * 16_000), {"least_prompt": 1000}),
        (CHAT, chat([{"type": "image_url", "image_url": {}}] * 9), {"least_prompt": 0}),
        (COMPLETIONS, {"prompt": "x" * 16_000}, {"least_prompt": 1000}),
        (COMPLETIONS, {"prompt": [1] * 5000}, {"least_prompt": 5000}),
        (COMPLETIONS, {"prompt": [[1] * 5000, [1] * 7000]}, {"least_prompt": 7000}),
        (EMBEDDINGS, {"input": ["x" * 16_000, LONG]}, {"least_prompt": 2000}),
        (EMBEDDINGS, {"input": LONG, "truncate_prompt_tokens": 512}, {"least_prompt": 512}),
        (EMBEDDINGS, {"input": LONG, "truncate_prompt_tokens": 512}, {"prompt_tokens": 512}),
        (EMBEDDINGS, {"input": LONG, "truncate_prompt_tokens": 512}, {"largest_prompt": 512}),
        (EMBEDDINGS, {"input": LONG, "truncate_prompt_tokens": -1}, {"least_prompt": 0}),
        (EMBEDDINGS, {"input": LONG, "truncate_prompt_tokens": -1}, {"prompt_error": 8000}),
        ("/v2/embed", {"texts": [LONG]}, {"needed_context": 8000, "prompt_error": 8000}),
    ],
)
def test_sizes_of_a_body(path: str, body: dict[str, Any], sizes: dict[str, object]) -> None:
    info = size(body, path)
    assert {name: getattr(info, name) for name in sizes} == sizes


@pytest.mark.parametrize("truncation", ["auto", None])
def test_truncation_auto_fits_a_response_to_the_context(truncation: str | None) -> None:
    body = {"input": "x" * 900_000, "max_output_tokens": 100}
    cut = size(body | {"truncation": truncation}, "/v1/responses")
    assert cut.needed_context - cut.prompt_error == 100
    shrink_to_fit(cut, 4000, cuts_output=False)
    assert cut.needed_context == 4000
    whole = size(body | {"truncation": "disabled"}, "/v1/responses")
    assert whole == size(body, "/v1/responses")
    shrink_to_fit(whole, 4000, cuts_output=False)
    assert whole.needed_context > 200_000


def test_max_tokens_per_doc_cuts_documents() -> None:
    body = {"query": "x" * 400, "documents": ["x" * 40_000, "x" * 40]}
    cut = size(body | {"max_tokens_per_doc": 300}, "/v2/rerank")
    assert (cut.largest_prompt, cut.prompt_tokens) == (400, 510)
    assert cut.least_prompt <= 300
    assert cut.text_bytes == 0  # the number of bytes read is unknown
    both = body | {"max_tokens_per_doc": 300, "max_tokens_per_query": 10}
    assert size(both, "/v1/score").largest_prompt == 310
    for invalid in (0, None, 10_001):
        assert size(body | {"max_tokens_per_doc": invalid}, "/rerank") == size(body, "/rerank")


NUMBERS = st.one_of(st.integers(), st.floats(allow_nan=False), st.text(max_size=4), st.none())


@given(st.sampled_from(sorted(ROUTES)), NUMBERS, NUMBERS, NUMBERS, NUMBERS)
def test_any_number_gives_a_valid_size(
    path: str, limit: Any, n: Any, cut: Any, stream: Any
) -> None:
    body = chat("x" * 100, max_tokens=limit, n=n, best_of=n, truncate_prompt_tokens=cut)
    body |= {"prompt": ["x", "y"], "stream": stream, "sampling_params": {"max_tokens": limit}}
    info = size(body, path)
    assert info.needed_context - info.prompt_error >= 0
    assert 0 <= info.expected_output <= (info.output_tokens or USUAL_OUTPUT)
    assert info.samples >= 1
    assert info.expected_tokens >= info.prompt_tokens >= 0


def test_refusal_by_a_small_worker_raises_the_size() -> None:
    sized = make_info(7000, 500, error=1100)
    larger = enlarge(sized, 12288, 8192)
    assert (sized.needed_context, sized.prompt_error) == (7500, 1100)
    assert (sized.long, larger.long) == (False, True)
    assert (larger.needed_context, larger.prompt_error) == (12289, 0)
    assert larger.prompt_tokens == larger.largest_prompt == 11789
    near = enlarge(make_info(12000, 500, error=1100), 12288, 8192)  # known to be near the limit
    assert (near.needed_context, near.prompt_error) == (12500, 211)


def test_least_prompt_follows_the_learnt_rate() -> None:
    sizer = Sizer()
    for _ in range(200):
        sizer.learn(size(chat("x" * 12_000), sizer=sizer), Usage(1000 + TEMPLATE, 10))
    assert size(chat("x" * 24_000), sizer=sizer).least_prompt == pytest.approx(1000, rel=0.1)


def test_fit_reduces_an_uncertain_size_to_the_context() -> None:
    estimated = size(chat("x" * 20_000, max_tokens=100))
    assert (estimated.needed_context, estimated.prompt_error) == (5000 + TEMPLATE + 100, 2503)
    shrink_to_fit(estimated, 4000, cuts_output=False)
    assert estimated.needed_context == 4000
    assert estimated.largest_prompt == estimated.prompt_tokens == 3900
    assert 4000 - estimated.prompt_error >= 2500, "no smaller worker than before"
    sure = size(chat("x" * 70_000, max_tokens=100))
    shrink_to_fit(sure, 4000, cuts_output=False)
    assert sure.needed_context == 17_500 + TEMPLATE + 100


@pytest.mark.parametrize(
    ("tokens", "limit", "needed"),
    [(4000, 1, 4001), (4001, 0, 4001), (10, 4001, 4011), (10, 3991, 4000)],
)
def test_fit_cuts_the_output_limit_to_the_context(tokens: int, limit: int, needed: int) -> None:
    """But not below one token, nor a limit above the context, which a worker refuses."""
    sized = size({"prompt": [1] * tokens, "max_tokens": limit}, "/v1/completions")
    shrink_to_fit(sized, 4000, cuts_output=True)
    assert sized.needed_context == needed
    body = {"token_ids": [1] * 10, "sampling_params": {"max_tokens": 9000}}
    cut = size(body, "/inference/v1/generate")
    shrink_to_fit(cut, 4000, cuts_output=True)
    assert cut.needed_context == 4000


def test_prompt_of_token_ids_has_its_exact_size_whatever_texts_taught() -> None:
    sizer = Sizer()
    for _ in range(9):
        texts = size({"prompt": ["x" * 90, "x" * 900]}, COMPLETIONS, sizer)
        sizer.learn(texts, Usage(800, 10))
    exact = size({"prompt": [[1] * 50, [1] * 70]}, COMPLETIONS, sizer)
    assert (exact.prompt_tokens, exact.largest_prompt, exact.prompt_error) == (120, 70, 0)
    assert size({"prompt": [[], []]}, COMPLETIONS, sizer).largest_prompt == 0


def test_usage_without_prompt_tokens_teaches_no_rate() -> None:
    sizer = Sizer()
    sizer.learn(size(chat("x" * 9000), sizer=sizer), Usage(0, 40))
    learned = sizer.learned("m", "chat/completions")
    assert (learned.seen, learned.bytes_per_token, learned.output) == (0, 4, 40)
