"""Several policies at once: refused if they conflict, else in the registry's order."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from tests.policies.making import Bench, Event, PinnedChunk, add, add_all, decode, wait
from vllm_sched.errors import UsageError
from vllm_sched.policies import registry
from vllm_sched.policies.types import Policy, Settings, Step

Policies = dict[str, dict[str, object]]
PAUSES: Policies = {"prefill_first": {}}
ROTATION: Policies = {"rotation": {}}
SMALL_CHUNKS: Policies = {"chunk_budget": {"chunk": 24}}
EVERY = ["lanes", "long_prompt", "deferred_prefill", "rotation", "chunk_budget"]


class PausingSettings(Settings):
    max_pause_s: float = 4.0


class Pausing(Policy):
    """A policy of another package that pauses decodes during prefill."""

    name, settings_type = "pausing", PausingSettings
    settings: PausingSettings

    def pauses_decodes(self, step: Step) -> bool:
        """Return True while there is prefill to do, within the bound."""
        wanted = step.prefills or step.next_to_enter() is not None
        return bool(wanted) and step.paused_s < self.settings.max_pause_s


@pytest.fixture
def pausing(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(registry.POLICIES, Pausing.name, Pausing)
    return Pausing.name


def with_chunk(policies: Policies, tokens: int = 64, **engine: Any) -> Bench:
    """Return a bench whose long prompts have chunks of this size."""
    bench = Bench(policies, **{"num_blocks": 1000, **engine})
    bench["long_prompt"].chunk_size = PinnedChunk(tokens)
    return bench


def leave(name: str) -> Event:
    """Return steps until a request has left."""
    return lambda bench: bench.until(lambda: name not in bench.running)


def test_conflicts_are_listed_in_registry_order() -> None:
    assert set(registry.CONFLICTS) <= set(combinations(registry.POLICIES, 2))


@pytest.mark.parametrize("pair", registry.CONFLICTS, ids="+".join)
def test_conflicting_pair_is_refused_in_one_line(pair: tuple[str, str]) -> None:
    with pytest.raises(UsageError) as caught:
        registry.parse_settings(list(pair), [])
    message = str(caught.value)
    assert "\n" not in message
    assert all(name in message for name in pair)
    assert message.endswith("leave one of them out")
    with pytest.raises(UsageError, match="contradict"):
        Bench({name: {} for name in reversed(pair)})


def test_policies_run_in_registry_order() -> None:
    bench = Bench({name: {} for name in reversed(EVERY)})
    assert list(bench.policies) == EVERY


# The tokens of each step


def test_prompts_of_a_lower_lane_have_no_turn() -> None:
    bench = Bench({"lanes": {}, **ROTATION})
    bench.play(add("u", 900, lane="urgent"), 1, add("n", 900), *[{"u": 64}] * 8)
    bench = Bench({"lanes": {}, **ROTATION})
    bench.play(add_all("ABC", 500), 3, add("u", 60, lane="urgent"), {"u": 60, "A": 4})


def test_smallest_chunk_limit_applies() -> None:
    bench = Bench({"rotation": {"chunk": 16}, "chunk_budget": {"chunk": 10}})
    bench.play(decode("d"), add_all("ABC", 200), *[{"d": 1, name: 10} for name in "ABCA"])


def test_first_long_batch_prompt_leaves_room_for_batch_shorts() -> None:
    bench = Bench({"lanes": {}, "long_prompt": {}})
    bench.play(add("l", 1800, lane="batch"), 2, add("s", 12, lane="batch"))
    assert "s" in bench.step()


@pytest.mark.parametrize("others", [{}, {"deferred_prefill": {"departures": 1}}], ids=str)
def test_batch_prompt_has_the_whole_step_while_decodes_pause(others: Policies) -> None:
    bench = Bench({**PAUSES, **others, "lanes": {"reserve_slots": 0}})
    bench.play(decode("d"), add("b", 160, lane="batch"), {"b": 64}, {"b": 64}, {"b": 32})
    bench.play({"d": 1, "b": 1})


def test_urgent_prompt_does_not_wait_for_kv_blocks_of_a_batch_prompt() -> None:
    lanes = {"reserve_kv": 0.0, "reserve_slots": 0.0}
    bench = Bench({"lanes": lanes, **ROTATION}, num_blocks=63)  # 62 blocks of 16: 992 tokens
    bench.play(add("batch", 900, output=4, lane="batch"), 2)
    bench.play(add("urgent", 200, output=4, lane="urgent"), {"urgent": 64})
    bench.drain()


def test_turn_is_not_shared_with_batch_prompts() -> None:
    bench = Bench({"lanes": {}, "rotation": {"chunk": 16}}, budget=256, max_num_seqs=32)
    bench.play(add_all("abcdefghij", 900, output=2, lane="batch"), 3)
    assert len(bench.running) == 10
    bench.play(add("A", 1900), *[{"A": 256}] * 3)


def test_turn_is_not_shared_with_held_prompts() -> None:
    policies = {
        "long_prompt": {"long_prefill_token_threshold": 400}, "rotation": {"chunk": 16},
    }  # fmt: skip
    bench = with_chunk(policies, 128, budget=256, max_num_seqs=32)
    bench.play(decode("d"), add("A", 1900), 1, add_all("0123456789", 1200), 2)
    bench.play(add("s", 20), {"d": 1, "A": 128 - 20, "s": 20})


@pytest.mark.parametrize("settings", [{}, {"chunk": 16}], ids=str)
@pytest.mark.parametrize("beside", [[], ["long_prompt"], ["chunk_budget"]], ids=str)
def test_no_turn_is_kept_for_a_batch_prompt(settings: dict[str, object], beside: list[str]) -> None:
    bench = Bench({"lanes": {}, "rotation": settings, **{name: {} for name in beside}})
    if "long_prompt" in beside:
        bench["long_prompt"].chunk_size = PinnedChunk(64)
    bench.play(decode("d"), add("normal", 1500), 2, add("batch", 600, lane="batch"))
    got = bench.steps(12)
    assert sum(tokens["normal"] for tokens in got) >= 0.8 * 12 * 63
    assert not any("batch" in tokens for tokens in got)


@pytest.mark.parametrize(
    ("policies", "name", "lane", "least"),
    [
        (ROTATION, "A", None, 15 * 63),
        ({"lanes": {"batch_share": 0.5, "reserve_slots": 0}}, "A", "batch", 15 * 32),
        (PAUSES, "d", None, 15),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else None,
)
def test_blocked_request_stops_no_other_request(
    policies: Policies, name: str, lane: str | None, least: int
) -> None:
    bench = Bench(policies)
    bench.play(decode("d"), *[add("A", 1500, lane=lane), 2] * (name == "A"))
    bench.turn_away("lora")
    bench.add("lora", 900)
    assert sum(step.get(name, 0) for step in bench.steps(18)) >= least
    assert "lora" not in bench.running


# Long prompts beside held requests


@pytest.mark.parametrize(
    ("beside", "lane"),
    [
        ({"static_batching": {"size": 2}}, None),
        ({"lanes": {}}, "batch"),
        ({"deferred_prefill": {"departures": 4, "max_delay_ms": 1e6}}, None),
    ],
    ids=["static_batching", "lanes", "deferred_prefill"],
)
def test_long_prompt_leaves_no_room_for_held_shorts(beside: Policies, lane: str | None) -> None:
    alone: dict[str, int] = {}
    defers = "deferred_prefill" in beside
    for held in (0, 6):
        bench = with_chunk({**beside, "long_prompt": {}}, max_num_seqs=6)
        bench.add_all({f"d{number}": 3 for number in range(4 if defers else 1)}, output=900)
        if defers:
            bench.add("leaves", 3, output=9)
        bench.play(add("long", 1800), 3)
        bench.add_all({f"s{number}": 30 for number in range(held)}, lane=lane)
        if defers:
            bench.play(leave("leaves"))
        bench.steps(3)
        got = sum(tokens.get("long", 0) for tokens in bench.steps(8))
        assert not any(name.startswith("s") for name in bench.running)
        assert got >= alone.setdefault("long", got)


@pytest.mark.parametrize(
    ("beside", "slots", "lane"), [({"lanes": {}}, 16, "batch"), ({}, 1, None)], ids=["held", "slot"]
)
def test_longs_that_cannot_enter_have_no_part_of_a_step(
    beside: Policies, slots: int, lane: str | None
) -> None:
    got = []
    for waiting in (0, 3):
        policies = {**beside, "long_prompt": {"max_wait_s": 0.1}}
        bench = Bench(policies, max_num_seqs=slots, num_blocks=1000)
        bench.play(add("long", 1800), 2)
        bench.add_all({f"l{number}": 1500 for number in range(waiting)}, lane=lane)
        bench.steps(4)
        got.append(bench.steps(8))
    assert got[0] == got[1]


@pytest.mark.parametrize("longs", [1, 3])
@pytest.mark.parametrize("tokens", [30, 58, 64, 80])
def test_batch_shorts_leave_a_long_batch_prompt_its_part_of_the_share(
    tokens: int, longs: int
) -> None:
    settings = {"max_long_partial_prefills": longs, "long_prefill_token_threshold": 80}
    policies = {"lanes": {}, "long_prompt": settings}
    bench = Bench(policies, max_num_seqs=20, num_blocks=10_000, budget=512)
    bench.decode("d")
    bench.add_all({f"long{number}": 1800 for number in range(longs)}, lane="batch")
    bench.steps(3)
    bench.add_all({f"s{number}": tokens for number in range(300)}, lane="batch", output=1)
    got = bench.steps(80)
    of_longs = [sum(step.get(f"long{number}", 0) for number in range(longs)) for step in got]
    of_shorts = [sum(step.values()) - long - 1 for step, long in zip(got, of_longs, strict=True)]
    # The share is 64 tokens, for the long prompt and three shorts.
    assert sum(of_longs) >= 0.6 * 80 * 16
    assert all(of_shorts)
    assert sum(of_shorts) >= 0.4 * 80 * 64
    # A prompt with one token left is a decode, outside the share.
    assert {sum(step.values()) for step in got} <= {65, 66}


@pytest.mark.parametrize("beside", [{}, {"lanes": {}}, ROTATION], ids=" ".join)
def test_long_prompt_leaves_no_room_for_shorts_that_cannot_begin(beside: Policies) -> None:
    """The shorts wait for a LoRA slot, possibly for minutes."""
    bench = with_chunk({**beside, "long_prompt": {}})
    bench.play(decode("d"), add("long", 1900), 2)
    for number in range(6):
        bench.turn_away(f"lora{number}")
        bench.add(f"lora{number}", 30)
    bench.play(2, *[{"d": 1, "long": 62}] * 12)
    # A short that can begin again is scheduled at once.
    bench.barred.remove("lora3")
    assert [step["lora3"] for step in bench.steps(2)] == [1, 29]


@pytest.mark.parametrize("tokens", [30, 500])
@pytest.mark.parametrize("beside", [{}, ROTATION, SMALL_CHUNKS], ids=" ".join)
def test_blocked_prompt_begins_in_the_step_that_unblocks_it(beside: Policies, tokens: int) -> None:
    bench = Bench({"long_prompt": {"max_long_partial_prefills": 2}, **beside}, num_blocks=1000)
    bench.play(decode("d"), add("long", 1900), 2)
    bench.turn_away("lora")
    bench.play(add("lora", tokens), 3)
    bench.barred.clear()
    assert set(bench.step()) == {"d", "long", "lora"}


def test_longs_leave_room_for_shorts_within_a_chunk_budget() -> None:
    bench = Bench({"long_prompt": {"max_long_partial_prefills": 2}, **SMALL_CHUNKS})
    bench.play(decode("d"), add_all("AB", 1900), 2, add("short", 30))
    assert "short" in bench.step()


# Holds of `deferred_prefill`


@pytest.mark.parametrize(("lane", "enters"), [("urgent", True), (None, False), ("batch", False)])
def test_urgent_request_does_not_wait_for_departures(lane: str | None, enters: bool) -> None:
    deferred = {"departures": 4, "max_delay_ms": 500.0}
    policies = {"lanes": {"reserve_slots": 0}, "deferred_prefill": deferred}
    bench = Bench(policies, max_num_seqs=8)
    bench.play(add("leaves", 10, output=5), add_all("abcdefg", 10, output=900))
    bench.until(lambda: len(bench.running) == 8)
    bench.play(add_all("nopqrs", 10, lane="batch" if lane == "batch" else None))
    bench.play(leave("leaves"), 2)
    assert bench["deferred_prefill"].holding
    bench.play(add("late", 10, lane=lane, output=5), 1)
    assert ("late" in bench.running) is enters
    # For other requests the hold continues with its old bound.
    assert bench["deferred_prefill"].holding
    since = bench.now
    bench.until(lambda: "n" in bench.running)
    assert 0.3 < bench.now - since <= 0.5


def test_request_without_room_does_not_hold_another_lane() -> None:
    """Most slots are free, and the rest of the cache holds the shorts."""
    policies = {
        "long_prompt": {"long_prefill_token_threshold": 400},
        "deferred_prefill": {"departures": 4},
    }
    bench = Bench(policies, budget=512, num_blocks=126, scheduler_reserve_full_isl=True)
    bench.play(add("d", 600, output=900), 4, add("big", 1500), 1)
    assert "big" not in bench.running
    for number in range(5):
        names = {f"s{number}.{n}" for n in range(4)}
        bench.add_all(dict.fromkeys(names, 20), output=3)
        bench.steps(3)
        assert names <= bench.running | bench.scheduler.finished_req_ids
        bench.steps(4)


# Pauses of decodes


def test_limits_beside_decodes_do_not_apply_while_another_policy_pauses_them(pausing: str) -> None:
    """Nor is a step without the prompt made to measure decodes."""
    for policies in ({"chunk_budget": {"chunk": 10}}, {"long_prompt": {}}):
        bench = Bench({**policies, pausing: {}}, num_blocks=1000)
        if "long_prompt" in policies:
            bench["long_prompt"].chunk_size = PinnedChunk(64)
        bench.play(decode("d"), add("long", 1900))
        assert [bench.step(0.1) for _ in range(28)] == [{"long": 64}] * 28


# Bounds


@pytest.mark.parametrize(
    ("policies", "lengths"),
    [
        ({"static_batching": {"max_wait_s": 5.0}, "long_prompt": {}}, (60, 60, 1100)),
        ({"long_prompt": {"max_wait_s": 5.0}, "rotation": {}}, (1000, 1000, 1100)),
    ],
    ids=["static_batching", "long_prompt"],
)
def test_every_release_is_counted_if_several_heads_are_overdue(
    policies: Policies, lengths: tuple[int, ...]
) -> None:
    bench = Bench(policies, num_blocks=1000)
    # In separate lanes, so that both are heads of a queue.
    runs, first, last = (
        add(name, tokens, output=200) for name, tokens in zip("ABC", lengths, strict=True)
    )
    bench.play(runs, 3, first, last, 1)
    assert bench.running == {"A"}
    bench.play(wait(6), 40)
    assert bench.running == {"A", "B", "C"}
    assert bench[next(iter(policies))].counters()["starvation_releases"] == 2
