"""Tenants in the fleet file, and access without keys."""

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
    """Parse a fleet with these additional blocks."""
    return parse(yaml.safe_dump({"model": "m", "workers": WORKERS, **blocks}), "fleet.yaml")


def problems_of(**blocks: Any) -> dict[str, str]:
    with pytest.raises(ConfigError) as error:
        read(**blocks)
    return {problem.path: problem.message for problem in error.value.problems}


def tenant(name: str = "t", **fields: Any) -> dict[str, Any]:
    return {"name": name, "key_hashes": [HASH], **fields}


def test_tenant_defaults() -> None:
    config = read(tenants=[tenant()])
    (spec,) = config.tenants
    assert (spec.class_, spec.weight, spec.models, spec.cache_salt) == (
        "standard",
        1.0,
        None,
        False,
    )
    assert set(spec.limits.model_dump().values()) == {None}
    assert config.router.admission.model_dump() == dict.fromkeys(
        config.router.admission.model_dump()
    )


def test_all_tenant_fields_are_read() -> None:
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
    (spec,) = read(tenants=[given]).tenants
    assert (spec.class_, spec.weight, spec.models) == ("batch", 0.5, ("m",))
    assert spec.limits.tokens_per_minute == 9


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "router.example", "127.example"])  # noqa: S104
def test_public_host_needs_tenants_or_allow_anonymous(host: str) -> None:
    problems = problems_of(router={"host": host})
    assert list(problems) == ["router.host"]
    for remedy in ("tenants with keys", "allow_anonymous: true", "host: 127.0.0.1"):
        assert remedy in problems["router.host"]
    read(router={"host": host, "allow_anonymous": True})
    read(router={"host": host}, tenants=[tenant()])


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost", "LocalHost"])
def test_loopback_host_needs_no_keys(host: str) -> None:
    assert is_loopback(host)
    read(router={"host": host})


def test_allow_anonymous_excludes_tenants() -> None:
    problems = problems_of(router={"allow_anonymous": True}, tenants=[tenant()])
    assert list(problems) == ["router.allow_anonymous"]


@pytest.mark.parametrize("field", [{"isolate_caches": True}, {"client_fields": ["priority"]}])
def test_tenant_settings_without_tenants_are_reported(field: dict[str, Any]) -> None:
    (name,) = field
    assert list(problems_of(router=field)) == [f"router.{name}"]
    read(router=field, tenants=[tenant()])


def test_tenant_names_and_keys_are_unique() -> None:
    twice = problems_of(tenants=[tenant("a"), tenant("a", key_hashes=["sha256:" + "cd" * 32])])
    assert list(twice) == ["tenants[1].name"]
    shared = problems_of(tenants=[tenant("a"), tenant("b")])
    assert shared == {
        "tenants[1].key_hashes[0]": "is the same key as tenants[0].key_hashes[0]; remove one of "
        "them"
    }
    assert "vllm-sched key" in problems_of(tenants=[{"name": "a"}])["tenants[0]"]
    assert list(problems_of(tenants=[tenant(models=[])])) == ["tenants[0].models"]


@pytest.mark.parametrize("field", ["key_hashes", "keys_env", "key_hash"])
def test_misplaced_key_is_not_repeated_in_the_error(field: str) -> None:
    value: Any = "sk-secret-secret" if field == "keys_env" else ["sk-secret-secret"]
    problems = problems_of(tenants=[{"name": "a", field: value, "keys_file": "f"}])
    assert problems
    assert "sk-secret" not in str(problems)


def test_misspelt_tenant_fields_are_reported() -> None:
    assert "class" in problems_of(tenants=[tenant(clas="batch")])["tenants[0].clas"]
    assert list(problems_of(tenants=[tenant(**{"class": "urgent"})])) == ["tenants[0].class"]


def test_key_hashes_are_hidden() -> None:
    data = shown(read(tenants=[tenant(**{"class": "batch"})]))
    assert HASH not in str(data)
    assert data["tenants"][0]["class"] == "batch"


def test_age_of_a_class_is_below_its_wait_limit() -> None:
    late = problems_of(tenants=[tenant()], router={"fairness": {"standard_age_s": 30}})
    assert list(late) == ["router.fairness.standard_age_s"]
    late = problems_of(router={"fairness": {"batch_age_s": 600.0}})
    assert list(late) == ["router.fairness.batch_age_s"]


def test_max_collected_bytes_holds_at_least_one_body() -> None:
    assert list(problems_of(router={"max_collected_bytes": 1000})) == ["router.max_collected_bytes"]
