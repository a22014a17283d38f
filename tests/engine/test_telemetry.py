"""Gauges, counters and the trace of real schedulers."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from vllm.v1.core.sched.interface import PauseState

from tests.engine.schedulers import answer, drain, make_request, make_scheduler, step
from tests.engine.test_metrics import values
from tests.engine.test_trace import ENGINE, REQUESTS, check, slices
from vllm_sched import PolicyScheduler, SyncPolicyScheduler, metrics_folder
from vllm_sched.cost.fit import OnlineFit
from vllm_sched.cost.step_time import StepShape, StepTime
from vllm_sched.engine import metrics, telemetry
from vllm_sched.engine.trace import VARIABLE

LONG = {"long_prompt": {"long_prefill_token_threshold": 80}}
BETWEEN = 0.004  # seconds between two steps of a synchronous engine


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> CollectorRegistry:
    """Make schedulers write metrics to this registry at every step."""
    registry = CollectorRegistry()

    class Here(metrics.Metrics):
        def __init__(self, model: str, engine: str) -> None:
            super().__init__(model, engine, registry)

    monkeypatch.setattr(metrics, "Metrics", Here)
    monkeypatch.setattr(metrics, "server_shows_metrics", lambda: True)
    monkeypatch.setattr(metrics, "WRITE_EVERY_S", 0.0)
    monkeypatch.delenv(VARIABLE, raising=False)
    return registry


@pytest.fixture
def file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Make schedulers trace to this file."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "trace.json"))
    monkeypatch.setattr(telemetry, "_on_signal", lambda *_: None)
    return tmp_path / "trace.json"


def read(file: Path) -> list[dict[str, Any]]:
    events = json.loads(file.read_text())["traceEvents"]
    check(events)
    return list(events)


def test_telemetry_is_off_without_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (VARIABLE, metrics_folder.METRICS_VARIABLE):
        monkeypatch.delenv(variable, raising=False)
    scheduler = make_scheduler(LONG)
    assert scheduler._telemetry is None
    scheduler.add_request(make_request(100))
    drain(scheduler)
    scheduler.shutdown()


def test_gauges_count_waiting_running_and_held_requests(registry: CollectorRegistry) -> None:
    share = {"long_prompt": {**LONG["long_prompt"], "long_prefill_share": 0.5}}
    scheduler = make_scheduler(share)
    scheduler.add_request(make_request(20, output=100))
    step(scheduler)
    for tokens in (500, 400, 300):
        scheduler.add_request(make_request(tokens, output=3))
    assert sum(step(scheduler).values()) == 32 + 1  # the rest is not given to held requests
    short, long = ("long_prompt", "short"), ("long_prompt", "long")
    assert values(registry, "requests_waiting") == {short: 0, long: 2}
    assert values(registry, "requests_running") == {short: 1, long: 1}
    none = {("long_prompt", "shorts_first"): 0}
    assert values(registry, "requests_held") == {("long_prompt", "long_limit"): 2} | none
    assert values(registry, "prefill_backlog_tokens") == {("short",): 0, ("long",): 1200 - 32}
    assert values(registry, "prefills_running") == {("short",): 0, ("long",): 1}
    assert values(registry, "step_budget_tokens") == {(): 64}
    assert values(registry, "requests_admitted_total") == {short: 1, long: 1}
    assert values(registry, "oldest_wait_seconds")[long] > 0
    drain(scheduler)
    for name in ("requests_waiting", "requests_running", "requests_held", "oldest_wait_seconds"):
        assert set(values(registry, name).values()) == {0}, name
    assert set(values(registry, "prefill_backlog_tokens").values()) == {0}
    assert values(registry, "requests_admitted_total") == {short: 1, long: 3}
    assert values(registry, "hold_seconds_count") == {("long_prompt",): 2}
    tokens = values(registry, "step_tokens_total")
    assert tokens == {("prefill",): 1220, ("decode",): 99 + 3 * 2}


def test_request_is_held_by_one_policy(registry: CollectorRegistry) -> None:
    share = {**LONG["long_prompt"], "long_prefill_share": 0.5}
    scheduler = make_scheduler({"lanes": {}, "long_prompt": share})
    scheduler.add_request(make_request(10, output=500))
    step(scheduler)
    scheduler.add_request(make_request(900))
    step(scheduler)
    for _ in range(3):  # held by `long_prompt`
        scheduler.add_request(make_request(900))
    for _ in range(2):  # held by `lanes`
        scheduler.add_request(make_request(900, priority=1))
    step(scheduler)
    assert len(scheduler.waiting) == 5
    held = values(registry, "requests_held")
    assert held == {
        ("long_prompt", "long_limit"): 3, ("long_prompt", "shorts_first"): 0,
        ("lanes", "others_wait"): 2, ("lanes", "others_prefill"): 0, ("lanes", "reserve"): 0,
    }  # fmt: skip


def test_metrics_are_written_when_the_engine_becomes_idle(
    registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next request may arrive hours later."""
    monkeypatch.setattr(metrics, "WRITE_EVERY_S", 1e9)
    scheduler = make_scheduler(LONG)
    for number in (1, 2, 3):
        scheduler.add_request(make_request(10, output=5))
        drain(scheduler)
        admitted = values(registry, "requests_admitted_total")
        assert admitted == {("long_prompt", "short"): number}
        assert values(registry, "step_seconds_count")["decode",] == 4 * number


