"""Cached prefix lookups stay valid for a time that grows with the cached tokens."""

from __future__ import annotations

from vllm_sched.policies.prefix_lookups import LOOK_AGAIN_S, PrefixLookups


def test_lookup_stays_valid_while_nothing_changes() -> None:
    found = PrefixLookups()
    assert not found.holds("a", 0.0)
    found.add("a", 0, 0.0)
    assert found.holds("a", 1e9)
    assert not found.holds("b", 0.0)


def test_lookup_of_nothing_cached_expires_with_every_change() -> None:
    found = PrefixLookups()
    found.add("a", 0, 5.0)
    found.changed(5.0)
    assert not found.holds("a", 5.0)
    assert "a" not in found


def test_lookup_of_many_cached_tokens_expires_after_a_delay() -> None:
    found = PrefixLookups()
    found.add("a", 1000, 5.0)
    due = 5.0 + 1000 * LOOK_AGAIN_S
    found.changed(5.0)  # the last change
    assert found.holds("a", due - 1e-9)
    assert not found.holds("a", due)
    # An expired lookup is kept until the next one.
    assert "a" in found
    found.discard("a")
    assert "a" not in found
    assert not found.holds("a", 5.0)


def test_expired_lookups_are_removed() -> None:
    found = PrefixLookups()
    for number in range(100):
        found.add(str(number), number, 0.0)
    found.changed(50 * LOOK_AGAIN_S)
    assert [number for number in range(100) if str(number) in found] == [*range(51, 100)]
    found.changed(1.0)
    assert not any(str(number) in found for number in range(100))
