"""The prefix index follows what engines report."""

from __future__ import annotations

import pytest

from proxy.core.learned.prefix_index import BLOCKS, PrefixIndex
from proxy.core.learned.resident_prefixes import ResidentPrefixes, name_of
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

    def cached(self, *letters: str, prompt_tokens: int = 10_000) -> int:
        """Return the tokens that the index expects of a prompt."""
        return max(expected(self.index, *letters, prompt_tokens=prompt_tokens).values())

    def serve(self, number: int, *letters: str, found: int, response: int = 0) -> None:
        self.name(number, *letters)
        self.prefixes.record_found(number, found)
        for tokens in (0, response):
            self.prefixes.record_resident(number, TOKENS * len(letters) + tokens)

    def name(self, number: int, *letters: str, tokens: int | None = None, before: int = 0) -> None:
        body = text(*letters)
        name = name_of(self.index.hashes("m", body), len(body), before)
        self.prefixes.add_name(number, name, tokens or TOKENS * len(letters))

    def reside(self, number: int, *letters: str) -> None:
        """Name a request whose whole prompt is resident."""
        self.name(number, *letters)
        self.prefixes.record_resident(number, TOKENS * len(letters))

    def held(self, *letters: str) -> dict[int, int]:
        return held(self.index, text(*letters))


def expected(index: PrefixIndex, *letters: str, prompt_tokens: int = 10_000) -> dict[int, int]:
    """Return the tokens that the index expects of a prompt, by worker."""
    hashes = index.hashes("m", text(*letters))
    size, matches = BLOCK * len(letters), index.matches(hashes)
    found: dict[int, int] = {}
    for tokens, workers in index.matched_tokens(matches, hashes, size, 0, prompt_tokens):
        for worker in range(workers.bit_length()):
            if workers >> worker & 1:
                found.setdefault(worker, tokens)
    return found


def test_resident_tokens_are_whole_blocks_of_bytes() -> None:
    engine = Engine()
    engine.name(1, "a", "b", "c")
    blocks = []
    for tokens in (0, TOKENS - 16, TOKENS, 2 * TOKENS, 3 * TOKENS - 16, 3 * TOKENS):
        engine.prefixes.record_resident(1, tokens)
        blocks.append(engine.held(*"abc").get(0, 0))
    # The last tokens of a prompt may not fill a block of the engine.
    assert blocks == [0, 0, 1, 2, 2, 3]


def test_the_rest_of_a_prompt_that_fills_no_block_counts_as_resident() -> None:
    engine = Engine()
    engine.name(1, "a", "b", tokens=2 * TOKENS + 5)
    engine.prefixes.record_resident(1, 2 * TOKENS)
    assert engine.held("a", "b") == {0: 2}


def test_evicted_tokens_drop_every_block_that_has_some() -> None:
    engine = Engine()
    engine.reside(1, *"abcd")
    engine.prefixes.record_evicted(1, 3 * TOKENS + 16, 4 * TOKENS)
    assert engine.held(*"abcd") == {0: 3}
    engine.prefixes.record_evicted(1, TOKENS, TOKENS + 16)  # in the middle
    assert engine.held(*"abcd") == {0: 1}
    engine.prefixes.record_resident(1, 2 * TOKENS)
    assert engine.held(*"abcd") == {0: 3}
    assert len(engine.prefixes) == 3


def test_a_name_may_come_after_the_report() -> None:
    engine = Engine()
    engine.prefixes.record_resident(1, 2 * TOKENS)
    engine.prefixes.record_evicted(1, TOKENS, 2 * TOKENS)
    assert len(engine.prefixes) == 0
    engine.name(1, "a", "b")
    assert engine.held("a", "b") == {0: 1}


def test_an_expected_prefix_ends_with_its_request_unless_it_is_resident() -> None:
    engine = Engine()
    hashes = engine.index.hashes("m", text("a", "b"))
    engine.index.record(hashes, 0)
    engine.name(1, "a", "b")
    engine.prefixes.record_resident(1, TOKENS)
    engine.index.end_request(hashes, 0)
    for depth in (2, 1):  # the last report may come a moment after the response
        engine.index.drop_ended()
        assert engine.held("a", "b") == {0: depth}


def test_an_eviction_ends_an_expectation() -> None:
    engine = Engine()
    engine.index.record(engine.index.hashes("m", text("a", "b")), 0)
    engine.index.record(engine.index.hashes("m", text("a", "b")), 7)
    engine.reside(1, "a", "b")
    engine.prefixes.record_evicted(1, 0, 2 * TOKENS)
    assert engine.held("a", "b") == {7: 2}


def test_a_block_is_held_while_one_of_a_workers_engines_holds_it() -> None:
    index = PrefixIndex()
    engines = [Engine(index), Engine(index)]
    for engine, other in (engines, engines[::-1]):
        engine.prefixes.others = [other.prefixes]
        engine.reside(1, "a")
    engines[0].prefixes.record_evicted(1, 0, TOKENS)
    assert held(index, text("a")) == {0: 1}
    engines[1].prefixes.record_evicted(1, 0, TOKENS)
    assert held(index, text("a")) == {}


def test_a_lost_journal_leaves_an_expectation() -> None:
    engine = Engine()
    engine.reside(1, "a", "b")
    engine.prefixes.stop_claiming()
    assert engine.held("a", "b") == {0: 2}
    assert len(engine.prefixes) == 0
    engine.prefixes.stop_claiming()
    engine.prefixes.restart(ENGINE_BLOCK)  # a snapshot of an empty cache
    assert engine.held("a", "b") == {}


def test_a_failed_probe_changes_nothing_that_the_engine_reports() -> None:
    engine = Engine()
    engine.name(1, "a", "b")
    engine.prefixes.record_resident(1, TOKENS)
    engine.index.forget(0)
    assert engine.held("a", "b") == {0: 1}