def test_held_gauges_exist_from_the_first_step(registry: CollectorRegistry) -> None:
    scheduler = make_scheduler({"rotation": {}, "long_prompt": LONG["long_prompt"]})
    scheduler.add_request(make_request(10))
    step(scheduler)
    reasons = {("rotation", "kv_of_prefills")}
    reasons |= {("long_prompt", "long_limit"), ("long_prompt", "shorts_first")}
    assert values(registry, "requests_held") == dict.fromkeys(reasons, 0)
    assert values(registry, "prefills_running") == {("short",): 0}


def test_hold_time_excludes_the_wait_for_a_slot(registry: CollectorRegistry) -> None:
    scheduler = make_scheduler(
        {"deferred_prefill": {"departures": 2, "max_delay_ms": 1e6}}, max_num_seqs=2
    )
    now = [1000.0]
    scheduler.clock = scheduler.waiting._clock = lambda: now[0]
    begun: dict[str, float] = {}
    for name, output in enumerate((2, 5, 2, 5, 2, 2)):
        scheduler.add_request(make_request(10, output=output, name=str(name)))
    while scheduler.has_unfinished_requests():
        for name in step(scheduler):
            begun.setdefault(name, now[0] - 1000)
        now[0] += 1
    # One slot is free for three seconds before two are, for each pair that waits.
    assert list(begun.values()) == [0, 0, 5, 5, 10, 10]
    assert values(registry, "hold_seconds_count") == {("deferred_prefill",): 4}
    assert values(registry, "hold_seconds_sum") == {("deferred_prefill",): 2 * 3 + 2 * 6}


def test_paused_engine_counts_no_holds(registry: CollectorRegistry) -> None:
    scheduler = make_scheduler({"long_prompt": {**LONG["long_prompt"], "long_prefill_share": 0.5}})
    now = [1000.0]
    scheduler.clock = scheduler.waiting._clock = lambda: now[0]
    scheduler.add_request(make_request(20, output=100))
    for _ in range(2):
        scheduler.add_request(make_request(200, output=1))
        step(scheduler)
    assert sum(values(registry, "requests_held").values()) == 1
    scheduler.set_pause_state(PauseState.PAUSED_NEW)
    for _ in range(20):
        step(scheduler)
        now[0] += 5
    assert sum(values(registry, "requests_held").values()) == 0
    scheduler.set_pause_state(PauseState.UNPAUSED)
    drain(scheduler)
    assert values(registry, "hold_seconds_count") == {}


def test_request_after_the_end_of_a_hold_was_not_held(registry: CollectorRegistry) -> None:
    from vllm.v1.request import RequestStatus

    scheduler = make_scheduler({"long_prompt": {**LONG["long_prompt"], "long_prefill_share": 0.5}})
    scheduler.add_request(make_request(20, output=200))
    step(scheduler)
    scheduler.add_request(make_request(500))
    step(scheduler)
    held = make_request(500)
    scheduler.add_request(held)
    step(scheduler)
    assert sum(values(registry, "requests_held").values()) == 1
    scheduler.finish_requests(held.request_id, RequestStatus.FINISHED_ABORTED)
    while len(scheduler.running) > 1:
        step(scheduler)
    scheduler.add_request(make_request(500))
    step(scheduler)
    assert len(scheduler.running) == 2
    assert values(registry, "hold_seconds_count") == {}


