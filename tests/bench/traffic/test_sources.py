"""Traffic sources by name: mixtures, tenants, prefixes and fixed lengths."""

from __future__ import annotations

import ast
import random
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from vllm_sched.bench.traffic.catalogue import NAMES, find
from vllm_sched.bench.traffic.mixture import among_tenants
from vllm_sched.bench.traffic.prefixes import with_sharing
from vllm_sched.bench.traffic.tables import TABLES
from vllm_sched.bench.traffic.types import Request
from vllm_sched.errors import UsageError


def drawn(workload: str, count: int, seed: int = 0) -> list[Request]:
    return list(islice(find(workload).requests(random.Random(seed)), count))


def test_every_listed_source_is_found() -> None:
    for name in NAMES:
        assert find(name).name == name
        assert len(drawn(name, 5)) == 5


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        ("quake", r"unknown workload 'quake'; use one of: azure-conv, .*long-blocks-short"),
        ("azure-conv:0.9,quake:1", r"unknown workload 'quake'"),
        ("azure-conv:x,azure-code:1", r"the share of azure-conv is 'x'"),
        ("azure-conv:0,azure-code:1", r"share of azure-conv is 0"),
        ("azure-conv:inf,azure-code:1", r"share of azure-conv is inf"),
        ("azure-conv:1,azure-conv:1", r"azure-conv is named twice"),
        ("azure-conv:1,long-blocks-short:1", r"has times of its own"),
        ("azure-conv:0.5,ok.jsonl:0.5", r"ok.jsonl is a trace, which can't be part of a mixture"),
        ("azure-conv:0.5,ok.jsonl", r"ok.jsonl is a trace, which can't be part of a mixture"),
        ("./ok.jsonl,300x60", r"\./ok.jsonl is a trace, which can't be part of a mixture"),
        ("/a/ok.jsonl:0.5,/a/b.jsonl:0.5", r"/a/ok.jsonl is a trace, which can't be"),
        ("ok.jsonl:1", r"ok.jsonl is a trace, .* without a share"),
        ("nowhere/a:0.5,b.jsonl:1,c.jsonl", r"nowhere/a is a trace"),
        (f"ok.jsonl,{'9' * 5000}.jsonl", r"ok.jsonl is a trace"),
        ("nowhere/a:b.jsonl", r"nowhere/a:b.jsonl: No such file"),
        ("0x100", r"0x100: PROMPTxOUTPUT takes two numbers"),
        ("999999999x1", r"999999999x1: PROMPTxOUTPUT takes .* each 1 to 100,000,000"),
        (f"1x{'9' * 5000}", r"unknown workload"),
        ("nowhere/to-be-found.jsonl", r"No such file"),
    ],
)
def test_invalid_workload_is_refused_in_one_line(workload: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        find(workload)
    assert "\n" not in str(caught.value)


def test_mixture_keeps_shares_and_lengths() -> None:
    requests = drawn("azure-conv:9,mooncake-conv:1", 20_000)
    counts = Counter(r.klass for r in requests)
    assert counts["azure-conv"] / 20_000 == pytest.approx(0.9, abs=0.01)
    median = sorted(r.prompt_tokens for r in requests if r.klass == "azure-conv")[9_000]
    assert median == pytest.approx(1020, rel=0.05)
    # Parts share no prefix, and the rate is their mean.
    assert {str(name).split("/")[0] for r in requests for name, _ in r.shared} == {"mooncake-conv"}
    assert find("azure-conv:1,azure-code:1").rate == pytest.approx((5.5 + 2.6) / 2)


def test_long_blocks_short_sends_longs_then_shorts() -> None:
    requests = drawn("long-blocks-short", 20)
    assert [r.klass for r in requests[:10]] == ["long"] * 2 + ["short"] * 8
    assert [r.at for r in requests[:4]] == [0, 0, 0.3, 0.45]
    assert requests[10].at == 6.0
    times = [r.at for r in requests]
    assert times == sorted(times)


def hits(requests: list[Request]) -> float:
    """Return the hit share of an unlimited prefix cache."""
    longest: Counter[int | str] = Counter()
    hit = 0
    for request in requests:
        for name, tokens in request.shared:
            hit += min(tokens, longest[name])
            longest[name] = max(tokens, longest[name])
    return hit / sum(r.prompt_tokens for r in requests)


@pytest.mark.parametrize("seed", range(3))
def test_mooncake_prefix_hits_match_published(seed: int) -> None:
    assert hits(drawn("mooncake-conv", 1000, seed)) == pytest.approx(0.37, abs=0.01)
    assert hits(drawn("azure-conv", 1000, seed)) == 0


@pytest.mark.parametrize("hit", [0.1, 0.5, 0.8])
def test_prefix_hit_share_is_met_with_unchanged_lengths(hit: float) -> None:
    plain = list(islice(TABLES["azure-conv"].requests(random.Random(1)), 2000))
    shared = list(with_sharing(iter(plain), hit, random.Random(2), "x"))
    assert hits(shared) == pytest.approx(hit, abs=0.02)
    assert [r.prompt_tokens for r in shared] == [r.prompt_tokens for r in plain]
    assert all(r.shared_tokens <= r.prompt_tokens for r in shared)


def test_first_tenant_sends_the_most_requests() -> None:
    requests = list(among_tenants(iter(drawn("10x1", 11_000)), 4, random.Random(0)))
    counts = Counter(r.tenant for r in requests)
    assert [name for name, _ in counts.most_common()] == [f"tenant-{i}" for i in (1, 2, 3, 4)]
    assert counts["tenant-1"] / counts["tenant-4"] == pytest.approx(4, rel=0.15)


def test_scaled_request_stays_within_its_limits() -> None:
    request = Request(0, "a", 1000, 3, shared=(("x", 600), ("y", 400)))
    small = request.scaled(0.1)
    assert (small.prompt_tokens, small.output_tokens, small.shared) == (
        100,
        1,
        (("x", 60), ("y", 40)),
    )
    tiny = request.scaled(0.0001)
    assert (tiny.prompt_tokens, tiny.shared) == (1, (("x", 1),))
    largest = request.scaled(1e308)
    assert (largest.prompt_tokens, largest.output_tokens) == (100_000_000, 100_000_000)


@pytest.mark.parametrize(
    ("prompt", "output", "lengths"),
    [(50, 50, (50, 50)), (500, 20, (80, 20)), (20, 500, (20, 50)), (500, 500, (50, 50))],
)
def test_fitted_request_is_cut_to_the_context(
    prompt: int, output: int, lengths: tuple[int, int]
) -> None:
    cut = Request(0, "a", prompt, output, shared=(("x", prompt),)).fit_to(100)
    assert (cut.prompt_tokens, cut.output_tokens) == lengths
    assert cut.shared == (("x", lengths[0]),)


def test_traffic_modules_import_no_network_and_no_clock() -> None:
    for path in Path(find.__code__.co_filename).parent.glob("*.py"):
        names = {
            name.split(".")[0]
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in (getattr(node, "module", None) or node.names[0].name,)
        }
        assert not names & {"aiohttp", "asyncio", "socket", "time", "rich"}
