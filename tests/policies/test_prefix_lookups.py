"""What was found of held prompts' prefixes stands for a time that goes by how much there was."""

from __future__ import annotations

from vllm_sched.policies.prefix_lookups import LOOK_AGAIN_S, PrefixLookups


def test_it_stands_while_nothing_changes() -> None:
    found = PrefixLookups()
    assert not found.holds("a", 0.0)
    found.add("a", 0, 0.0)
    assert found.holds("a", 1e9)
    assert not found.holds("b", 0.0)


def test_with_nothing_cached_every_change_counts() -> None:
    found = PrefixLookups()
    found.add("a", 0, 5.0)
    found.changed(5.0)
    assert not found.holds("a", 5.0)
    assert "a" not in found


def test_with_much_cached_a_change_counts_when_it_is_time_to_look_again() -> None:
    found = PrefixLookups()
    found.add("a", 1000, 5.0)
    due = 5.0 + 1000 * LOOK_AGAIN_S
    found.changed(5.0)  # the last there is
    assert found.holds("a", due - 1e-9)
    assert not found.holds("a", due)
    # Until it is looked up it is what it was found to be.
    assert "a" in found
    found.discard("a")
    assert "a" not in found
    assert not found.holds("a", 5.0)


def test_who_is_gone_is_forgotten() -> None:
    found = PrefixLookups()
    for number in range(100):
        found.add(str(number), number, 0.0)
    found.changed(50 * LOOK_AGAIN_S)
    assert [number for number in range(100) if str(number) in found] == [*range(51, 100)]
    found.changed(1.0)
    assert not any(str(number) in found for number in range(100))
