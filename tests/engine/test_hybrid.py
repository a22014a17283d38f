"""Models whose KV cache has several groups: Mamba layers, and layers with a sliding window.

Real scheduler objects, without a model, in virtual time.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheSpec

from tests.engine.schedulers import BLOCK as BLOCK_TOKENS
from tests.engine.schedulers import full_attention, make_scheduler, mamba, sliding_window
from tests.policies.making import Bench
from vllm_sched.policies import registry

Policies = Mapping[str, Mapping[str, Any]]
SETTINGS: dict[str, dict[str, Any]] = {
    "static_batching": {"max_wait_s": 2.0},
    "prefill_first": {"max_pause_s": 0.5},
    "lanes": {"urgent_max_wait_s": 1.0, "normal_max_wait_s": 2.0, "batch_max_wait_s": 3.0},
    "long_prompt": {"long_prefill_token_threshold": 200, "max_wait_s": 2.0},
    "deferred_prefill": {"departures": 2, "max_delay_ms": 300.0},
    "rotation": {"chunk": 64, "max_wait_s": 1.0},
    "chunk_budget": {"itl_ms": 15.0},
}
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "long_prompt": [{}, {"long_prefill_share": 0.1}, {"max_long_partial_prefills": 2}],
    "rotation": [{}, {"chunk": 0}, {"chunk": 200}],
    "chunk_budget": [{}, {"chunk": 16}, {"chunk": 150}],
}
COMBINATIONS = [
    names
    for size in (1, 2)
    for names in itertools.combinations(registry.POLICIES, size)
    if not any(pair in registry.CONFLICTS for pair in itertools.combinations(names, 2))
] + [("lanes", "long_prompt", "deferred_prefill", "rotation", "chunk_budget")]
MODES = [(False, 0), (True, 0), (False, 3)]  # asynchronous, drafts
# Each pair of policies in one mode.
PLAYED = [
    (names, *mode)
    for number, names in enumerate(COMBINATIONS)
    for mode in ([MODES[number % 3]] if len(names) == 2 else MODES)
]
BLOCK = 528  # Qwen3-Next's


class Engine(Bench):
    """A bench whose steps take time by their tokens, with records of them."""

    def __init__(
        self,
        policies: Policies,
        groups: Sequence[KVCacheSpec],
        *,
        ahead: bool = False,
        drafts: int = 0,
        step_s: float = 0.010,
        token_s: float = 40e-6,
        **options: Any,
    ) -> None:
        super().__init__(policies, ahead=ahead, groups=groups, **options)
        self.block = groups[0].block_size
        self.scheduler.wall_clock = lambda: self.now
        self.scheduler.num_spec_tokens = self.drafts = drafts
        self.seconds = step_s, token_s
        self.dice = random.Random(1)
        self.count = 0  # steps
        self.empty_steps = 0  # with work to do and nothing in flight
        self.chunks: dict[str, list[int]] = {}  # of prompts
        self.off_boundary: list[str] = []
        self.begun: dict[str, int] = {}  # the step of the first token
        self.largest_gap = 0  # steps that a running prefill went without a chunk
        self._last: dict[str, int] = {}

    def new(self, tokens: int, name: str, **more: Any) -> None:
        self.add(name, tokens, hashed=False, arrival=self.now, **more)

    def run_decodes(self, count: int) -> None:
        for number in range(count):
            self.new(20, f"decode {number}", output=4000)
        running = self.scheduler.running
        while len(running) < count or any(r.is_prefill_chunk for r in running):
            self.step()
        self.chunks.clear()

    def scheduled(self, output: SchedulerOutput, _: float) -> float:
        """Record the step, and return its time by its tokens."""
        self.count += 1
        total = output.total_num_scheduled_tokens
        idle = not (total or self.in_flight)
        self.empty_steps += idle and self.scheduler.has_unfinished_requests()
        self._note(output.num_scheduled_tokens)
        step_s, token_s = self.seconds
        return step_s + token_s * total if total else 0.001

    def finish(self) -> None:
        """Process the oldest step's result, and draft tokens."""
        super().finish()
        for request in self.scheduler.running if self.drafts else ():
            if not request.is_prefill_chunk:
                request.spec_token_ids = [7] * self.dice.randrange(self.drafts + 1)

    def _note(self, tokens: Mapping[str, int]) -> None:
        for request in self.scheduler.running:
            name, computed = request.request_id, request.num_computed_tokens
            is_chunk = computed - tokens.get(name, 0) < request.num_prompt_tokens
            if name in tokens and is_chunk:
                self.chunks.setdefault(name, []).append(tokens[name])
                self._last[name] = self.count
                if computed >= request.num_prompt_tokens:
                    self.begun.setdefault(name, self.count)
                elif computed % self.block:
                    self.off_boundary.append(f"{name} ends at {computed}")
            elif is_chunk:
                gap = self.count - self._last.setdefault(name, self.count)
                self.largest_gap = max(self.largest_gap, gap)

    def steps_until_begun(self, *names: str, max_steps: int = 3000) -> int:
        """Run steps until these requests have their first tokens; return their number."""
        for count in range(max_steps):
            if self.begun.keys() >= {*names}:
                return count
            self.step()
        raise AssertionError(f"no first token of {', '.join({*names} - self.begun.keys())}")