def test_a_forgotten_request_leaves_the_blocks_of_others() -> None:
    engine = Engine()
    engine.reside(1, "a", "b")
    engine.reside(2, "a", "b")
    engine.prefixes.forget(2)
    assert engine.held("a", "b") == {0: 2}


def test_blocks_of_other_bytes_with_the_same_tokens_go_with_their_request() -> None:
    engine = Engine()
    for number, letter in ((1, "a"), (2, "b")):
        engine.reside(number, letter)
    engine.prefixes.forget(2)  # it reused the blocks that the first request computed
    assert engine.held("a") == {0: 1}
    assert engine.held("b") == {}
    assert len(engine.prefixes) == 1


def test_tokens_that_were_found_at_a_fork_are_expected_there_again() -> None:
    engine = Engine()
    engine.serve(1, "a", "b", "c", found=0)
    assert engine.cached("a", "z") == TOKENS
    engine.serve(2, "a", "x", "y", found=TOKENS + 16)  # common bytes in the second block
    assert engine.cached("a", "z") == TOKENS + 16
    assert engine.cached("a", "z", prompt_tokens=40) == 40
    assert engine.cached("a", "x", "z") == TOKENS + 16 + (2 * TOKENS - 16) // 2
    engine.prefixes.record_evicted(1, 0, TOKENS)
    engine.reside(3, "a")
    assert engine.cached("a", "z") == TOKENS


@pytest.mark.parametrize("found", [2 * TOKENS, 2 * TOKENS + 48])
def test_whether_prompts_find_responses_is_learnt(found: int) -> None:
    engine = Engine()
    for number, letter in enumerate("cdef"):
        engine.serve(2 * number, letter, "b", found=0, response=48)
        engine.serve(2 * number + 1, letter, "b", *"xyz", found=found)
    engine.serve(99, "a", "b", found=0, response=48)
    assert engine.cached("a", "b", "c") == found


def test_other_prompts_teach_nothing_of_responses() -> None:
    engine = Engine()
    for number, letter in enumerate("cdef"):
        engine.serve(2 * number, letter, "b", found=0, response=48)
        engine.serve(2 * number + 1, letter, "b", found=2 * TOKENS - 16)  # the same again
    engine.serve(99, "a", "b", found=0, response=48)
    assert engine.cached("a", "b", "c") == 2 * TOKENS + 48


def test_a_name_may_come_after_what_its_request_found() -> None:
    engine = Engine()
    engine.serve(1, "a", "b", "c", found=0)
    engine.prefixes.record_found(2, TOKENS + 16)
    engine.prefixes.record_resident(2, 3 * TOKENS)
    engine.name(2, "a", "x", "y")
    assert engine.cached("a", "z") == TOKENS + 16
    engine.prefixes.record_found(3, 16)
    engine.prefixes.forget(3)
    engine.name(3, "a", "x", "y")
    assert engine.cached("a", "z") == TOKENS + 16


def test_tokens_after_a_known_beginning_follow_its_exact_size() -> None:
    engine = Engine()
    engine.serve(1, "a", found=0)
    engine.name(2, *"abc", tokens=5 * TOKENS)  # two tokens for each in the first block
    engine.prefixes.record_found(2, TOKENS)
    engine.prefixes.record_resident(2, 5 * TOKENS)
    assert engine.cached("a", "b", "z") == 3 * TOKENS


def test_tools_in_the_template_are_tokens_before_the_prompt() -> None:
    engine = Engine()
    engine.name(1, "a", "b", tokens=4 * TOKENS, before=2 * BLOCK)
    engine.prefixes.record_resident(1, 2 * TOKENS)
    assert engine.held("a", "b") == {}
    engine.prefixes.record_resident(1, 3 * TOKENS)
    assert engine.cached("a", "z") == 3 * TOKENS


@pytest.mark.parametrize("name", [b"", b"other", b"\x02" + bytes(12), b"\x01" + bytes(4), b"\x01"])
def test_a_name_that_is_not_ours_is_ignored(name: bytes) -> None:
    engine = Engine()
    engine.prefixes.add_name(1, name, 100)
    engine.prefixes.record_resident(1, 100)
    engine.prefixes.record_evicted(1, 0, 100)
    engine.prefixes.forget(1)
    assert len(engine.prefixes) == 0


def test_a_response_that_one_worker_evicts_is_expected_on_the_other() -> None:
    index = PrefixIndex()
    engines = [Engine(index, worker) for worker in (0, 1)]
    for engine in engines:
        engine.serve(1, "a", "b", found=0, response=48)
    engines[0].prefixes.record_evicted(1, 2 * TOKENS + 16, 2 * TOKENS + 48)
    assert expected(index, "a", "b", "c") == {0: 2 * TOKENS + 16, 1: 2 * TOKENS + 48}
    engines[1].prefixes.record_evicted(1, TOKENS, 2 * TOKENS + 48)
    assert expected(index, "a", "b", "c") == {0: 2 * TOKENS + 16, 1: TOKENS}


def test_each_worker_is_expected_to_find_at_a_fork_what_it_found_there() -> None:
    index = PrefixIndex()
    engines = [Engine(index, worker) for worker in (0, 1, 2)]
    for engine, found in zip(engines, (TOKENS + 16, TOKENS + 24, None), strict=True):
        engine.serve(1, "a", "b", "c", found=0)
        if found is not None:
            engine.serve(2, "a", "x", "y", found=found)
    # The third one has met no fork: its texts are the same.
    assert expected(index, "a", "z") == {0: TOKENS + 16, 1: TOKENS + 24, 2: TOKENS + 24}
