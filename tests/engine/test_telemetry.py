"""Gauges, counters and the trace of real schedulers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput

from tests.engine.test_metrics import values
from tests.engine.test_trace import ENGINE, REQUESTS, check, slices
from tests.policies.making import Bench, add, add_all, wait
from vllm_sched import PolicyScheduler, SyncPolicyScheduler, metrics_folder
from vllm_sched.cost.online_fit import OnlineFit
from vllm_sched.cost.step_time import StepShape, StepTime
from vllm_sched.engine import metrics, telemetry
from vllm_sched.engine.trace import VARIABLE

LONG = {"long_prompt": {"long_prefill_token_threshold": 80}}
# Long prompts have half of each step, so that shorts and held requests stay where they are.
HALF = {"long_prompt": {**LONG["long_prompt"], "long_prefill_share": 0.5}}
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
    monkeypatch.setattr(telemetry, "_write_on_signal", lambda *_: None)
    return tmp_path / "trace.json"


def read(file: Path) -> list[dict[str, Any]]:
    events = json.loads(file.read_text())["traceEvents"]
    check(events)
    return list(events)


def held(registry: CollectorRegistry) -> float:
    return sum(values(registry, "requests_held").values())


def test_telemetry_is_off_without_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (VARIABLE, metrics_folder.METRICS_VARIABLE):
        monkeypatch.delenv(variable, raising=False)
    bench = Bench(LONG)
    assert bench.scheduler._telemetry is None
    bench.add("r", 100)
    bench.drain()
    bench.scheduler.shutdown()


def test_gauges_count_waiting_running_and_held_requests(registry: CollectorRegistry) -> None:
    bench = Bench(HALF)
    bench.play(add("s", 20, output=100), 1, *(add(f"l{n}", n, output=3) for n in (500, 400, 300)))
    bench.play(wait(1), {"s": 1, "l500": 32})  # the rest is not given to held requests
    short, long = ("long_prompt", "short"), ("long_prompt", "long")
    assert values(registry, "requests_waiting") == {short: 0, long: 2}
    assert values(registry, "requests_running") == {short: 1, long: 1}
    none = {("long_prompt", reason): 0 for reason in ("shorts_first", "kv_of_longs")}
    assert values(registry, "requests_held") == {("long_prompt", "long_limit"): 2} | none
    assert values(registry, "prefill_backlog_tokens") == {("short",): 0, ("long",): 1200 - 32}
    assert values(registry, "prefills_running") == {("short",): 0, ("long",): 1}
    assert values(registry, "step_budget_tokens") == {(): 64}
    assert values(registry, "requests_admitted_total") == {short: 1, long: 1}
    assert values(registry, "oldest_wait_seconds")[long] == 1
    bench.drain()
    for name in ("requests_waiting", "requests_running", "requests_held", "oldest_wait_seconds"):
        assert set(values(registry, name).values()) == {0}, name
    assert set(values(registry, "prefill_backlog_tokens").values()) == {0}
    assert values(registry, "requests_admitted_total") == {short: 1, long: 3}
    assert values(registry, "hold_seconds_count") == {("long_prompt",): 2}
    tokens = values(registry, "step_tokens_total")
    assert tokens == {("prefill",): 1220, ("decode",): 99 + 3 * 2}


def test_request_is_held_by_one_policy(registry: CollectorRegistry) -> None:
    bench = Bench({"rotation": {}, "lanes": {}, **HALF})
    bench.decode("d")
    # The reasons exist from the first step.
    reasons = {
        ("long_prompt", "long_limit"): 0, ("long_prompt", "shorts_first"): 0,
        ("long_prompt", "kv_of_longs"): 0,
        ("lanes", "others_wait"): 0, ("lanes", "others_prefill"): 0, ("lanes", "reserve"): 0,
        ("rotation", "kv_of_prefills"): 0,
    }  # fmt: skip
    assert values(registry, "requests_held") == reasons
    bench.play(add("running", 900), 1, add_all("abc", 900), add_all("xy", 900, lane="batch"), 1)
    assert len(bench.scheduler.waiting) == 5
    by_policy = {("long_prompt", "long_limit"): 3, ("lanes", "others_wait"): 2}
    assert values(registry, "requests_held") == reasons | by_policy


def test_metrics_are_written_when_the_engine_becomes_idle(
    registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next request may arrive hours later."""
    monkeypatch.setattr(metrics, "WRITE_EVERY_S", 1e9)
    bench = Bench(LONG)
    for number in (1, 2, 3):
        bench.play(add(str(number), 10, output=5), 2)
        assert sum(values(registry, "steps_total").values()) == max(5 * (number - 1), 1)  # not due
        bench.drain()
        admitted = values(registry, "requests_admitted_total")
        assert admitted == {("long_prompt", "short"): number}
        assert values(registry, "requests_running")["long_prompt", "short"] == 0
        assert values(registry, "step_seconds_count")["decode",] == 4 * number


