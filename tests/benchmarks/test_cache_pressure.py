"""The comparison of what the router knows of the caches."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import islice

import pytest

from benchmarks.cache_pressure import report
from benchmarks.cache_pressure.loads import (
    MAX_PROMPT_TOKENS,
    PREFIX_TOKENS,
    GrowingSessions,
    SharedPrefixes,
)
from benchmarks.cache_pressure.play import LOADS, Cell, Figures, block_tokens, play
from benchmarks.cache_pressure.sides import ESTIMATE, EXACT, LOAD, ORACLE, SIDES, common_tokens
from vllm_sched.bench.traffic.types import Request

SOME = Figures(0.5, 2.0, 1000.0, 0.1, 1.0, 5.0, 0.9, 100.0)


def test_prefixes_have_the_wanted_size() -> None:
    total = 3_000_000
    requests = [*islice(SharedPrefixes(total).requests(random.Random(1)), 3000)]
    lengths = dict(request.shared[0] for request in requests)
    assert 0.9 * total < sum(lengths.values()) < total + PREFIX_TOKENS[1]
    assert all(request.shared_tokens < request.prompt_tokens for request in requests)
    assert requests == [*islice(SharedPrefixes(total).requests(random.Random(1)), 3000)]


def test_a_turn_extends_the_last_one() -> None:
    pause, last, at = 8, dict[int | str, Request](), dict[int | str, int]()
    for number, request in enumerate(
        islice(GrowingSessions(1_000_000, pause).requests(random.Random(1)), 2000)
    ):
        ((name, tokens),) = request.shared
        assert tokens == request.prompt_tokens <= MAX_PROMPT_TOKENS
        if (earlier := last.get(name)) is not None:
            assert tokens > earlier.prompt_tokens + earlier.output_tokens
            assert number - at[name] > pause
        last[name], at[name] = request, number
    assert len(last) < 500


def test_common_tokens_and_blocks() -> None:
    one = Request(0, "", 100, 1, shared=(("a", 50),))
    assert common_tokens(one, replace(one, shared=(("a", 30),))) == 30
    assert common_tokens(one, replace(one, shared=(("b", 50),))) == 0
    assert common_tokens(one, one) == 50
    assert [block_tokens(tokens) for tokens in (0, 5_000, 20_000, 100_000, 10**9)] == [
        32, 512, 1024, 1024, 16_384,
    ]  # fmt: skip


@pytest.mark.parametrize("load", LOADS)
def test_journals_predict_the_cached_tokens(load: str) -> None:
    found = {side: play((Cell(2, 2.0, load), side, 1, 20.0)) for side in SIDES}
    assert not any(figures.failed for figures in found.values())
    assert found[EXACT].within_block > 0.95
    assert found[ORACLE].within_block > 0.95
    assert found[ORACLE].error_tokens < found[ESTIMATE].error_tokens
    assert found[LOAD].hit < found[EXACT].hit


def test_missed_targets_are_named() -> None:
    cell = Cell(4, 2.0)
    found = {side: [SOME] for side in SIDES}
    assert [met for _, met in report.verdicts(cell, found)] == [True, False]
    faster = {**found, EXACT: [replace(SOME, hit=0.4, requests_per_s=2.4, failed=1)]}
    lines = report.verdicts(cell, faster)
    assert [met for _, met in lines] == [False, True, False]
    assert lines[0][0] == "exact has 0.800x the oracle's hits"
    assert lines[2][0] == "1 requests failed"
    assert report.table(cell, found).row_count == len(SIDES)
