"""Tenants in the fleet file, and access without keys."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.config.admin import is_loopback
from proxy.errors import ConfigError
from tests.proxy.config.fleet_files import check_problem, problems_of, read

HASH = "sha256:" + "ab" * 32


def tenant(name: str = "t", **fields: Any) -> dict[str, Any]:
    return {"name": name, "key_hashes": [HASH], **fields}


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "router.example", "127.example"])  # noqa: S104
def test_public_host_needs_tenants_or_allow_anonymous(host: str) -> None:
    problems = problems_of(router={"host": host})
    assert list(problems) == ["router.host"]
    for remedy in ("tenants with keys", "allow_anonymous: true", "host: 127.0.0.1"):
        assert remedy in problems["router.host"]
    read(router={"host": host, "allow_anonymous": True})
    read(router={"host": host}, tenants=[tenant()])
    read(router={"admin": {"host": host, "key_env": "ADMIN"}})


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost", "LocalHost"])
def test_loopback_host_needs_no_keys(host: str) -> None:
    assert is_loopback(host)
    read(router={"host": host})
    read(router={"admin": {"host": host}})


@pytest.mark.parametrize("field", [{"isolate_caches": True}, {"client_fields": ["priority"]}])
def test_tenant_settings_without_tenants_are_reported(field: dict[str, Any]) -> None:
    (name,) = field
    assert list(problems_of(router=field)) == [f"router.{name}"]
    read(router=field, tenants=[tenant()])


@pytest.mark.parametrize(
    ("tenants", "path", "words"),
    [
        ([tenant("a"), tenant("a", key_hashes=["sha256:" + "cd" * 32])], "tenants[1].name", ""),
        ([tenant("a"), tenant("b")], "tenants[1].key_hashes[0]",
         "is the same key as tenants[0].key_hashes[0]; remove one of them"),
        ([{"name": "a"}], "tenants[0]", "vllm-sched key"),
        ([tenant(models=[])], "tenants[0].models", ""),
        ([tenant(clas="batch")], "tenants[0].clas", "class"),
        ([tenant(**{"class": "urgent"})], "tenants[0].class", ""),
    ],
)  # fmt: skip
def test_invalid_tenants(tenants: list[dict[str, Any]], path: str, words: str) -> None:
    check_problem(problems_of(tenants=tenants), path, words)


def test_errors_name_the_entry_of_a_list() -> None:
    """In a list of many an index helps little; a name may be missing or be the error."""
    with pytest.raises(ConfigError) as error:
        read(
            {"name": "w0", "url": "http://h:1", "max_requests": 0},
            {"name": "w 1", "url": "http://h:2"},
            {"url": "http://h:3"},
            tenants=[tenant("acme", weight=0), tenant("b", models=[])],
            discovery={"pools": [{"name": "short", "dns": "x", "port": 0}]},
        )
    assert {line.split(": ")[1] for line in str(error.value).splitlines()} == {
        "workers[0].max_requests (w0)", "workers[1].name", "workers[2].name",
        "tenants[0].weight (acme)", "tenants[1].models (b)", "tenants[1].key_hashes[0] (b)",
        "discovery.pools[0].port (short)",
    }  # fmt: skip


@pytest.mark.parametrize("field", ["key_hashes", "keys_env", "key_hash"])
def test_misplaced_key_is_not_repeated_in_the_error(field: str) -> None:
    value: Any = "sk-secret-secret" if field == "keys_env" else ["sk-secret-secret"]
    problems = problems_of(tenants=[{"name": "a", field: value, "keys_file": "f"}])
    assert problems
    assert "sk-secret" not in str(problems)


@pytest.mark.parametrize(
    ("router", "path"),
    [
        ({"allow_anonymous": True}, "router.allow_anonymous"),
        ({"fairness": {"standard_age_s": 30}}, "router.fairness.standard_age_s"),
    ],
)
def test_router_settings_that_contradict_tenants(router: dict[str, Any], path: str) -> None:
    assert list(problems_of(router=router, tenants=[tenant()])) == [path]
