"""Prompts with images: encoder budgets and chunk ends are kept."""

from __future__ import annotations

import random
from typing import Any

import pytest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.sched.output import SchedulerOutput

from tests.engine.schedulers import make_request
from tests.policies.making import Bench

BUDGET = 64
# An encoder for one large image or two small ones per step, with a cache for three large ones.
ENCODES, CACHES = 40, 120
LONG = {"long_prompt": {"long_prefill_token_threshold": 80}}
SETS: dict[str, dict[str, dict[str, Any]]] = {
    "long_prompt": LONG,
    "long_prompt, half a step": {
        "long_prompt": {"long_prefill_token_threshold": 80, "long_prefill_share": 0.5}
    },
    "all that cut": {"lanes": {}, **LONG, "rotation": {"chunk": 16}, "chunk_budget": {"chunk": 32}},
}
PROMPTS: list[tuple[int, list[tuple[int, int]]]] = [
    (20, []),
    (60, [(10, 30)]),
    (250, []),
    (250, [(5, 40), (60, 20), (90, 40)]),
    (400, [(5, 40), (60, 20), (90, 40), (160, 16), (200, 40), (330, 40)]),
]


def with_images(tokens: int, *images: tuple[int, int], output: int = 6) -> Any:
    """Return a request with images at these places, given as (offset, tokens)."""
    request = make_request(tokens, output=output, hashed=False)
    request.mm_features = [
        MultiModalFeatureSpec(None, "image", f"{request.request_id}/{at}", PlaceholderRange(at, n))
        for at, n in images
    ]
    return request


class Encoding(Bench):
    """A bench with this encoder, which checks each step against the encoder's limits."""

    def __init__(self, policies: dict[str, dict[str, Any]], *, ahead: bool, whole: bool) -> None:
        super().__init__(
            policies, ahead=ahead, budget=BUDGET, num_blocks=140, disable_chunked_mm_input=whole
        )
        self.whole = whole
        self.images = 0  # encoded so far
        self.scheduler.max_num_encoder_input_tokens = ENCODES
        self.scheduler.encoder_cache_manager = EncoderCacheManager(CACHES)

    def scheduled(self, output: SchedulerOutput, seconds: float) -> float:
        self.images += check_encoder(self.scheduler, output, self.whole)
        return seconds


def check_encoder(scheduler: Any, output: Any, kept_whole: bool) -> int:
    """Check a step against the encoder's limits; return the number of its images."""
    encoded, cache = output.scheduled_encoder_inputs, scheduler.encoder_cache_manager
    tokens = output.num_scheduled_tokens
    assert sum(tokens.values()) <= BUDGET
    sizes = [
        scheduler.requests[name].get_num_encoder_embeds(number)
        for name, numbers in encoded.items()
        for number in numbers
    ]
    assert sum(sizes) <= ENCODES
    assert cache.num_free_slots >= 0
    for name, count in tokens.items():
        request = scheduler.requests[name]
        end = request.num_computed_tokens  # this step's tokens are already counted
        begin = end - count
        for number, image in enumerate(request.mm_features):
            first, last = (
                image.mm_position.offset,
                image.mm_position.offset + image.mm_position.length,
            )
            if first < end and last > begin:  # its embeddings are part of this chunk
                assert name in cache.cached[image.identifier]
                assert not (kept_whole and begin < first < end < last)
            else:
                assert number not in encoded.get(name, ())  # not computed early
    return len(sizes)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("name", SETS)
def test_encoder_budget_and_chunk_ends_are_kept(name: str, ahead: bool, whole: bool) -> None:
    bench = Encoding(SETS[name], ahead=ahead, whole=whole)
    rng = random.Random(4)
    images = 0
    for _ in range(30):
        tokens, places = rng.choice(PROMPTS)
        images += len(places)
        bench.scheduler.add_request(with_images(tokens, *places, output=rng.randint(1, 9)))
        bench.steps(3)
    bench.drain(3000)
    assert bench.images >= images > 30
    assert bench.scheduler.kv_cache_manager.usage == 0


SMALL = 8
SMALL_STEPS: dict[str, dict[str, dict[str, Any]]] = {
    "by hand": {"chunk_budget": {"chunk": SMALL}},
    # An impossible target: the minimum chunk.
    "by time": {"chunk_budget": {"itl_ms": 0.001, "min_chunk": SMALL}},
    "beside others": {
        "lanes": {}, **LONG, "rotation": {"chunk": 16}, "chunk_budget": {"chunk": SMALL},
    },
}  # fmt: skip


@pytest.mark.parametrize("looks_ahead", [0, 1])  # as with drafts
@pytest.mark.parametrize("name", SMALL_STEPS)
def test_whole_image_is_computed_in_one_small_step(name: str, looks_ahead: int) -> None:
    bench = Encoding(SMALL_STEPS[name], ahead=False, whole=True)
    bench.whole = not looks_ahead
    scheduler = bench.scheduler
    scheduler.num_prefill_lookahead = looks_ahead
    bench.add("decodes", 8, output=1900, hashed=False)
    rng = random.Random(5)
    texts, pictures, largest, alone = 12, 6, 0, 0
    steps = 0
    looking: Any = None
    while texts or pictures or len(scheduler.requests) > 1:
        if texts and steps % 20 == 3:
            texts -= 1
            bench.add(f"text {texts}", rng.choice([30, 70]), output=3, hashed=False)
        # One request with images at a time, because whole images compete for the budget.
        if (
            pictures
            and steps > 10
            and (looking is None or looking.request_id not in scheduler.requests)
        ):
            pictures -= 1
            looking = with_images(120, (rng.choice([0, 5, 6]), 40), (60, 20), (80, 40))
            scheduler.add_request(looking)
        tokens = bench.step()
        prompts = {r: n for r, n in tokens.items() if n > 1}
        if looking is not None and looking.request_id in tokens:
            assert not is_split(looking, tokens[looking.request_id], looks_ahead)
            alone += prompts.keys() == {looking.request_id}
        elif name != "by time":  # it learns first
            # A prompt without images keeps its normal chunk.
            assert sum(prompts.values()) <= SMALL
        largest = max(largest, sum(tokens.values()))
        steps += 1
        assert steps < 1500, "a request is never served"
    assert largest > 40
    assert alone > 6


def is_split(request: Any, count: int, looks_ahead: int) -> bool:
    """Return whether a chunk, already counted, has a part of an image."""
    end = request.num_computed_tokens
    begin = end - count
    places = [image.mm_position for image in request.mm_features]
    return any(
        place.offset < end
        and place.offset + place.length > begin
        # Upstream may leave the look-ahead tokens for the next step.
        and not (begin <= place.offset and place.offset + place.length - looks_ahead <= end)
        and not (place.offset + place.length - looks_ahead <= begin)
        for place in places
    )
