from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_sched.bench.client.text import HEAD_WORDS, POOL_WORDS, WORDS, Measure, Texts
from vllm_sched.bench.traffic.types import Request

TEXTS = Texts(0)


@settings(max_examples=25)
@given(st.integers(0, 3 * HEAD_WORDS), st.integers(1, 400), st.text(max_size=5))
def test_longer_text_begins_with_the_shorter_one(few: int, more: int, name: str) -> None:
    short, long = TEXTS.text(name, few).split(), TEXTS.text(name, few + more).split()
    assert (len(short), len(long)) == (few, few + more)
    assert long[:few] == short


def test_texts_differ_from_their_first_words_by_name_and_seed() -> None:
    assert len(set(WORDS)) == len(WORDS) > 256
    assert all(word.isascii() and word.isalpha() and word.islower() for word in WORDS)
    words = TEXTS.text("longer than the pool", 2 * POOL_WORDS + 100).split()
    assert len(words) == 2 * POOL_WORDS + 100
    assert set(words) <= set(WORDS)
    texts = [each.text(name, 40) for each in (TEXTS, Texts(1)) for name in range(500)]
    assert len({" ".join(text.split()[:HEAD_WORDS]) for text in texts}) == len(texts)
    assert Texts(0).text("a", 40) == TEXTS.text("a", 40)


@given(st.integers(1, 5000), st.floats(0.5, 8), st.floats(0, 20))
def test_prompt_has_the_words_for_its_tokens(tokens: int, per_word: float, fixed: float) -> None:
    measure = Measure(per_word, fixed)
    prompt = TEXTS.prompt(1, Request(0, "a", tokens, 1), measure)
    assert len(prompt.split()) == max(1, measure.words(tokens))
    opening = TEXTS.joined([("shared", 1), ("own", tokens)], measure)
    assert len(opening.split()) == max(1, measure.words(tokens + 1))


def test_requests_share_exactly_their_shared_blocks() -> None:
    measure = Measure(1.7, 3.0)
    blocks = tuple((name, 512) for name in range(8))
    first = Request(0, "a", 5000, 1, shared=(*blocks, ("x", 512)))
    second = Request(0, "a", 4300, 1, shared=blocks)
    one, two = (TEXTS.prompt(i, r, measure).split() for i, r in enumerate((first, second)))
    common = next(i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b)
    assert measure.words(8 * 512) <= common < measure.words(8 * 512) + HEAD_WORDS
    assert len(one) == measure.words(5000)
