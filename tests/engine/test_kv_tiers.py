"""Remaining work with KV tiers, on vLLM's own connectors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.engine.schedulers import make_request
from tests.engine.tiered import HANDS_OVER, KEPT, OFFLOADING, SIMPLE, Tiered, several
from vllm_sched.engine.steps.kv_tiers import KvTiers, lookup_of

LONG_PROMPT = {"long_prompt": {"long_prefill_token_threshold": 100}}
BOTH = several(HANDS_OVER, OFFLOADING)


@pytest.fixture(params=["offloading", "simple", "several"])
def tiered(request: pytest.FixtureRequest) -> Tiered:
    """Return a scheduler with each kind of tier."""
    connectors = {"offloading": OFFLOADING, "simple": SIMPLE, "several": BOTH}
    return Tiered(connectors[request.param], LONG_PROMPT)


def test_prompt_in_the_tier_passes_a_long_one(tiered: Tiered) -> None:
    tiered.turn("fresh", None, 900)
    tiered.step()
    turn = tiered.turn("turn", 0, 20, output=1)
    assert tiered.scheduler._planner.prefixes.cached_tokens(turn) == KEPT
    assert tiered.lane(turn) == "short"
    left = turn.num_tokens - KEPT
    tiered.loads = False
    for step in tiered.steps(3):
        assert step.keys() == {"fresh"}  # prefill goes on during the load
        assert tiered.loading() == ["turn"]
    tiered.loads = True
    tiered.step()
    assert tiered.step()["turn"] == left
    tiered.drain()


def test_question_leaves_the_tier_unchanged(tiered: Tiered) -> None:
    free, pinned = tiered.scheduler.kv_cache_manager.usage, []
    pool: Any = getattr(tiered.scheduler.connector, "scheduler_manager", None)
    if pool is not None:
        pinned = [block.ref_cnt for block in pool.cpu_block_pool.blocks]
    for number in range(3):
        tiered.turn(f"turn {number}", number, 20)
    assert tiered.scheduler.kv_cache_manager.usage == free
    assert pool is None or pinned == [block.ref_cnt for block in pool.cpu_block_pool.blocks]
    tiered.drain()


def test_loaded_long_prompts_enter_one_after_the_other() -> None:
    tiered = Tiered(OFFLOADING, LONG_PROMPT, max_num_seqs=8)
    for number in range(3):
        request = tiered.turn(f"half {number}", number, 200, output=1)
        assert tiered.lane(request).startswith("long/")
    together = 0
    for _ in range(100):
        tiered.step()
        together = max(together, len(tiered.loading()) + len(tiered.scheduler.running))
    assert together == 1
    assert not tiered.scheduler.has_unfinished_requests()
    assert tiered.scheduler._policies[0].counters()["starvation_releases"] == 0


def test_short_prompts_run_while_a_long_one_loads() -> None:
    tiered = Tiered(OFFLOADING, LONG_PROMPT)
    tiered.loads = False
    tiered.turn("half", 0, 200)
    tiered.step()
    tiered.turn("short", None, 20)
    tiered.turn("fresh", None, 300)
    assert tiered.step() == {"short": 20}
    assert tiered.loading() == ["half"]
    # The load counts as the long prompt in prefill until its client leaves.
    tiered.abort("half")
    assert "fresh" in tiered.step()


def test_prompt_that_leaves_the_tier_does_not_enter_as_short() -> None:
    tiered = Tiered(OFFLOADING, LONG_PROMPT, max_num_seqs=2)
    tiered.turn("fresh", None, 900)
    tiered.turn("decode", None, 10, output=200)
    tiered.step()
    turn = tiered.turn("turn", 0, 20)
    assert tiered.lane(turn) == "short"
    tiered.scheduler.connector.reset_cache()
    tiered.abort("decode")
    assert [step.keys() for step in tiered.steps(3)] == [{"fresh"}] * 3
    assert tiered.lane(turn).startswith("long/")


def test_handed_over_prompt_is_not_looked_up() -> None:
    tiered = Tiered(BOTH, LONG_PROMPT)
    remote = make_request(900, name="remote")
    remote.kv_transfer_params = {"do_remote_prefill": True}
    tiered.scheduler.add_request(remote)
    assert tiered.scheduler._planner.prefixes.cached_tokens(remote) == remote.num_tokens
    assert tiered.lane(remote) == "short"
    # With offloading alone no prefill worker sends anything.
    tiered = Tiered(OFFLOADING, LONG_PROMPT)
    tiered.scheduler.add_request(remote)
    assert tiered.lane(remote).startswith("long/")


@pytest.mark.parametrize("first", [True, False])
def test_vllm_loads_from_the_first_connector_with_blocks(first: bool) -> None:
    """So `check` refuses a worker in which offloading comes before the transfer."""
    tiered = Tiered(BOTH if first else several(OFFLOADING, HANDS_OVER), LONG_PROMPT)
    remote = make_request([*tiered.documents[0], *[3] * 300], name="remote")
    remote.kv_transfer_params = {"do_remote_prefill": True}
    tiered.scheduler.add_request(remote)
    tiered.step()
    parts = tiered.scheduler.connector.sub_connectors
    (begun,) = (part.new_fetches for part in parts if hasattr(part, "new_fetches"))
    assert begun == {"remote": remote.num_tokens if first else 0}


def test_tier_is_asked_once_while_a_prompt_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    tiered = Tiered(OFFLOADING, LONG_PROMPT)
    tiered.turn("fresh", None, 1200)
    tiered.step()
    asked: list[str] = []
    connector = tiered.scheduler.connector
    ask = connector.get_num_new_matched_tokens
    monkeypatch.setattr(
        connector,
        "get_num_new_matched_tokens",
        lambda request, computed: asked.append(request.request_id) or ask(request, computed),
    )
    tiered.scheduler._planner.prefixes.tiers = KvTiers(connector)
    tiered.turn("half", 0, 200)
    tiered.steps(10)
    assert asked == ["half"]


def test_newcomer_in_the_tier_reserves_only_its_remaining_tokens() -> None:
    tiered = Tiered(OFFLOADING, {"lanes": {}})
    tiered.turn("fresh", None, 900)
    tiered.step()
    turn = tiered.turn("turn", 0, 20, priority=-1)
    left = turn.num_tokens - KEPT
    assert tiered.step() == {"fresh": 64 - left}


class Counting:
    """A connector whose questions have effects."""

    asked = 0

    def get_num_new_matched_tokens(self, _: Any, computed: int) -> tuple[int | None, bool]:
        self.asked += 1
        return (None if self.asked == 1 else 64 - computed), True


class Repeatable(Counting):
    """A connector that says it may be asked again."""

    repeatable_lookup = True


def test_only_repeatable_lookups_are_made() -> None:
    request: Any = SimpleNamespace(num_preemptions=0, kv_transfer_params=None)
    counting, repeatable = Counting(), Repeatable()
    assert lookup_of(counting) is None
    assert not KvTiers(counting).have_lookups
    tiers = KvTiers(SimpleNamespace(sub_connectors=[counting, repeatable]))
    assert tiers.loadable_tokens(request, 16) == 0  # the connector does not know yet
    assert tiers.loadable_tokens(request, 16) == 48
    request.num_preemptions = 1
    assert tiers.loadable_tokens(request, 16) == 0
    assert (counting.asked, repeatable.asked) == (0, 2)


@pytest.mark.parametrize("claim", [{"do_remote_prefill": True}, "x", [1]])
def test_without_a_connector_nothing_is_asked_or_handed_over(claim: object) -> None:
    request: Any = SimpleNamespace(num_preemptions=0, kv_transfer_params=claim)
    tiers = KvTiers(None)
    assert not tiers.have_lookups
    assert not tiers.is_handed_over(request)
    assert KvTiers(Counting()).is_handed_over(request) == isinstance(claim, dict)
    assert tiers.loadable_tokens(request, 0) == 0
