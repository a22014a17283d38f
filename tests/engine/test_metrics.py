"""Names, labels and values of `vllm_sched_*`, parsed by prometheus_client."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Histogram, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families as read_text

from tests.engine.schedulers import drain, make_request, make_scheduler
from tests.engine.stubs import STUBS
from vllm_sched.engine import metrics
from vllm_sched.engine.metrics import (
    COUNTERS,
    FACTS,
    GAUGES,
    OTHER,
    STEP_BUCKETS,
    BoundedLabels,
    EngineState,
    Metrics,
)
from vllm_sched.metrics_folder import METRICS_VARIABLE
from vllm_sched.policies.registry import POLICIES

OWN = {"model_name": "m", "engine": "0"}
ORDER = ("policy", "lane", "reason", "kind", "class", "coefficient", "le")


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def recorder(registry: CollectorRegistry) -> Metrics:
    return Metrics("m", "0", registry)


def families(registry: CollectorRegistry) -> dict[str, Metric]:
    page = generate_latest(registry).decode()
    # `_created` samples exist only without multiprocess mode.
    return {f.name: f for f in read_text(page) if not f.name.endswith("_created")}


def values(registry: CollectorRegistry, sample: str) -> dict[tuple[str, ...], float]:
    """Return the values of a metric by its own labels."""
    return {
        tuple(s.labels[label] for label in ORDER if label in s.labels): s.value
        for family in families(registry).values()
        for s in family.samples
        if s.name == f"vllm_sched_{sample}"
    }


def test_metrics_have_their_type_help_and_labels(
    recorder: Metrics, registry: CollectorRegistry
) -> None:
    state = EngineState()
    for name, (_, labels) in GAUGES.items():
        state.gauges[name][tuple("x" * len(labels))] = 1.0
    recorder.count_step("mixed", 3, 2, 0.5)
    recorder.count_prediction("mixed", 0.4, 0.5)
    recorder.count_admission("p", "x")
    recorder.observe_hold("p", 1.0)
    recorder.write(state, 0.0)
    for name, (_, labels) in FACTS.items():
        recorder.set_fact(name, 1.0, *labels)
    found = families(registry)
    assert len(found) == len(GAUGES) + len(FACTS) + len(COUNTERS) + 2
    for kind, catalogue in (("gauge", GAUGES | FACTS), ("counter", COUNTERS)):
        for name, (text, labels) in catalogue.items():
            family = found[f"vllm_sched_{name}"]
            assert (family.type, family.documentation) == (kind, text)
            assert family.samples, f"{name}: give it a value above"
            first = family.samples[0]
            assert set(first.labels) == {*OWN, *labels}, name
            assert first.labels.items() >= OWN.items()
    for name, label in (("step_seconds", "kind"), ("hold_seconds", "policy")):
        assert found[f"vllm_sched_{name}"].type == "histogram"
        assert set(found[f"vllm_sched_{name}"].samples[-1].labels) == {*OWN, label}


def test_steps_tokens_and_predictions_by_kind(
    recorder: Metrics, registry: CollectorRegistry
) -> None:
    recorder.count_step("mixed", 100, 4, 0.2)
    recorder.count_step("mixed", 50, 4, 0.1)
    recorder.count_step("decode", 0, 4, 0.01)  # no prediction
    recorder.count_step("empty", 0, 0)
    recorder.count_prediction("mixed", 0.2, 0.3)
    recorder.count_prediction("mixed", 0.2, 0.1)
    recorder.write(EngineState(), 0.0)
    assert values(registry, "steps_total") == {("mixed",): 2, ("decode",): 1, ("empty",): 1}
    assert values(registry, "step_tokens_total") == {("prefill",): 150, ("decode",): 12}
    assert values(registry, "step_seconds_count") == {
        ("mixed",): 2, ("decode",): 1, ("prefill",): 0,
    }  # fmt: skip
    sums = {"steps_predicted": 2, "step_predicted_seconds": 0.4, "step_observed_seconds": 0.4}
    for name, value in (sums | {"step_error_seconds": 0.2}).items():
        assert values(registry, f"{name}_total") == {("mixed",): pytest.approx(value)}


def test_step_times_have_the_buckets_of_a_histogram(
    recorder: Metrics, registry: CollectorRegistry
) -> None:
    times = (0.0005, 0.001, 0.0011, 0.2, 0.2, 9.9, 10.0, 10.1, 3600.0)
    plain = Histogram("vllm_sched_plain", "x", buckets=STEP_BUCKETS, registry=registry)
    for number, seconds in enumerate(times):
        recorder.count_step("mixed", 1, 1, seconds)
        plain.observe(seconds)
        if number % 4 == 3:
            recorder.write(EngineState(), 0.0)
    recorder.write(EngineState(), 1.0)
    for part in ("bucket", "count", "sum"):
        written = values(registry, f"step_seconds_{part}")
        observed = values(registry, f"plain_{part}")
        mixed = {labels[1:]: n for labels, n in written.items() if labels[0] == "mixed"}
        assert mixed == pytest.approx(observed)


def test_policies_export_their_own_metrics(recorder: Metrics, registry: CollectorRegistry) -> None:
    for gauge, counter in ((3.0, 1.0), (2.0, 1.0), (1.0, 4.0)):
        state = EngineState(
            policy_gauges={("deferred_prefill", "k"): gauge},
            policy_counters={("lanes", "starvation_releases"): counter},
        )
        recorder.write(state, 0.0)
    assert values(registry, "k") == {("deferred_prefill",): 1}
    assert values(registry, "starvation_releases_total") == {("lanes",): 4}
    assert families(registry)["vllm_sched_k"].type == "gauge"
    assert families(registry)["vllm_sched_starvation_releases"].type == "counter"


@pytest.mark.parametrize("name", ["K", "a b", "1st"])
def test_invalid_metric_name_is_refused(recorder: Metrics, name: str) -> None:
    with pytest.raises(ValueError, match="is not a valid name"):
        recorder.write(EngineState(policy_gauges={("p", name): 1.0}), 0.0)


def test_number_of_lane_labels_is_bounded(recorder: Metrics, registry: CollectorRegistry) -> None:
    state = EngineState()
    for i in range(100):
        state.gauges["requests_waiting"]["p", f"tenant {i}"] = 1.0
        recorder.count_admission("p", f"tenant {i}")
    recorder.write(state, 0.0)
    waiting = values(registry, "requests_waiting")
    assert len(waiting) == metrics.MAX_LABELS + 1
    assert sum(waiting.values()) == 100
    assert waiting[OTHER, OTHER] == 100 - metrics.MAX_LABELS
    admitted = values(registry, "requests_admitted_total")
    assert len(admitted) == metrics.MAX_LABELS + 1
    assert sum(admitted.values()) == 100
    # The first labels are kept.
    bounded = BoundedLabels(max_labels=1)
    assert [bounded.limit((name,)) for name in "aba"] == [("a",), (OTHER,), ("a",)]


def test_metrics_of_two_engines_are_written_at_intervals() -> None:
    for engine in ("0", "1"):
        recorder = Metrics("m", engine)
        assert recorder.is_due(0.0)
        recorder.write(EngineState(), 0.0)
        assert not recorder.is_due(metrics.WRITE_EVERY_S / 2)
        assert recorder.is_due(metrics.WRITE_EVERY_S)


def test_missing_metrics_folder_is_logged_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(METRICS_VARIABLE, raising=False)
    with caplog.at_level("INFO", "vllm.vllm_sched"):
        assert not metrics.server_shows_metrics()
    (line,) = caplog.messages
    assert "`vllm-sched serve`" in line
    assert METRICS_VARIABLE in line
    monkeypatch.setenv(METRICS_VARIABLE, "somewhere")
    assert metrics.server_shows_metrics()


def test_rust_front_end_logs_a_warning_about_metrics(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    # Patched in the module, because vLLM caches the environment after an engine is created.
    monkeypatch.setitem(vars(metrics.envs), "VLLM_USE_RUST_FRONTEND", True)
    monkeypatch.setenv(METRICS_VARIABLE, str(tmp_path))
    with caplog.at_level("WARNING", "vllm.vllm_sched"):
        scheduler = make_scheduler({"long_prompt": {}})
    (line,) = [r for r in caplog.records if "metrics" in r.message]
    assert line.levelname == "WARNING"
    assert "vllm_sched_* metrics will be missing from /metrics" in line.message
    assert "VLLM_USE_RUST_FRONTEND" in line.message
    scheduler.add_request(make_request(20))
    drain(scheduler)
    assert not list(tmp_path.iterdir())


SERVER = """
import prometheus_client.multiprocess, os, sys
from vllm_sched.engine import metrics
metrics.open_folder()
folder = os.environ["PROMETHEUS_MULTIPROC_DIR"]
if (child := os.fork()) == 0:
    told = metrics.Metrics("m", sys.argv[1])
    told.count_step("decode", 0, 5, 0.1)
    state = metrics.EngineState()
    state.gauges["step_budget_tokens"][()] = 64.0
    told.write(state, 0.0)
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
registry = prometheus_client.CollectorRegistry()
prometheus_client.multiprocess.MultiProcessCollector(registry)
print(folder)
print(prometheus_client.generate_latest(registry).decode())
"""


def run_script(script: str, *arguments: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", STUBS + script, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **variables},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_server(**variables: str) -> tuple[Path, str]:
    folder, _, page = run_script(SERVER, "3", **variables).partition("\n")
    return Path(folder), page


def test_engine_metrics_are_on_the_servers_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(METRICS_VARIABLE, raising=False)
    folder, page = run_server()
    found = {s.name: s for family in read_text(page) for s in family.samples}
    tokens = found["vllm_sched_step_tokens_total"]
    assert (tokens.labels, tokens.value) == (
        {"model_name": "m", "engine": "3", "kind": "decode"}, 5.0,
    )  # fmt: skip
    assert found["vllm_sched_step_budget_tokens"].value == 64
    assert "pid" not in found["vllm_sched_step_budget_tokens"].labels
    assert not folder.exists()  # removed by its creator, not by the child


def test_all_files_are_there_before_the_server_serves(tmp_path: Path) -> None:
    """A page is an error while prometheus_client makes a file, with the first value of a type."""
    script = """
