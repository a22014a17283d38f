"""Discovery pools in the fleet file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from proxy.config import FleetConfig, PoolConfig, WorkerConfig, parse
from tests.present import present
from tests.proxy.config import fleet_files
from tests.proxy.config.fleet_files import check_problem, worker

SELECTOR = {"name": "a", "selector": "a=b"}


def fleet(*pools: dict[str, Any], **blocks: Any) -> str:
    """Return a fleet file with these pools, and without workers if none are given."""
    return yaml.safe_dump({"model": "m", "discovery": {"pools": [*pools]}, **blocks})


def read(*pools: dict[str, Any], **blocks: Any) -> FleetConfig:
    return parse(fleet(*pools, **blocks), "f")


def problems(*pools: dict[str, Any], **blocks: Any) -> dict[str, str]:
    return fleet_files.problems(fleet(*pools, **blocks))


def test_a_file_with_pools_needs_no_workers() -> None:
    config = read(SELECTOR)
    assert config.workers == ()
    assert present(config.discovery).kubernetes.watch_s == 30.0


@pytest.mark.parametrize(
    ("pool", "path", "words"),
    [
        ({"name": "b"}, "", "neither of selector and dns"),
        ({"name": "b", "selector": "x", "dns": "y"}, "", "both of"),
        ({"name": "a", "dns": "y"}, ".name", "pools[0] has the same name"),
        ({"name": "b", "dns": "y", "port": "http"}, ".port", "give the number"),
        ({"name": "b", "dns": "y", "port": 0}, ".port", "0: must be a number from 1 to 65535"),
        ({"name": "b", "selector": "x=y", "port": True}, ".port", "or the name of a port"),
        (
            {"name": "b", "dns": "y", "api_key": "k", "api_key_file": "/k"},
            ".api_key_file",
            "remove one of them",
        ),
        ({"name": "b", "dsn": "y"}, ".dsn", "did you mean dns?"),
        ({"name": "b", "dns": "http://y"}, ".dns", "write the name alone"),
        ({"name": "b", "dns": "a..y"}, ".dns", "is not a host name"),
        ({"name": "b", "dns": "x" * 64}, ".dns", "is not a host name"),
        ({"name": "b", "dns": "y", "role": "fast"}, ".role", "'fast'"),
    ],
)
def test_pool_errors_have_path_and_words(pool: dict[str, Any], path: str, words: str) -> None:
    check_problem(problems(SELECTOR, pool), f"discovery.pools[1]{path}", words)


def test_invalid_or_no_pool_does_not_report_missing_workers() -> None:
    assert list(problems({"name": "a b", "dns": "x"})) == ["discovery.pools[0].name"]
    assert list(problems()) == ["discovery.pools"]


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
    assert read(prefill, workers=[worker(role="decode")], transfer="nixl")


def test_pool_has_all_worker_fields_but_address_and_launch() -> None:
    own = {"name", "url", "journal", "launch", "profile"}
    assert set(WorkerConfig.model_fields) - own <= set(PoolConfig.model_fields)
    pool = PoolConfig(name="p", selector="a=b", role="long", max_requests=3, api_key_file=Path("k"))
    made = pool.worker("w", "http://w", "key")
    assert (made.name, made.role, made.max_requests, made.api_key) == ("w", "long", 3, "key")
