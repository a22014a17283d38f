"""The prefix index follows what engines report."""

from __future__ import annotations

import pytest

from proxy.core.learned.prefix_index import BLOCKS, PrefixIndex
from proxy.core.learned.resident_prefixes import ResidentPrefixes, name_of, prompt_of
from tests.proxy.core.learned.test_prefix_index import held, text

BLOCK = BLOCKS[0]
# Four bytes are a token, so a block of bytes is 128 tokens, or 8 blocks of the engine.
TOKENS, ENGINE_BLOCK = BLOCK // 4, 16


class Engine:
    """One engine's reports about prompts of whole blocks, each of one letter."""

    def __init__(self, index: PrefixIndex | None = None, worker: int = 0) -> None:
        self.index = PrefixIndex() if index is None else index
        self.prefixes = ResidentPrefixes(self.index, worker)
        self.prefixes.restart(ENGINE_BLOCK)

    def name(self, number: int, *letters: str) -> None:
        body = text(*letters)
        name = name_of(self.index.hashes("m", body), len(body))
        self.prefixes.named(number, name, TOKENS * len(letters))


def test_resident_tokens_are_whole_blocks_of_bytes() -> None:
    engine = Engine()
    engine.name(1, "a", "b", "c")
    blocks = []
    for tokens in (0, TOKENS - 16, TOKENS, 2 * TOKENS, 3 * TOKENS - 16, 3 * TOKENS):
        engine.prefixes.resident(1, tokens)
        blocks.append(held(engine.index, text("a", "b", "c")).get(0, 0))
    # The last tokens of a prompt may not fill a block of the engine.
    assert blocks == [0, 0, 1, 2, 2, 3]


def test_the_rest_of_a_prompt_that_fills_no_block_counts_as_resident() -> None:
    engine = Engine()
    body = text("a", "b")
    name = name_of(engine.index.hashes("m", body), len(body))
    engine.prefixes.named(1, name, 2 * TOKENS + 5)
    engine.prefixes.resident(1, 2 * TOKENS)
    assert held(engine.index, body) == {0: 2}


def test_evicted_tokens_drop_every_block_that_has_some() -> None:
    engine = Engine()
    engine.name(1, "a", "b", "c", "d")
    engine.prefixes.resident(1, 4 * TOKENS)
    engine.prefixes.evicted(1, 3 * TOKENS + 112, 4 * TOKENS)
    assert held(engine.index, text("a", "b", "c", "d")) == {0: 3}
    engine.prefixes.evicted(1, TOKENS, TOKENS + 16)  # in the middle
    assert held(engine.index, text("a", "b", "c", "d")) == {0: 1}
    engine.prefixes.resident(1, 2 * TOKENS)
    assert held(engine.index, text("a", "b", "c", "d")) == {0: 3}
    assert len(engine.prefixes) == 3


def test_evicted_output_is_no_part_of_the_prompt() -> None:
    engine = Engine()
    engine.name(1, "a")
    engine.prefixes.resident(1, 4 * TOKENS)
    engine.prefixes.evicted(1, 2 * TOKENS, 3 * TOKENS)
    assert held(engine.index, text("a")) == {0: 1}


def test_a_name_may_come_after_the_report() -> None:
    engine = Engine()
    engine.prefixes.resident(1, 2 * TOKENS)
    engine.prefixes.evicted(1, TOKENS, 2 * TOKENS)
    assert len(engine.prefixes) == 0
    engine.name(1, "a", "b")
    assert held(engine.index, text("a", "b")) == {0: 1}


def test_an_expected_prefix_ends_with_its_request_unless_it_is_resident() -> None:
    engine = Engine()
    hashes = engine.index.hashes("m", text("a", "b"))
    engine.index.record(hashes, 0)
    engine.name(1, "a", "b")
    engine.prefixes.resident(1, TOKENS)
    engine.index.end(hashes, 0)
    for depth in (2, 1):  # the last report may come a moment after the response
        engine.index.drop_ended()
        assert held(engine.index, text("a", "b")) == {0: depth}


def test_an_eviction_ends_an_expectation() -> None:
    engine = Engine()
    engine.index.record(engine.index.hashes("m", text("a", "b")), 0)
    engine.index.record(engine.index.hashes("m", text("a", "b")), 7)
    engine.name(1, "a", "b")
    engine.prefixes.resident(1, 2 * TOKENS)
    engine.prefixes.evicted(1, 0, 2 * TOKENS)
    assert held(engine.index, text("a", "b")) == {7: 2}


