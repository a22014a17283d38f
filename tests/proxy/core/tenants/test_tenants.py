"""Tenants and their keys."""

from __future__ import annotations

import hmac
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.tenants.limits import Limits
from proxy.core.tenants.tenants import Rank, Tenants, TenantSpec

KEY, OTHER = b"sk-vs-aaaaaaaaaaaaaaaa", b"sk-vs-bbbbbbbbbbbbbbbb"


def hashed(key: bytes) -> bytes:
    return sha256(key).digest()


def two() -> Tenants:
    """Make two tenants with a key each."""
    tenants = Tenants()
    specs = [TenantSpec("a", limits=Limits(concurrency=2)), TenantSpec("b", Rank.BATCH)]
    tenants.replace(specs, {hashed(KEY): "a", hashed(OTHER): "b"})
    return tenants


def test_without_any_nobody_is_asked_for_a_key() -> None:
    tenants = Tenants()
    assert tenants.open
    assert tenants.of_key(KEY) is None
    assert not two().open


@given(st.binary(max_size=80))
def test_no_other_key_does(key: bytes) -> None:
    found = two().of_key(key)
    assert (found is not None) == (key in (KEY, OTHER))


@pytest.mark.parametrize(
    "key", [b"", KEY[:-1], KEY + b"x", hashed(KEY), hashed(KEY).hex().encode()]
)
def test_nearly_a_key_is_none(key: bytes) -> None:
    assert two().of_key(key) is None


@pytest.mark.plain("replaces a part")
def test_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return hmac.compare_digest(one, other)

    monkeypatch.setattr(
        "proxy.core.tenants.tenants.hmac", type("hmac", (), {"compare_digest": compare})
    )
    tenants = two()
    assert tenants.of_key(KEY) is not None
    assert tenants.of_key(b"nobody's") is None
    assert [found for found, _ in compared] == [hashed(KEY), b""]
    assert KEY not in [each for pair in compared for each in pair], "hashes, not keys"


@pytest.mark.plain("looks inside")
def test_plain_keys_are_not_kept() -> None:
    tenants = two()
    assert KEY not in str(vars(tenants)).encode()


def test_who_stays_keeps_what_was_counted_of_it() -> None:
    tenants = two()
    a, edition = tenants.get("a"), tenants.edition
    assert a is not None
    a.ledger.enter(0.0, 5, 1)
    a.virtual = 7.0
    specs = [TenantSpec("a", weight=2.0, limits=Limits(concurrency=1)), TenantSpec("c")]
    tenants.replace(specs, {hashed(OTHER): "a", hashed(b"third"): "c"})
    assert tenants.get("a") is a
    assert (a.virtual, a.ledger.running, a.spec.weight) == (7.0, 1, 2.0)
    assert a.ledger.enter(0.0, 5, 1) is not None, "the new limit holds"
    assert tenants.of_key(KEY) is None
    assert tenants.of_key(OTHER) is a
    assert tenants.get("b") is None
    assert tenants.edition > edition


def test_the_last_ones_go() -> None:
    tenants = two()
    tenants.replace([], {})
    assert tenants.open
    assert len(tenants) == 0


def test_salts_are_each_tenants_own() -> None:
    a, b = two()
    salts = {a.salt(), b.salt(), a.salt("x"), b.salt("x"), a.salt("y")}
    assert len(salts) == 5
    assert a.salt("x") == a.salt("x")
    for salt in salts:
        assert salt.isalnum()  # workers refuse some signs
        assert len(salt) == 32


def test_a_clients_salt_can_not_name_another_tenant() -> None:
    tenants = Tenants()
    tenants.replace([TenantSpec("a"), TenantSpec("a.b")], {})
    a, ab = tenants
    assert a.salt("b") != ab.salt()
    assert a.salt("\ud800") != a.salt()
    assert a.may_use("anything")
