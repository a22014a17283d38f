"""The simulated engine: a real scheduler in virtual time."""

from __future__ import annotations

from typing import Any

from vllm_sched.engine.simulated import EngineSettings, NewRequest, SimulatedEngine


def make(**changes: Any) -> SimulatedEngine:
    given = {"max_model_len": 4096, "kv_tokens": 8192, "max_num_batched_tokens": 128, **changes}
    return SimulatedEngine(EngineSettings(async_scheduling=False, max_num_seqs=16, **given))


def test_step_has_the_shape_of_its_work() -> None:
    engine = make()
    engine.add(NewRequest("a", 200, 3), 0.0)
    shapes = []
    for now in range(4):
        step = engine.schedule(float(now))
        assert step is not None
        shapes.append(step.shape)
        events = engine.finish(step, now + 0.5)
    assert [shape.prefill_tokens for shape in shapes] == [128, 72, 0, 0]
    assert [shape.pairs for shape in shapes] == [128 * 64, 72 * (128 + 36), 0, 0]
    assert [shape.decodes for shape in shapes] == [0, 0, 1, 1]
    assert [shape.context_tokens for shape in shapes] == [0, 0, 201, 202]
    assert [(each.id, each.tokens, each.finished) for each in events] == [("a", 1, True)]
    assert engine.schedule(9.0) is None
    assert engine.num_unfinished == 0


def test_policies_see_only_the_virtual_clock() -> None:
    engine = make(policies={"chunk_budget": {}, "lanes": {}})
    seen = []
    (policy, *_) = engine.scheduler._policies
    begin = policy.begin_step
    policy.begin_step = lambda step, counts: (seen.append(step), begin(step, counts))
    engine.add(NewRequest("a", 10, 1), 1234.5)
    step = engine.schedule(1235.0)
    assert step is not None
    assert (seen[0].now, seen[0].clock_offset) == (1235.0, 0.0)
    assert engine.scheduler.running[0].arrival_time == 1234.5


def test_engine_has_a_connector_only_for_transfers() -> None:
    assert make().scheduler.connector is None
    assert make(transfers=True).scheduler.connector is not None


def test_extra_args_reach_the_policies() -> None:
    engine = make(policies={"lanes": {}})
    engine.add(NewRequest("a", 10, 1, extra_args={"lane": "batch"}), 0.0)
    assert engine.scheduler.waiting.lane_counts.by_policy[0]["batch"].requests == 1


def test_backlog_counts_uncomputed_tokens() -> None:
    engine = make()
    engine.add(NewRequest("a", 200, 3), 0.0)
    engine.add(NewRequest("b", 50, 3), 0.0)
    assert engine.backlog() == 250
    step = engine.schedule(0.0)
    assert step is not None
    engine.finish(step, 1.0)
    assert engine.backlog() == 250 - 128