def test_no_request_counts_as_held_without_a_free_slot(registry: CollectorRegistry) -> None:
    policies = {"deferred_prefill": {"departures": 2}}
    scheduler = make_scheduler(policies, max_num_seqs=2)
    for output in (2, 9, 9, 9, 9):
        scheduler.add_request(make_request(10, output=output))
    seen = []
    for _ in range(12):
        step(scheduler)
        held = sum(values(registry, "requests_held").values())
        assert not (held and len(scheduler.running) == 2)
        seen.append(held)
    assert max(seen) == 3


def test_no_request_counts_as_held_if_sessions_have_the_slots(registry: CollectorRegistry) -> None:
    share = {"long_prompt": {**LONG["long_prompt"], "long_prefill_share": 0.5}}
    scheduler = make_scheduler(share, max_num_seqs=4)
    scheduler.add_request(make_request(20, output=100))
    step(scheduler)
    for tokens in (500, 400):
        scheduler.add_request(make_request(tokens))
    step(scheduler)
    assert sum(values(registry, "requests_held").values()) == 1
    scheduler.num_waiting_for_streaming_input = 2
    step(scheduler)
    step(scheduler)
    assert sum(values(registry, "requests_held").values()) == 0


def test_aborted_request_is_not_the_oldest_wait(registry: CollectorRegistry) -> None:
    from vllm.v1.request import RequestStatus

    scheduler = make_scheduler(LONG, max_num_seqs=1)
    now = [1000.0]
    scheduler.clock = lambda: now[0]
    scheduler.waiting._clock = scheduler.clock
    requests = [make_request(20, output=90) for _ in range(3)]
    for request in requests:
        scheduler.add_request(request)
        step(scheduler)
        now[0] += 10
    assert values(registry, "oldest_wait_seconds")["long_prompt", "short"] == 10
    scheduler.finish_requests(requests[1].request_id, RequestStatus.FINISHED_ABORTED)
    step(scheduler)
    assert values(registry, "oldest_wait_seconds")["long_prompt", "short"] == 10
    scheduler.finish_requests(requests[2].request_id, RequestStatus.FINISHED_ABORTED)
    step(scheduler)
    assert values(registry, "oldest_wait_seconds")["long_prompt", "short"] == 0


def test_short_that_was_not_held_is_no_hold(registry: CollectorRegistry) -> None:
    scheduler = make_scheduler(LONG)
    scheduler.add_request(make_request(500))
    step(scheduler)
    scheduler.add_request(make_request(20))
    drain(scheduler)
    assert values(registry, "hold_seconds_count") == {}
    assert values(registry, "requests_admitted_total") == {
        ("long_prompt", "long"): 1, ("long_prompt", "short"): 1,
    }  # fmt: skip


def test_last_write_shows_an_idle_engine(
    registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "WRITE_EVERY_S", 1e9)
    scheduler = make_scheduler(LONG)
    scheduler.add_request(make_request(500))
    step(scheduler)
    assert values(registry, "requests_running")["long_prompt", "long"] == 1
    step(scheduler)
    assert sum(values(registry, "steps_total").values()) == 1  # not due
    drain(scheduler)
    assert values(registry, "requests_running")["long_prompt", "long"] == 0
    assert sum(values(registry, "steps_total").values()) > 8


def test_abort_of_the_last_request_is_written(registry: CollectorRegistry) -> None:
    from vllm.v1.request import RequestStatus

    scheduler = make_scheduler(LONG)
    request = make_request(500)
    scheduler.add_request(request)
    step(scheduler)
    scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
    step(scheduler)
    assert values(registry, "requests_running")["long_prompt", "long"] == 0
    assert values(registry, "prefill_backlog_tokens")["long",] == 0
    assert values(registry, "steps_total")["empty",] == 1
    assert values(registry, "step_tokens_total") == {("prefill",): 64}


def test_scheduler_without_policies_has_metrics(registry: CollectorRegistry) -> None:
    scheduler = make_scheduler(None, max_num_seqs=1)
    for tokens in (100, 50):
        scheduler.add_request(make_request(tokens, output=2))
    step(scheduler)
    assert values(registry, "requests_waiting") == {("none", "all"): 1}
    assert values(registry, "requests_running") == {("none", "all"): 1}
    assert values(registry, "prefill_backlog_tokens") == {("all",): 36 + 50}
    drain(scheduler)
    assert values(registry, "step_tokens_total") == {("prefill",): 150, ("decode",): 2}
    step(scheduler)
    assert values(registry, "steps_total")["empty",] == 1