def test_hold_time_excludes_the_wait_for_a_slot(registry: CollectorRegistry) -> None:
    bench = Bench({"deferred_prefill": {"departures": 2, "max_delay_ms": 1e6}}, max_num_seqs=2)
    begun: dict[str, float] = {}
    for name, output in enumerate((2, 5, 2, 5, 2, 2)):
        bench.add(str(name), 10, output=output)
    while bench.scheduler.has_unfinished_requests():
        now = bench.now - 1000
        begun = dict.fromkeys(bench.step(1.0), now) | begun
    # One slot is free for three seconds before two are, for each pair that waits.
    assert sorted(begun.values()) == [0, 0, 5, 5, 10, 10]
    assert values(registry, "hold_seconds_count") == {("deferred_prefill",): 4}
    assert values(registry, "hold_seconds_sum") == {("deferred_prefill",): 2 * 3 + 2 * 6}


@pytest.mark.parametrize("reason", ["paused", "slots of sessions"])
def test_engine_that_admits_no_request_counts_no_holds(
    registry: CollectorRegistry, reason: str
) -> None:
    bench = Bench(HALF, max_num_seqs=4)
    bench.play(add("s", 20, output=100), 1, add("a", 200, output=1), 1, add("b", 200, output=1), 1)
    assert held(registry) == 1
    if reason == "paused":
        bench.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    else:
        bench.scheduler.num_waiting_for_streaming_input = 2
    for _ in range(20):
        bench.step(5.0)
    assert held(registry) == 0
    bench.scheduler.num_waiting_for_streaming_input = 0
    bench.scheduler.set_pause_state(PauseState.UNPAUSED)
    bench.drain()
    assert values(registry, "hold_seconds_sum")["long_prompt",] < 1


def test_request_after_the_end_of_a_hold_was_not_held(registry: CollectorRegistry) -> None:
    bench = Bench(HALF)
    bench.play(add("s", 20, output=200), 1, add("a", 500), 1, add("held", 500), 1)
    assert held(registry) == 1
    bench.abort("held")
    bench.until(lambda: bench.running == {"s"})
    bench.play(add("b", 500), 1)
    assert bench.running == {"s", "b"}
    assert values(registry, "hold_seconds_count") == {}


def test_no_request_counts_as_held_without_a_free_slot(registry: CollectorRegistry) -> None:
    bench = Bench({"deferred_prefill": {"departures": 2}}, max_num_seqs=2)
    for number, output in enumerate((2, 9, 9, 9, 9)):
        bench.add(str(number), 10, output=output)
    seen = []
    for _ in range(12):
        bench.step()
        seen.append(held(registry))
        assert not (seen[-1] and len(bench.running) == 2)
    assert max(seen) == 3


def test_aborted_request_is_not_the_oldest_wait(registry: CollectorRegistry) -> None:
    bench = Bench(LONG, max_num_seqs=1)
    for name in "abc":
        bench.add(name, 20, output=90)
        bench.step(10.0)
    oldest = []
    for name in "bc":
        oldest.append(values(registry, "oldest_wait_seconds")["long_prompt", "short"])
        bench.abort(name)
        bench.step(0.0)
    assert oldest == [10, 10]
    assert values(registry, "oldest_wait_seconds")["long_prompt", "short"] == 0