def hybrid(policies: Policies, **options: Any) -> Engine:
    """Return an engine with full attention and Mamba layers, of realistic size."""
    sizes = {"budget": 8192, "max_model_len": 100_000, "max_num_seqs": 512, "num_blocks": 2_000}
    return Engine(policies, (full_attention(BLOCK), mamba(BLOCK)), **(sizes | options))


# Chunks of whole blocks


@pytest.mark.parametrize(
    ("policies", "largest"),
    [
        ({"chunk_budget": {"chunk": 512}}, BLOCK),
        ({"chunk_budget": {"chunk": 1500}}, 2 * BLOCK),
        ({"chunk_budget": {"itl_ms": 45.0}}, BLOCK),
        ({"long_prompt": {"long_prefill_share": 512 / 8192}, "lanes": {}}, BLOCK),
        ({"lanes": {"batch_share": 512 / 8192}}, BLOCK),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else None,
)
def test_chunk_smaller_than_a_block_becomes_one_block(policies: Policies, largest: int) -> None:
    engine = hybrid(policies)
    engine.run_decodes(60)
    engine.new(20_000, "long", priority=1)
    engine.steps_until_begun("long")
    assert not engine.off_boundary
    *chunks, last = engine.chunks["long"]
    assert max(chunks) == largest
    assert last <= largest
    assert len([chunk for chunk in chunks if chunk < largest]) <= 1, "the rest of the first chunks"


def test_prompt_skips_steps_for_chunks_above_its_grants() -> None:
    engine = hybrid({"chunk_budget": {"chunk": 66}})  # an eighth of a block
    engine.run_decodes(60)
    engine.new(20 * BLOCK, "long")
    steps = engine.steps_until_begun("long")
    assert engine.chunks["long"] == [BLOCK] * 20
    assert steps == pytest.approx(8 * 20, abs=8)


@pytest.mark.parametrize("chunk", [64, 256, 512])
def test_short_prompt_enters_while_a_long_one_skips_steps(chunk: int) -> None:
    engine = hybrid({"long_prompt": {}, "chunk_budget": {"chunk": chunk}})
    engine.run_decodes(60)
    engine.new(90_000, "long")
    engine.steps(20)
    engine.new(600, "short")
    steps = engine.steps_until_begun("short", max_steps=100)
    assert "long" not in engine.begun
    # Two prompts share the grants: 600 tokens, and a block in advance.
    assert steps <= 2 * (600 + BLOCK) / chunk + 4


def test_urgent_prompt_enters_beside_a_normal_one() -> None:
    engine = hybrid({"lanes": {}, "chunk_budget": {"chunk": 512}})
    engine.run_decodes(60)
    engine.new(90_000, "normal")
    engine.steps(20)
    engine.new(600, "urgent", priority=-1)
    assert engine.steps_until_begun("urgent", max_steps=10) <= 5


@pytest.mark.parametrize("chunk", [66, 512])
def test_prompt_passes_another_with_a_pending_connector_lookup(chunk: int) -> None:
    engine = hybrid({"chunk_budget": {"chunk": chunk}}, connector="SimulatedConnector")
    engine.run_decodes(60)
    engine.scheduler.connector.get_num_new_matched_tokens = lambda request, _: (
        (None if request.request_id == "pending" else 0, False)
    )
    engine.new(600, "pending")
    engine.step()
    engine.new(3000, "behind")
    steps = engine.steps_until_begun("behind", max_steps=100)
    assert steps <= (3000 + BLOCK) / chunk + 4
    assert "pending" not in engine.begun


def test_prompt_with_budget_below_a_block_is_cut_as_in_upstream() -> None:
    engine = hybrid({"chunk_budget": {"chunk": 64}}, budget=256, max_num_seqs=64)
    engine.run_decodes(20)
    engine.new(3000, "long")
    engine.steps_until_begun("long")
    assert max(engine.chunks["long"]) <= 64


def settings_of(names: Sequence[str], dice: random.Random) -> Policies:
    """Return settings for these policies, each one of its variants."""
    return {name: SETTINGS[name] | dice.choice(VARIANTS.get(name, [{}])) for name in names}


def play(engine: Engine, dice: random.Random, decodes: int) -> None:
    """Serve a few decodes and random prompts to their ends."""
    plan = [(0, 20, 150, 0)] * decodes
    at = 5
    for _ in range(dice.choice([5, 12])):
        at += dice.choice([0, 0, 1, 10])
        tokens = dice.choice([10, 60, 127, 128, 129, 190, 300, 700, 1500, 2500])
        plan.append((at, tokens, dice.choice([1, 8, 40]), dice.choice([-1, 0, 0, 1])))
    for number, (when, tokens, output, priority) in enumerate(plan):
        while engine.count < when:
            engine.step()
        engine.new(tokens, str(number), output=output, priority=priority)
    engine.drain(4000)


@pytest.mark.parametrize(
    ("names", "ahead", "drafts"),
    PLAYED,
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else str(value),
)
def test_prompts_of_hybrid_models_progress_in_whole_blocks(
    names: Sequence[str], ahead: bool, drafts: int
) -> None:
    seed = f"{'+'.join(names)} {ahead} {drafts}"
    dice = random.Random(seed)
    policies = settings_of(names, dice)
    decodes = dice.choice([0, 4, 40])
    options = {
        "budget": dice.choice([300, 512, 1024]),
        "max_num_seqs": decodes + dice.choice([3, 8, 30]),
        "step_s": dice.choice([0.005, 0.02]),
        "token_s": dice.choice([1e-5, 1e-4]),
        "max_model_len": 6000,
        "ahead": ahead,
        "drafts": drafts,
    }
    played = []
    for groups, blocks in (((full_attention(128), mamba(128, drafts)), 300), ((), 2400)):
        engine = Engine(policies, groups or (full_attention(),), num_blocks=blocks, **options)
        play(engine, random.Random(seed), decodes)
        played.append(engine)
    hybrid_engine, plain = played
    assert not hybrid_engine.off_boundary
    # A block of 128 tokens is up to eight of the smallest grants.
    assert hybrid_engine.largest_gap <= plain.largest_gap + 80
    assert hybrid_engine.empty_steps <= plain.empty_steps + 3
    assert hybrid_engine.count <= 1.5 * plain.count + 50
    assert all(step <= 1.5 * plain.begun[name] + 100 for name, step in hybrid_engine.begun.items())


# Blocks of several groups

GROUPS = {
    "one": (full_attention(),),
    "two": (full_attention(), sliding_window(128)),
    "three": (sliding_window(64), full_attention(), sliding_window(128)),
    "mamba": (full_attention(), mamba(16)),
}


def blocks_of(groups: Sequence[KVCacheSpec], tokens: int) -> int:
    """Return the free blocks that vLLM requires to admit a request."""
    scheduler = make_scheduler(None, groups=groups, budget=256)
    wanted: int = scheduler.kv_cache_manager.coordinator.get_num_blocks_to_allocate(
        request_id="new",
        num_tokens=tokens,
        new_computed_blocks=((),) * len(groups),
        num_encoder_tokens=0,
        total_computed_tokens=0,
        num_local_computed_tokens=0,
        num_tokens_main_model=tokens,
        apply_admission_cap=True,
    )
    return wanted


def without_room(policies: Policies, groups: Sequence[KVCacheSpec]) -> Engine:
    """Return an engine in which a request lacks blocks: room is left for 500 tokens."""
    blocks = blocks_of(groups, 500 + 300) + blocks_of(groups, 500)
    engine = Engine(policies, groups, budget=256, num_blocks=blocks)
    engine.new(500, "first", output=300)
    engine.steps(4)
    engine.new(1400, "stuck")
    return engine


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_shorts_pass_a_long_prompt_without_room(groups: Sequence[KVCacheSpec]) -> None:
    engine = without_room({"long_prompt": {}}, groups)
    names = {f"short {number}" for number in range(8)}
    for name in names:
        engine.new(40, name)
    engine.steps(40)
    assert engine.begun.keys() == {"first", *names}


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("beside", [{}, {"deferred_prefill": {"departures": 2}}], ids=str)
def test_decodes_are_not_paused_for_a_prompt_without_room(
    beside: Policies, groups: Sequence[KVCacheSpec]
) -> None:
    engine = without_room({"prefill_first": {}, **beside}, groups)
    assert engine.steps(100).count({}) <= 2


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 100, 129, 200, 500, 900, 1900])
def test_blocks_are_counted_as_in_vllm(groups: Sequence[KVCacheSpec], tokens: int) -> None:
    scheduler = make_scheduler({"long_prompt": {}}, groups=groups, budget=256)
    # Mamba layers hold two states at a block boundary.
    moves = groups is GROUPS["mamba"] and tokens > BLOCK_TOKENS
    assert scheduler._planner._kv_cache.blocks_for(tokens) == blocks_of(groups, tokens) + moves


@pytest.mark.parametrize("names", COMBINATIONS, ids="+".join)
def test_all_requests_finish_without_empty_steps_for_any_groups(names: Sequence[str]) -> None:
    dice = random.Random("+".join(names))
    groups = GROUPS[dice.choice(["two", "three", "mamba"])]
    decodes = dice.choice([0, 4, 20])
    engine = Engine(
        settings_of(names, dice),
        groups,
        budget=dice.choice([256, 512]),
        max_num_seqs=decodes + dice.choice([3, 8]),
        num_blocks=dice.choice([200, 300]) * len(groups),
        max_model_len=4096,
        ahead=dice.random() < 0.5,
    )
    play(engine, dice, decodes)
    assert engine.empty_steps <= 6
