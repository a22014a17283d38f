"""`long_prompt` and prompts below its threshold that fill steps, on real scheduler objects."""

from __future__ import annotations

from typing import Any

import pytest

from tests.policies.making import Bench, Policies, add, add_all, decode, wait

LARGE_STEP: dict[str, Any] = {"budget": 8_192, "max_model_len": 32_000, "num_blocks": 8_000}
# Prompts of 2,049 to 5,242 tokens need several steps, and are not long.
SMALL_STEP: dict[str, Any] = {"budget": 2_048, "max_model_len": 131_072, "num_blocks": 9_000}


def loaded(*prompts: int, beside: Policies | None = None, **engine: Any) -> Bench:
    """Return a bench with waiting requests named 0, 1, ...; from 2,049 to 8,192 is medium."""
    bench = Bench({**(beside or {}), "long_prompt": {}}, **(LARGE_STEP | engine))
    bench.add_all({str(number): tokens for number, tokens in enumerate(prompts)}, output=9)
    return bench


def test_mediums_enter_until_the_step_is_full_and_shorts_pass_the_others() -> None:
    bench = loaded(4_000, 4_100, 4_100, 4_100, 100)
    bench.play({"4": 100, "0": 4_000, "1": 4_092}, add("late", 50))
    bench.play({"4": 1, "0": 1, "1": 8, "late": 50, "2": 4_100, "3": 4_032})


def test_mediums_that_fill_the_next_step_too_hold_the_others() -> None:
    bench = loaded(*[5_000] * 4, **SMALL_STEP)
    bench.play({"0": 2_048}, add("chat", 60), {"0": 2_048}, {"0": 904, "chat": 60, "1": 1_084})


def test_shorter_mediums_enter_first() -> None:
    assert loaded(8_000, 7_000, 3_000, 4_000).entries() == ["2", "3", "0", "1"]


def test_mediums_keep_their_order_if_requests_have_priorities() -> None:
    assert loaded(8_000, 7_000, 3_000, 4_000, priority=True).entries() == ["0", "1", "2", "3"]


def test_medium_alone_has_whole_steps() -> None:
    loaded(8_000).play({"0": 8_000})
    loaded(5_000, **SMALL_STEP).play({"0": 2_048}, {"0": 2_048}, {"0": 904})


def test_medium_passes_a_long_prompt() -> None:
    bench = loaded(30_000)
    bench.play(decode("d"), add("medium", 4_000))
    assert bench.step()["medium"] == 4_000


def test_overdue_medium_enters_before_shorts() -> None:
    bench = loaded(5_000, 5_000, **SMALL_STEP)
    bench.play(1, wait(61), add_all("abcdef", 600), {"0": 2_048})
    assert bench.step() == {"0": 904, "1": 1_144}


@pytest.mark.parametrize(("first", "second", "enters"), [
    ("batch", "normal", True), ("normal", "batch", False), ("normal", "normal", False),
])  # fmt: skip
def test_medium_of_a_lower_class_holds_none_of_a_higher_one(
    first: str, second: str, enters: bool
) -> None:
    bench = loaded(beside={"lanes": {}}, **SMALL_STEP)
    bench.play(add("first", 5_000, lane=first), 1, add("second", 5_000, lane=second), 1)
    assert ("second" in bench.running) is enters


@pytest.mark.parametrize(("tokens", "entering"), [(2_048, 4), (2_049, 1)])
def test_prompts_of_2048_tokens_are_short(tokens: int, entering: int) -> None:
    bench = loaded(4_000, 4_000, *[tokens] * 4)
    bench.step()
    assert len(bench.running - {"0", "1"}) == entering


def test_cached_tokens_do_not_count() -> None:
    bench, prefix = loaded(prefix_caching=True, **SMALL_STEP), range(1, 5_001)
    bench.add("first", [*prefix, 7], output=1)
    bench.drain()
    bench.add_all({name: [*prefix, number] for number, name in enumerate("abc", 10)})
    assert len(bench.step()) == 3