def test_short_that_was_not_held_is_no_hold(registry: CollectorRegistry) -> None:
    bench = Bench(LONG)
    bench.play(add("long", 500), 1, add("short", 20))
    bench.drain()
    assert values(registry, "hold_seconds_count") == {}
    admitted = {("long_prompt", "long"): 1, ("long_prompt", "short"): 1}
    assert values(registry, "requests_admitted_total") == admitted


def test_abort_of_the_last_request_is_written(registry: CollectorRegistry) -> None:
    bench = Bench(LONG)
    bench.play(add("r", 500), 1, lambda bench: bench.abort("r"), 1)
    assert values(registry, "requests_running")["long_prompt", "long"] == 0
    assert values(registry, "prefill_backlog_tokens")["long",] == 0
    assert values(registry, "steps_total")["empty",] == 1
    assert values(registry, "step_tokens_total") == {("prefill",): 64, ("decode",): 0}


def test_scheduler_without_policies_has_metrics(registry: CollectorRegistry) -> None:
    bench = Bench(None, max_num_seqs=1)
    bench.play(add("a", 100, output=2), add("b", 50, output=2), 1)
    assert values(registry, "requests_waiting") == {("none", "all"): 1}
    assert values(registry, "requests_running") == {("none", "all"): 1}
    assert values(registry, "prefill_backlog_tokens") == {("all",): 36 + 50}
    bench.drain()
    assert values(registry, "step_tokens_total") == {("prefill",): 150, ("decode",): 2}
    bench.step()
    assert values(registry, "steps_total")["empty",] == 1


@pytest.mark.usefixtures("registry")
def test_fit_that_can_predict_learns_from_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    learned: list[StepShape] = []
    monkeypatch.setattr(OnlineFit, "model", StepTime(decode_fixed_s=0.01))
    monkeypatch.setattr(OnlineFit, "observe", lambda _, shape, __: learned.append(shape))
    bench = Bench(LONG)
    bench.add("r", 10, output=3 * telemetry.FIT_EVERY)
    bench.drain()
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
        {"chunk_budget": {"chunk": 40}},
        {"deferred_prefill": {"departures": 2}, "chunk_budget": {}},
    ],
    ids=str,
)
def test_predictions_are_exported_with_their_coefficients(
    registry: CollectorRegistry,
    monkeypatch: pytest.MonkeyPatch,
    policies: Mapping[str, Mapping[str, object]],
) -> None:
    monkeypatch.setattr(telemetry, "FIT_EVERY", 1)
    monkeypatch.setattr(telemetry, "PREDICT_EVERY", 1)
    bench = Bench(policies)
    bench.add_all({str(tokens): tokens for tokens in range(30, 70)}, output=20)
    bench.drain()
    predicted = values(registry, "steps_predicted_total")
    assert predicted
    assert sum(predicted.values()) < sum(values(registry, "steps_total").values())
    coefficients = values(registry, "step_time_coefficient_seconds")
    assert ("decode_fixed",) in coefficients
    assert ("prefill",) in coefficients


RIGHT = StepTime(
    decode_fixed_s=9e-3, decode_s=1e-4, context_s=1e-6, prefill_fixed_s=5e-3, prefill_s=5e-5,
    pair_s=1e-8, mixed_s=1e-3,
)  # fmt: skip


class TimedBench(Bench):
    """A bench whose steps take the modelled times, until their results."""

    def __init__(self, policies: Mapping[str, Mapping[str, object]], *, ahead: bool) -> None:
        super().__init__(policies, ahead=ahead)
        self.between = 0.0 if ahead else BETWEEN
        self.seconds: list[float] = []  # of all steps; zero without tokens

    def scheduled(self, output: SchedulerOutput, _: float) -> float:
        seconds = 0.0
        if output.total_num_scheduled_tokens:
            shape = self.scheduler._in_flight._steps[-1].shape
            # In a synchronous engine, decodes also wait between two steps.
            seconds = RIGHT.seconds(shape) - bool(shape.decodes) * self.between
        self.seconds.append(seconds)
        return 0.0

    def finish(self) -> None:
        self.now += self.seconds[-len(self.in_flight)]
        super().finish()
        self.now += self.between