@pytest.mark.usefixtures("registry")
def test_fit_that_can_predict_learns_from_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    learned: list[StepShape] = []
    monkeypatch.setattr(OnlineFit, "model", StepTime(decode_fixed_s=0.01))
    monkeypatch.setattr(OnlineFit, "observe", lambda _, shape, __: learned.append(shape))
    scheduler = make_scheduler(LONG)
    scheduler.add_request(make_request(10, output=3 * telemetry.FIT_EVERY))
    drain(scheduler)
    assert len(learned) == 3


@pytest.mark.parametrize(
    ("served", "name"), [(["alias", "second"], "alias"), ("alias", "alias"), (None, "path")]
)
def test_metrics_have_the_model_name_of_vllms_metrics(served: object, name: str) -> None:
    assert telemetry._model_name(SimpleNamespace(served_model_name=served, model="path")) == name


@pytest.mark.parametrize(
    "policies",
    [
        LONG,
        {"chunk_budget": {}},
        {"chunk_budget": {"chunk": 40}},
        {"deferred_prefill": {"departures": 2}},
        {"deferred_prefill": {"departures": 2}, "chunk_budget": {}},
    ],
    ids=str,
)
def test_predictions_are_exported_with_their_coefficients(
    registry: CollectorRegistry,
    monkeypatch: pytest.MonkeyPatch,
    policies: Mapping[str, Mapping[str, object]],
) -> None:
    times = iter(range(10_000_000))
    monkeypatch.setattr(telemetry, "FIT_EVERY", 1)
    monkeypatch.setattr(telemetry, "PREDICT_EVERY", 1)
    monkeypatch.setattr(PolicyScheduler, "clock", lambda _: next(times) * 1e-3)
    scheduler = make_scheduler(policies)
    for i in range(40):
        scheduler.add_request(make_request(30 + i, output=20))
    drain(scheduler)
    predicted = values(registry, "steps_predicted_total")
    assert predicted
    assert sum(predicted.values()) < sum(values(registry, "steps_total").values())
    coefficients = values(registry, "step_time_coefficient_seconds")
    assert ("decode_fixed",) in coefficients
    assert ("prefill",) in coefficients


@pytest.mark.parametrize("policies", [LONG, {"chunk_budget": {}}], ids=str)
@pytest.mark.parametrize("kind", [PolicyScheduler, SyncPolicyScheduler])
def test_correct_model_has_no_prediction_error(
    registry: CollectorRegistry,
    monkeypatch: pytest.MonkeyPatch,
    kind: type,
    policies: Mapping[str, Mapping[str, object]],
) -> None:
    """For either scheduler, any fit, and any pause between steps."""
    right = StepTime(
        decode_fixed_s=9e-3, decode_s=1e-4, context_s=1e-6, prefill_fixed_s=5e-3, prefill_s=5e-5,
        pair_s=1e-8, mixed_s=1e-3,
    )  # fmt: skip
    monkeypatch.setattr(OnlineFit, "model", right)
    monkeypatch.setattr(telemetry, "PREDICT_EVERY", 1)
    at_once = 2 if kind is PolicyScheduler else 1
    scheduler = make_scheduler(policies, scheduler_cls=kind, async_scheduling=at_once == 2)
    now = [1000.0]
    scheduler.clock = scheduler.waiting._clock = lambda: now[0]
    waiting = [make_request(tokens, output=6) for tokens in (300, 40, 90, 200, 7)]
    under_way: deque[tuple[Any, Any, float]] = deque()
    steps = 0
    while waiting or under_way or scheduler.has_requests():
        if waiting and steps % 3 == 0:
            scheduler.add_request(waiting.pop(0))
        if len(under_way) < at_once and scheduler.has_requests():
            output = scheduler.schedule()
            answered = answer(scheduler, output)
            seconds = 0.0
            if output.total_num_scheduled_tokens:
                steps += 1
                note = scheduler._in_flight._steps[-1]
                chunks = list(note.chunks.values())
                shape = StepShape.from_chunks(chunks, note.decodes, note.context_tokens)
                seconds = right.seconds(shape)
                # In a synchronous engine, decodes also wait between two steps.
                seconds -= BETWEEN if at_once == 1 and shape.decodes else 0.0
            under_way.append((output, answered, seconds))
            if len(under_way) < at_once:
                continue
        output, answered, seconds = under_way.popleft()
        now[0] += seconds
        scheduler.update_from_output(output, answered)
        now[0] += BETWEEN if at_once == 1 else 0.0
    predicted, took, off, count = (
        values(registry, f"{name}_total")
        for name in (
            "step_predicted_seconds", "step_observed_seconds", "step_error_seconds",
            "steps_predicted",
        )
    )  # fmt: skip
    assert set(count) == {("prefill",), ("mixed",), ("decode",)}
    assert sum(count.values()) == steps > 15
    assert predicted == pytest.approx(took)
    assert off == pytest.approx(dict.fromkeys(count, 0.0), abs=1e-9)


