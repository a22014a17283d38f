"""Tenants in the fleet file, and a router that would serve strangers."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from proxy.config import FleetConfig, parse, shown
from proxy.config.admin import is_loopback
from proxy.errors import ConfigError

HASH = "sha256:" + "ab" * 32
WORKERS = [{"name": "a", "url": "http://127.0.0.1:9001"}]


def read(**blocks: Any) -> FleetConfig:
    """Read a fleet that has these blocks too."""
    return parse(yaml.safe_dump({"model": "m", "workers": WORKERS, **blocks}), "fleet.yaml")


def wrong(**blocks: Any) -> dict[str, str]:
    """Return what is wrong with it, by path."""
    with pytest.raises(ConfigError) as error:
        read(**blocks)
    return {problem.path: problem.message for problem in error.value.problems}


def tenant(name: str = "t", **fields: Any) -> dict[str, Any]:
    """Write a tenant."""
    return {"name": name, "key_hashes": [HASH], **fields}


def test_what_holds_where_nothing_is_said() -> None:
    config = read(tenants=[tenant()])
    (one,) = config.tenants
    assert (one.class_, one.weight, one.models, one.cache_salt) == ("standard", 1.0, None, False)
    assert set(one.limits.model_dump().values()) == {None}
    assert config.router.admission.model_dump() == dict.fromkeys(
        config.router.admission.model_dump()
    )


def test_all_of_it() -> None:
    limits = {"requests_per_minute": 60, "tokens_per_minute": 9, "concurrency": 3}
    given = tenant(
        **{"class": "batch"},
        weight=0.5,
        limits={**limits, "max_prompt_tokens": 100},
        models=["m"],
        cache_salt=True,
        keys_file="keys",
        keys_env="KEYS",
    )
    (one,) = read(tenants=[given]).tenants
    assert (one.class_, one.weight, one.models) == ("batch", 0.5, ("m",))
    assert one.limits.tokens_per_minute == 9


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "router.example", "127.example"])  # noqa: S104
def test_no_strangers_by_accident(host: str) -> None:
    problems = wrong(router={"host": host})
    assert list(problems) == ["router.host"]
    for remedy in ("tenants with keys", "allow_anonymous: true", "host: 127.0.0.1"):
        assert remedy in problems["router.host"]
    read(router={"host": host, "allow_anonymous": True})
    read(router={"host": host}, tenants=[tenant()])


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost", "LocalHost"])
def test_loopback_needs_no_keys(host: str) -> None:
    assert is_loopback(host)
    read(router={"host": host})


def test_all_may_come_or_those_with_keys() -> None:
    problems = wrong(router={"allow_anonymous": True}, tenants=[tenant()])
    assert list(problems) == ["router.allow_anonymous"]


@pytest.mark.parametrize("field", [{"isolate_caches": True}, {"client_fields": ["priority"]}])
def test_what_means_nothing_without_tenants(field: dict[str, Any]) -> None:
    (name,) = field
    assert list(wrong(router=field)) == [f"router.{name}"]
    read(router=field, tenants=[tenant()])


def test_a_tenant_has_a_name_and_keys_of_its_own() -> None:
    twice = wrong(tenants=[tenant("a"), tenant("a", key_hashes=["sha256:" + "cd" * 32])])
    assert list(twice) == ["tenants[1].name"]
    shared = wrong(tenants=[tenant("a"), tenant("b")])
    assert shared == {
        "tenants[1].key_hashes[0]": "is the same key as tenants[0].key_hashes[0]; remove one of "
        "them"
    }
    assert "vllm-sched key" in wrong(tenants=[{"name": "a"}])["tenants[0]"]
    assert list(wrong(tenants=[tenant(models=[])])) == ["tenants[0].models"]


@pytest.mark.parametrize("field", ["key_hashes", "keys_env", "key_hash"])
def test_a_key_in_the_wrong_place_is_not_repeated(field: str) -> None:
    value: Any = "sk-secret-secret" if field == "keys_env" else ["sk-secret-secret"]
    problems = wrong(tenants=[{"name": "a", field: value, "keys_file": "f"}])
    assert problems
    assert "sk-secret" not in str(problems)


def test_a_word_that_is_nearly_right_is_named() -> None:
    assert "class" in wrong(tenants=[tenant(clas="batch")])["tenants[0].clas"]
    assert list(wrong(tenants=[tenant(**{"class": "urgent"})])) == ["tenants[0].class"]


def test_hashes_are_not_shown() -> None:
    data = shown(read(tenants=[tenant(**{"class": "batch"})]))
    assert HASH not in str(data)
    assert data["tenants"][0]["class"] == "batch"


def test_a_class_comes_of_age_before_it_is_refused() -> None:
    late = wrong(tenants=[tenant()], router={"fairness": {"standard_age_s": 30}})
    assert list(late) == ["router.fairness.standard_age_s"]
    late = wrong(router={"fairness": {"batch_age_s": 600.0}})
    assert list(late) == ["router.fairness.batch_age_s"]


def test_one_body_may_be_collected() -> None:
    assert list(wrong(router={"max_collected_bytes": 1000})) == ["router.max_collected_bytes"]