import os
from vllm_sched.engine import metrics
folder = os.environ["PROMETHEUS_MULTIPROC_DIR"]
told = metrics.Metrics("m", "0")
told.set_fact("start_time_seconds", 1.0)
before = set(os.listdir(folder))
for kind in ("prefill", "decode", "mixed"):
    told.count_step(kind, 1, 1, 0.1)
    told.count_prediction(kind, 0.1, 0.1)
told.count_admission("p", "lane")
told.observe_hold("p", 1.0)
state = metrics.EngineState(policy_counters={("p", "n"): 1.0}, policy_gauges={("p", "g"): 1.0})
told.write(state, 0.0)
assert set(os.listdir(folder)) == before, os.listdir(folder)
print(*sorted(name.split("_")[0] for name in before))
"""
    output = run_script(script, **{METRICS_VARIABLE: str(tmp_path)})
    assert output.split() == ["counter", "gauge", "histogram"]


def test_given_metrics_folder_is_kept(tmp_path: Path) -> None:
    folder, _ = run_server(**{METRICS_VARIABLE: str(tmp_path)})
    assert folder == tmp_path
    assert list(tmp_path.glob("counter_*.db"))


@pytest.mark.parametrize("name", POLICIES)
def test_policy_and_engine_metrics_have_different_names(name: str) -> None:
    from vllm_sched.policies.types import EngineFacts

    policy = POLICIES[name](EngineFacts(2000, 64, 16), POLICIES[name].settings_type())
    names = {*policy.gauges(), *policy.counters()}
    assert not names & {*GAUGES, *COUNTERS, *FACTS, "step_seconds", "hold_seconds"}
    assert not {*policy.gauges()} & {*policy.counters()}