def test_a_prompt_is_expected_again_after_its_beginning_was_evicted() -> None:
    engine = Engine()
    hashes = engine.index.hashes("m", text("a", "b"))
    engine.index.record(hashes, 0)
    engine.name(1, "a")
    engine.prefixes.resident(1, TOKENS)
    engine.name(2, "x")
    engine.prefixes.resident(2, TOKENS)
    engine.prefixes.evicted(1, 0, TOKENS)
    engine.index.record(hashes, 0)
    assert held(engine.index, text("a", "b")) == {0: 2}


def test_a_reset_drops_only_the_engines_own_blocks() -> None:
    index = PrefixIndex()
    engines = [Engine(index, worker) for worker in (0, 1)]
    for engine in engines:
        engine.name(1, "a", "b")
        engine.prefixes.resident(1, 2 * TOKENS)
    engines[0].prefixes.cleared()
    assert held(index, text("a", "b")) == {1: 2}
    assert len(engines[0].prefixes) == 0
    engines[0].prefixes.resident(1, TOKENS)
    assert held(index, text("a", "b")) == {0: 1, 1: 2}


def test_a_block_is_held_while_one_of_a_workers_engines_holds_it() -> None:
    index = PrefixIndex()
    engines = [Engine(index), Engine(index)]
    for engine, other in (engines, engines[::-1]):
        engine.prefixes.others = [other.prefixes]
        engine.name(1, "a")
        engine.prefixes.resident(1, TOKENS)
    engines[0].prefixes.evicted(1, 0, TOKENS)
    assert held(index, text("a")) == {0: 1}
    engines[1].prefixes.evicted(1, 0, TOKENS)
    assert held(index, text("a")) == {}


def test_a_lost_journal_leaves_an_expectation() -> None:
    engine = Engine()
    engine.name(1, "a", "b")
    engine.prefixes.resident(1, 2 * TOKENS)
    engine.prefixes.lost()
    assert held(engine.index, text("a", "b")) == {0: 2}
    assert len(engine.prefixes) == 0
    engine.prefixes.lost()
    engine.prefixes.restart(ENGINE_BLOCK)  # a snapshot of an empty cache
    assert held(engine.index, text("a", "b")) == {}


def test_a_failed_probe_changes_nothing_that_the_engine_reports() -> None:
    engine = Engine()
    engine.name(1, "a", "b")
    engine.prefixes.resident(1, TOKENS)
    engine.index.forget(0)
    assert held(engine.index, text("a", "b")) == {0: 1}


def test_a_forgotten_request_leaves_the_blocks_of_others() -> None:
    engine = Engine()
    engine.name(1, "a", "b")
    engine.prefixes.resident(1, 2 * TOKENS)
    engine.name(2, "a", "b")
    engine.prefixes.resident(2, 2 * TOKENS)
    engine.prefixes.forgotten(2)
    assert held(engine.index, text("a", "b")) == {0: 2}


def test_blocks_of_other_bytes_with_the_same_tokens_go_with_their_request() -> None:
    engine = Engine()
    for number, letter in ((1, "a"), (2, "b")):
        engine.name(number, letter)
        engine.prefixes.resident(number, TOKENS)
    engine.prefixes.forgotten(2)  # it reused the blocks that the first request computed
    assert held(engine.index, text("a")) == {0: 1}
    assert held(engine.index, text("b")) == {}
    assert len(engine.prefixes) == 1


@pytest.mark.parametrize("name", [b"", b"other", b"\x02" + bytes(12), b"\x01" + bytes(4), b"\x01"])
def test_a_name_that_is_not_ours_is_ignored(name: bytes) -> None:
    engine = Engine()
    engine.prefixes.named(1, name, 100)
    engine.prefixes.resident(1, 100)
    engine.prefixes.evicted(1, 0, 100)
    engine.prefixes.forgotten(1)
    assert len(engine.prefixes) == 0


def test_a_name_has_the_hashes_and_the_size() -> None:
    hashes = PrefixIndex().hashes("m", text("a", "b"))
    prompt = prompt_of(name_of(hashes, 1234), 300)
    assert prompt is not None
    assert (prompt.hashes, prompt.prompt_bytes, prompt.prompt_tokens) == (hashes, 1234, 300)
