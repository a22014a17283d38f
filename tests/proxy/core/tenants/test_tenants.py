"""Tenants and their keys."""

from __future__ import annotations

import hmac
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.tenants.limits import Limits
from proxy.core.tenants.tenants import Rank, Tenants, TenantSpec
from tests.proxy.core.making import tenant

KEY, OTHER = b"sk-vs-aaaaaaaaaaaaaaaa", b"sk-vs-bbbbbbbbbbbbbbbb"


def hashed(key: bytes) -> bytes:
    return sha256(key).digest()


ALTERED = (b"", KEY[:-1], KEY + b"x", hashed(KEY), hashed(KEY).hex().encode())


def two_tenants() -> Tenants:
    tenants = Tenants()
    specs = [TenantSpec("a", limits=Limits(concurrency=2)), TenantSpec("b", Rank.BATCH)]
    tenants.replace(specs, {hashed(KEY): "a", hashed(OTHER): "b"})
    return tenants


def test_no_tenants_means_no_key_is_required() -> None:
    tenants = Tenants()
    assert tenants.open
    assert tenants.find_by_key(KEY) is None
    tenants = two_tenants()
    assert not tenants.open
    tenants.replace([], {})
    assert (tenants.open, len(tenants)) == (True, 0)


@given(st.binary(max_size=80) | st.sampled_from([KEY, OTHER, *ALTERED]))
def test_only_configured_keys_match(key: bytes) -> None:
    found = two_tenants().find_by_key(key)
    assert (found is not None) == (key in (KEY, OTHER))


@pytest.mark.plain("replaces a part")
def test_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return hmac.compare_digest(one, other)

    monkeypatch.setattr(
        "proxy.core.tenants.tenants.hmac", type("hmac", (), {"compare_digest": compare})
    )
    tenants = two_tenants()
    assert tenants.find_by_key(KEY) is not None
    assert tenants.find_by_key(b"nobody's") is None
    assert [found for found, _ in compared] == [hashed(KEY), b""]
    assert KEY not in [key_hash for pair in compared for key_hash in pair], "hashes, not keys"


@pytest.mark.plain("looks inside")
def test_plain_keys_are_not_kept() -> None:
    tenants = two_tenants()
    assert KEY not in str(vars(tenants)).encode()


def test_replace_keeps_usage_of_kept_tenants() -> None:
    tenants = two_tenants()
    a, edition = tenants.get("a"), tenants.edition
    assert a is not None
    a.ledger.enter(0.0, 5, 1)
    a.virtual = 7.0
    specs = [TenantSpec("a", weight=2.0, limits=Limits(concurrency=1)), TenantSpec("c")]
    tenants.replace(specs, {hashed(OTHER): "a", hashed(b"third"): "c"})
    assert tenants.get("a") is a
    assert (a.virtual, a.ledger.running, a.spec.weight) == (7.0, 1, 2.0)
    assert a.ledger.enter(0.0, 5, 1) is not None, "the new limit holds"
    assert tenants.find_by_key(KEY) is None
    assert tenants.find_by_key(OTHER) is a
    assert tenants.get("b") is None
    assert tenants.edition > edition


def test_salts_differ_between_tenants() -> None:
    a, b, ab = (tenant(name) for name in ("a", "b", "a.b"))
    salts = {a.salt(), b.salt(), ab.salt(), *map(a.salt, ("x", "y", "b", "\ud800")), b.salt("x")}
    assert len(salts) == 8
    assert a.salt("x") == a.salt("x")
    for salt in salts:
        assert salt.isalnum()  # workers refuse some characters
        assert len(salt) == 32