@pytest.mark.parametrize(
    ("ahead", "policies"), [(True, LONG), (False, {"chunk_budget": {}})], ids=["async", "sync"]
)
def test_correct_model_has_no_prediction_error(
    registry: CollectorRegistry,
    monkeypatch: pytest.MonkeyPatch,
    ahead: bool,
    policies: Mapping[str, Mapping[str, object]],
) -> None:
    """For either scheduler, any fit, and any pause between steps."""
    monkeypatch.setattr(OnlineFit, "model", RIGHT)
    monkeypatch.setattr(telemetry, "PREDICT_EVERY", 1)
    bench = TimedBench(policies, ahead=ahead)
    for tokens in (300, 40, 90, 200, 7):
        bench.play(add(str(tokens), tokens, output=6), 3)
    bench.drain()
    predicted, took, off, count = (
        values(registry, f"{name}_total")
        for name in (
            "step_predicted_seconds", "step_observed_seconds", "step_error_seconds",
            "steps_predicted",
        )
    )  # fmt: skip
    assert set(count) == {("prefill",), ("mixed",), ("decode",)}
    assert sum(count.values()) == sum(map(bool, bench.seconds)) > 15
    assert predicted == pytest.approx(took)
    assert off == pytest.approx(dict.fromkeys(count, 0.0), abs=1e-9)


@pytest.mark.parametrize(
    ("policies", "kind"),
    [(None, PolicyScheduler), (LONG, PolicyScheduler), (LONG, SyncPolicyScheduler)],
)
def test_trace_has_every_request_and_every_token(
    file: Path, kind: type, policies: Mapping[str, Mapping[str, object]] | None
) -> None:
    bench = Bench(policies, scheduler_cls=kind)
    sizes = [500, 30, 300, 7, 90, 41]
    for size in sizes:
        bench.play(add(str(size), size, output=4), 1)
    bench.drain()
    bench.scheduler.shutdown()
    tracks = slices(read(file), REQUESTS)
    for size in sizes:
        track = tracks[f"{size} ({size:,} tokens)"]
        tokens = {
            name: [e["args"]["tokens"] for e in track if e["name"] == name]
            for name in ("prefill", "decode")
        }
        assert sum(tokens["prefill"]) == size
        assert tokens["decode"] == [1, 1, 1]  # the first comes with the prompt's last chunk
        assert [e["name"] for e in track].count("waiting") == 1
        computed = [e["args"]["computed_before"] for e in track if e["name"] == "prefill"]
        assert computed == [sum(tokens["prefill"][:i]) for i in range(len(computed))]


def test_trace_shows_a_preemption_and_an_abort(file: Path) -> None:
    # Two prompts of 14 blocks in a cache of 31: one is preempted when both have grown.
    bench = Bench(None, budget=512, num_blocks=32)
    requests = bench.add_all({"a": 220, "b": 220, "aborted": 300}, output=60)
    bench.play(1, lambda bench: bench.abort("aborted"))
    bench.drain()
    bench.scheduler.shutdown()
    found = read(file)
    tracks = slices(found, REQUESTS)
    (waiting,) = tracks["aborted (300 tokens)"]
    assert waiting["name"] == "waiting"
    second = slices(found, ENGINE)["steps"][1]
    assert waiting["ts"] + waiting["dur"] <= second["ts"]
    (victim,) = [r.request_id for r in requests if r.num_preemptions]
    names = [e["name"] for e in tracks[f"{victim} (220 tokens)"]]
    assert names[names.index("preempted") + 1] == "prefill"


def test_overlapping_steps_are_drawn_sequentially(file: Path) -> None:
    bench = Bench(LONG, ahead=True)
    bench.add_all({"long": 300, "short": 40}, output=5)
    bench.drain()
    bench.scheduler.shutdown()
    steps = slices(read(file), ENGINE)["steps"]
    assert len(steps) > 5
    assert sum(step["args"]["tokens"] for step in steps) == 340 + 2 * 4


def test_engine_continues_after_a_telemetry_error(
    registry: CollectorRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(LONG)
    bench["long_prompt"].gauges = lambda: {"not a name": 1.0}
    bench.add("r", 100)
    bench.drain()
    assert bench.scheduler._telemetry is None
    assert "please report it" in caplog.text
    assert values(registry, "info")
