"""The block `router.shared`."""

from __future__ import annotations

import pytest

from proxy.config import FleetConfig, parse
from proxy.errors import ConfigError


def config(shared: str) -> FleetConfig:
    return parse(
        "model: tiny\nworkers: [{name: a, url: 'http://127.0.0.1:9'}]\n"
        f"router: {{shared: {shared}}}\n",
        "fleet.yaml",
    )


def test_without_the_block_nothing_is_shared() -> None:
    assert config("null").router.shared is None


@pytest.mark.parametrize(
    "url", ["redis://r:6379/0", "rediss://user@r", "unix:///run/redis.sock", "redis://[::1]:7"]
)
def test_urls(url: str) -> None:
    shared = config(f"{{url: '{url}'}}").router.shared
    assert shared is not None
    assert (shared.url, shared.cluster, shared.namespace) == (url, False, "vllm-sched")


@pytest.mark.parametrize(
    ("shared", "message"),
    [
        ("{url: 'http://r:6379'}", "write it as redis://host:6379/0"),
        ("{url: 'redis://'}", "write it as redis://host:6379/0"),
        ("{url: 'unix://'}", "write it as redis://host:6379/0"),
        ("{url: 'redis://r:70000'}", "write it as redis://host:6379/0"),
        ("{url: 'redis://:secret@r:6379'}", "give password_file instead"),
        ("{url: 'redis://r', timeout_s: 0}", "timeout_s"),
        ("{url: 'redis://r', namespace: ''}", "namespace"),
        ("{}", "url"),
    ],
)
def test_errors_say_what_to_write(shared: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(shared)
    assert message in str(caught.value)
    assert "secret" not in str(caught.value)
