"""Discovery pools in the fleet file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from proxy.config import FleetConfig, PoolConfig, WorkerConfig, parse, shown
from proxy.errors import ConfigError
from tests.present import present

SELECTOR = {"name": "a", "selector": "a=b"}


def read(*pools: dict[str, Any], **blocks: Any) -> FleetConfig:
    return parse(yaml.safe_dump({"model": "m", "discovery": {"pools": [*pools]}, **blocks}), "f")


def problems(*pools: dict[str, Any], **blocks: Any) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        read(*pools, **blocks)
    return {problem.path: problem.message for problem in caught.value.problems}


def test_a_file_with_pools_needs_no_workers() -> None:
    config = read(SELECTOR)
    assert config.workers == ()
    assert present(config.discovery).kubernetes.watch_s == 30.0


def test_invalid_pool_does_not_report_missing_workers() -> None:
    assert list(problems({"name": "a b", "dns": "x"})) == ["discovery.pools[0].name"]


def test_workers_or_pools_are_required() -> None:
    assert list(problems()) == ["discovery.pools"]
    with pytest.raises(ConfigError, match="workers"):
        parse("model: m\ndiscovery: null\nworkers: []\n", "f")


@pytest.mark.parametrize(
    ("pool", "path", "words"),
    [
        ({"name": "b"}, "discovery.pools[1]", "neither of selector and dns"),
        ({"name": "b", "selector": "x", "dns": "y"}, "discovery.pools[1]", "both of"),
        ({"name": "a", "dns": "y"}, "discovery.pools[1].name", "pools[0] has the same name"),
        ({"name": "b", "dns": "y", "port": "http"}, "discovery.pools[1].port", "give the number"),
        (
            {"name": "b", "dns": "y", "api_key": "k", "api_key_file": "/k"},
            "discovery.pools[1].api_key_file",
            "remove one of them",
        ),
        ({"name": "b", "dsn": "y"}, "discovery.pools[1].dsn", "did you mean dns?"),
        ({"name": "b", "dns": "http://y"}, "discovery.pools[1].dns", "write the name alone"),
        ({"name": "b", "dns": "a..y"}, "discovery.pools[1].dns", "is not a host name"),
        ({"name": "b", "dns": "x" * 64}, "discovery.pools[1].dns", "is not a host name"),
        ({"name": "b", "dns": "y", "role": "fast"}, "discovery.pools[1].role", "'fast'"),
    ],
)
def test_pool_errors_have_path_and_words(pool: dict[str, Any], path: str, words: str) -> None:
    found = problems(SELECTOR, pool)
    assert list(found) == [path]
    assert words in found[path]


@pytest.mark.parametrize("url", ["10.0.0.1:6443", "https://", "https://a/api", "ftp://a"])
def test_invalid_kubernetes_url_is_reported(url: str) -> None:
    given = {"pools": [SELECTOR], "kubernetes": {"url": url}}
    with pytest.raises(ConfigError, match=r"kubernetes\.url.*https://host:port"):
        parse(yaml.safe_dump({"model": "m", "discovery": given}), "f")


def test_short_limit_is_checked_for_pools() -> None:
    short = {"name": "s", "selector": "a=b", "role": "short", "max_model_len": 4096}
    long = {"name": "l", "selector": "a=b", "role": "long"}
    assert list(problems(short, long)) == ["routing.short_limit"]
    assert read(short, long, routing={"short_limit": 4096})


def test_prefill_and_decode_workers_may_be_pools() -> None:
    prefill = {"name": "p", "selector": "a=p", "role": "prefill"}
    decode = {"name": "d", "selector": "a=d", "role": "decode"}
    assert read(prefill, decode, transfer="nixl")
    assert list(problems(prefill, transfer="nixl")) == ["discovery.pools[0].role"]
    assert list(problems(prefill, decode)) == ["discovery.pools[0].role"]
    mixed = [{"name": "d-0", "role": "decode", "url": "http://d"}]
    assert read(prefill, workers=mixed, transfer="nixl")


def test_api_key_of_a_pool_is_hidden() -> None:
    data = shown(read(SELECTOR | {"api_key": "hush"}))
    assert data["discovery"]["pools"][0]["api_key"] == "***"
    assert "hush" not in repr(read(SELECTOR | {"api_key": "hush"}))


def test_pool_has_all_worker_fields_but_address_and_launch() -> None:
    own = {"name", "url", "journal", "launch", "profile"}
    assert set(WorkerConfig.model_fields) - own <= set(PoolConfig.model_fields)
    pool = PoolConfig(name="p", selector="a=b", role="long", max_requests=3, api_key_file=Path("k"))
    worker = pool.worker("w", "http://w", "key")
    assert (worker.name, worker.role, worker.max_requests, worker.api_key) == (
        "w",
        "long",
        3,
        "key",
    )