@pytest.mark.parametrize("policies", [None, LONG, {"long_prompt": {"max_num_partial_prefills": 1}}])
@pytest.mark.parametrize("kind", [PolicyScheduler, SyncPolicyScheduler])
def test_trace_has_every_request_and_every_token(
    file: Path, kind: type, policies: Mapping[str, Mapping[str, object]] | None
) -> None:
    scheduler = make_scheduler(policies, scheduler_cls=kind)
    sizes = [500, 30, 300, 7, 90, 41]
    requests = [make_request(tokens, output=4) for tokens in sizes]
    for request in requests:
        scheduler.add_request(request)
        step(scheduler)
    drain(scheduler)
    scheduler.shutdown()
    tracks = slices(read(file), REQUESTS)
    for request, size in zip(requests, sizes, strict=True):
        track = tracks[f"{request.request_id} ({size:,} tokens)"]
        tokens = {
            name: [e["args"]["tokens"] for e in track if e["name"] == name]
            for name in ("prefill", "decode")
        }
        assert sum(tokens["prefill"]) == size
        assert tokens["decode"] == [1, 1, 1]  # the first comes with the prompt's last chunk
        assert [e["name"] for e in track].count("waiting") == 1
        computed = [e["args"]["computed_before"] for e in track if e["name"] == "prefill"]
        assert computed == [sum(tokens["prefill"][:i]) for i in range(len(computed))]


def test_trace_shows_a_preemption(file: Path) -> None:
    # Two prompts of 14 blocks in a cache of 31: one is preempted when both have grown.
    scheduler = make_scheduler(None, budget=512, num_blocks=32)
    requests = [make_request(220, output=60) for _ in range(2)]
    for request in requests:
        scheduler.add_request(request)
    drain(scheduler)
    assert sum(request.num_preemptions for request in requests) >= 1
    scheduler.shutdown()
    tracks = slices(read(file), REQUESTS)
    names = [e["name"] for track in tracks.values() for e in track]
    assert "preempted" in names
    (victim,) = [r for r in requests if r.num_preemptions]
    track = tracks[f"{victim.request_id} (220 tokens)"]
    out = [i for i, e in enumerate(track) if e["name"] == "preempted"]
    assert all(track[i + 1]["name"] == "prefill" for i in out)


def test_overlapping_steps_are_drawn_sequentially(file: Path) -> None:
    scheduler = make_scheduler(LONG, async_scheduling=True)
    for tokens in (300, 40):
        scheduler.add_request(make_request(tokens, output=5))
    under_way = []
    for _ in range(100):
        if scheduler.has_requests():
            output = scheduler.schedule()
            under_way.append((output, answer(scheduler, output)))
        if len(under_way) == 2 or not scheduler.has_requests():
            if not under_way:
                break
            scheduler.update_from_output(*under_way.pop(0))
    assert not scheduler.has_unfinished_requests()
    scheduler.shutdown()
    events = read(file)
    assert len(slices(events, ENGINE)["steps"]) > 5
    assert sum(e["args"]["tokens"] for e in slices(events, ENGINE)["steps"]) == 340 + 2 * 4


def test_trace_has_a_request_aborted_while_waiting(file: Path) -> None:
    from vllm.v1.request import RequestStatus

    scheduler = make_scheduler(LONG)
    first, second = make_request(300), make_request(300)
    for request in (first, second):
        scheduler.add_request(request)
    step(scheduler)
    scheduler.finish_requests(second.request_id, RequestStatus.FINISHED_ABORTED)
    step(scheduler)
    scheduler.shutdown()
    track = slices(read(file), REQUESTS)[f"{second.request_id} (300 tokens)"]
    assert [e["name"] for e in track] == ["waiting"]


def test_engine_continues_after_a_telemetry_error(
    registry: CollectorRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = make_scheduler(LONG)
    scheduler._policies[0].gauges = lambda: {"not a name": 1.0}
    scheduler.add_request(make_request(100))
    drain(scheduler)
    assert scheduler._telemetry is None
    assert "please report it" in caplog.text
    assert values(registry, "info")
