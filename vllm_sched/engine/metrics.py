"""The scheduler's metrics on the worker's own /metrics: `vllm_sched_*`.

The engine's and the server's process share prometheus_client's folder PROMETHEUS_MULTIPROC_DIR,
which must be set before both start, as `vllm_sched.engine.server` does.

Cost: 1 or 2 us per step. Changes are written five times a second, and when the engine becomes idle.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import shutil
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, values
from vllm import envs

from vllm_sched import metrics_folder
from vllm_sched.cost.step_time import COEFFICIENTS
from vllm_sched.policies.lanes import LANES

logger = logging.getLogger("vllm.vllm_sched")

PREFIX: Final = "vllm_sched_"
# The labels of vLLM's own metrics.
ENGINE_LABELS: Final = ("model_name", "engine")
WRITE_EVERY_S: Final = 0.2
MAX_LABELS: Final = 32
OTHER: Final = "other"
NO_POLICY: Final = "none"

STEP_BUCKETS: Final = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5,
    0.75, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
HOLD_BUCKETS: Final = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0,
    600.0,
)  # fmt: skip

GAUGES: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "requests_waiting": ("Waiting requests, by lane.", ("policy", "lane")),
    "requests_running": ("Running requests, by the lane they waited in.", ("policy", "lane")),
    "oldest_wait_seconds": ("Wait of the request at the front of a lane.", ("policy", "lane")),
    "requests_held": (
        "Waiting requests whose lane a policy holds, by reason.",
        ("policy", "reason"),
    ),
    "prefill_backlog_tokens": (
        "Prompt tokens still to compute, of waiting and running requests; cached tokens of waiting "
        "requests are included.",
        ("class",),
    ),
    "prefills_running": ("Requests in prefill.", ("class",)),
    "step_budget_tokens": ("Token limit of the last step.", ()),
    "step_time_coefficient_seconds": (
        "Coefficients of the step time model, fitted online.",
        ("coefficient",),
    ),
}
# Written once.
FACTS: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "info": (
        "Version, scheduler class and policies of the engine.",
        ("version", "scheduler", "policies"),
    ),
    "start_time_seconds": ("Start time of the engine, in seconds since the epoch.", ()),
}
COUNTERS: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "steps": ("Steps, by kind.", ("kind",)),
    "step_tokens": ("Computed tokens, by kind.", ("kind",)),
    "steps_predicted": ("Steps with a predicted time.", ("kind",)),
    "step_predicted_seconds": ("Predicted time of the steps with a prediction.", ("kind",)),
    "step_observed_seconds": (
        "Actual time of the steps with a prediction; with decodes, since the result before.",
        ("kind",),
    ),
    "step_error_seconds": ("Sum of the absolute errors of the predictions.", ("kind",)),
    "requests_admitted": ("Admitted requests, by lane.", ("policy", "lane")),
}
# Help text, label, buckets.
HISTOGRAMS: Final[dict[str, tuple[str, str, tuple[float, ...]]]] = {
    "step_seconds": ("Time of steps, by kind.", "kind", STEP_BUCKETS),
    "hold_seconds": (
        "Time for which a policy held the lane of a request while slots were free; observed when "
        "the request is admitted.",
        "policy",
        HOLD_BUCKETS,
    ),
}
# Help texts of policies' own metrics; a policy may have others.
POLICY_METRICS: Final[dict[str, str]] = {
    "starvation_releases": "Requests admitted because they had waited for too long.",
    "batch_members": "Requests in the batch that runs or forms.",
    "batch_forming": "1 while the batch admits requests.",
    "decodes_paused": "1 while decodes are paused for prompts.",
    "paused_steps": "Steps in which decodes were paused for prompts.",
    **{f"running_{lane}": f"Running requests of the class {lane}." for lane in LANES},
    **{f"waiting_{lane}": f"Waiting requests of the class {lane}." for lane in LANES},
    "unknown_lanes": "Requests that asked for an unknown class.",
    "long_prefills": "Long prompts in prefill that count towards the limit on long prompts.",
    "long_chunk_tokens": "Tokens of long prompts in a step while other requests are present.",
    "k": "Departures to wait for before the next admissions.",
    "k_best": "Computed K before its bounds are applied.",
    "holding": "1 while admissions are held.",
    "held_seconds": "Time for which admissions were held.",
    "holds_ended_departures": "Holds that ended because K requests had departed.",
    "holds_ended_room": "Holds that ended because the KV cache had room again.",
    "holds_ended_few": "Holds that ended because few requests were waiting.",
    "holds_ended_idle": "Holds that ended because no request was running.",
    "holds_ended_overdue": "Holds that ended because a request had waited for too long.",
    "mean_output_tokens": "Estimated mean output length.",
    "mean_prompt_tokens": "Estimated mean prompt length.",
    "prompts_in_rotation": "Prompts in the rotation.",
    "turn_tokens": "Tokens per turn.",
    "chunk_budget_tokens": "Prompt tokens that a step may compute besides decodes.",
    "margin": "Factor on predicted step times, so that steps meet the target.",
    "drift": "Recent ratio of actual to predicted step times.",
    "predicted_step_seconds": "Predicted time of the last step with prefill.",
    "long_steps": "Steps with prefill that took longer than the target.",
    "slack_steps": "Steps that used time saved by other steps.",
    **{
        f"fit_{name}": f"Coefficient `{name}` of the step time, fitted online."
        for name in COEFFICIENTS
    },
}
NAME: Final = re.compile(r"[a-z][a-z0-9_]*")


Gauges: TypeAlias = dict[str, dict[tuple[str, ...], float]]  # by name and labels


@dataclass(slots=True)
class EngineState:
    gauges: Gauges = field(default_factory=lambda: defaultdict(dict))
    # By policy and name.
    policy_gauges: Mapping[tuple[str, str], float] = field(default_factory=dict)
    policy_counters: Mapping[tuple[str, str], float] = field(default_factory=dict)


@dataclass(slots=True)
class StepTally:
    steps: int = 0
    buckets: list[int] = field(default_factory=lambda: [0] * (len(STEP_BUCKETS) + 1))
    seconds: float = 0.0
    predicted: int = 0  # steps with a prediction
    predicted_s: float = 0.0
    observed_s: float = 0.0  # of steps with a prediction
    error_s: float = 0.0

    def sums(self) -> dict[str, float]:
        return {
            "steps": self.steps,
            "steps_predicted": self.predicted,
            "step_predicted_seconds": self.predicted_s,
            "step_observed_seconds": self.observed_s,
            "step_error_seconds": self.error_s,
        }


class BatchHistogram(Histogram):
    def add(self, buckets: Sequence[int], seconds: float) -> None:
        for bucket, count in zip(self._buckets, buckets, strict=True):
            if count:
                bucket.inc(count)
        self._sum.inc(seconds)


class BoundedLabels:
    """Limits the values of a label; further values become `other`."""

    def __init__(self, max_labels: int = MAX_LABELS) -> None:
        self._max_labels = max_labels
        self._seen_labels: set[Hashable] = set()

    def limit(self, labels: tuple[str, ...]) -> tuple[str, ...]:
        if labels not in self._seen_labels:
            if len(self._seen_labels) >= self._max_labels:
                return (OTHER,) * len(labels)
            self._seen_labels.add(labels)
        return labels


class Metrics:
    """The metrics of one engine, on the same machine as the server."""

    def __init__(self, model: str, engine: str, registry: CollectorRegistry | None = None) -> None:
        # Several engines may share a process, and only the files are read.
        self._registry = registry or CollectorRegistry()
        self._engine_label_values = (model, engine)
        self._metrics: dict[str, Any] = {}  # by name
        for name, (text, labels) in GAUGES.items():
            self._add_gauge(name, text, labels)
        for name, (text, labels) in COUNTERS.items():
            self._add(Counter, name, text, labels)
        for name, (text, label, buckets) in HISTOGRAMS.items():
            self._add(BatchHistogram, name, text, (label,), buckets=buckets)
        self._label_limits: dict[str, BoundedLabels] = defaultdict(BoundedLabels)
        self._children: dict[tuple[str, tuple[str, ...]], Any] = {}
        self._gauge_values: dict[tuple[str, tuple[str, ...]], float] = {}
        self._tallies: dict[str, StepTally] = defaultdict(StepTally)
        self._prefill_tokens = self._decode_tokens = 0
        self._increments: dict[tuple[str, tuple[str, ...]], float] = defaultdict(float)
        self._policy_totals: dict[tuple[str, str], float] = {}
        self._written_at = float("-inf")
        # A page fails if prometheus_client makes one of its files meanwhile, with the first value
        # of a type. So counters and histograms have values before the server serves, as facts do.
        for kind in ("prefill", "decode"):
            self._child("step_tokens", (kind,))
        for kind in ("prefill", "decode", "mixed"):
            self._child("step_seconds", (kind,))

    def set_fact(self, name: str, value: float, *labels: str) -> None:
        self._add_gauge(name, *FACTS[name])
        self._child(name, labels).set(value)

    def count_step(
        self, kind: str, prefill_tokens: int, decode_tokens: int, seconds: float | None = None
    ) -> None:
        tally = self._tallies[kind]
        tally.steps += 1
        self._prefill_tokens += prefill_tokens
        self._decode_tokens += decode_tokens
        if seconds is not None:
            tally.buckets[bisect_left(STEP_BUCKETS, seconds)] += 1
            tally.seconds += seconds

    def count_prediction(self, kind: str, seconds: float, observed: float) -> None:
        tally = self._tallies[kind]
        tally.predicted += 1
        tally.predicted_s += seconds
        tally.observed_s += observed
        tally.error_s += abs(seconds - observed)

    def count_admission(self, policy: str, lane: str) -> None:
        self._increments["requests_admitted", self._label_limits["lane"].limit((policy, lane))] += 1

    def observe_hold(self, policy: str, seconds: float) -> None:
        self._child("hold_seconds", (policy,)).observe(max(seconds, 0.0))

    def is_due(self, now: float) -> bool:
        return now - self._written_at >= WRITE_EVERY_S

    def write(self, state: EngineState, now: float) -> None:
        """Write changed gauges, and the counts since the last write."""
        self._written_at = now
        gauge_values = dict.fromkeys(self._gauge_values, 0.0)  # absent gauges become 0
        for name, by_labels in state.gauges.items():
            for labels, value in by_labels.items():
                limited = self._label_limits[name].limit(labels)
                others = 0.0 if limited == labels else gauge_values.get((name, limited), 0.0)
                gauge_values[name, limited] = others + value
        for (policy, name), value in state.policy_gauges.items():
            self._add_policy_metric(name, counts=False)
            gauge_values[name, (policy,)] = value
        for key, value in gauge_values.items():
            if self._gauge_values.get(key) != value:
                self._child(*key).set(value)
        self._gauge_values = gauge_values
        for (policy, name), value in state.policy_counters.items():
            self._add_policy_metric(name, counts=True)
            before = self._policy_totals.get((policy, name), 0.0)
            self._increments[name, (policy,)] += max(value - before, 0.0)
            self._policy_totals[policy, name] = value
        self._add_up_steps()
        for key, value in self._increments.items():
            self._child(*key).inc(value)
        self._increments.clear()

    def _add_up_steps(self) -> None:
        for kind, tally in self._tallies.items():
            if any(tally.buckets):
                self._child("step_seconds", (kind,)).add(tally.buckets, tally.seconds)
            for name, value in tally.sums().items():
                if value:
                    self._increments[name, (kind,)] += value
        self._tallies.clear()
        for kind, tokens in (("prefill", self._prefill_tokens), ("decode", self._decode_tokens)):
            if tokens:
                self._increments["step_tokens", (kind,)] += tokens
        self._prefill_tokens = self._decode_tokens = 0

    def _child(self, name: str, labels: tuple[str, ...]) -> Any:
        child = self._children.get((name, labels))
        if child is None:
            child = self._metrics[name].labels(*self._engine_label_values, *labels)
            self._children[name, labels] = child
        return child

    def _add_policy_metric(self, name: str, *, counts: bool) -> None:
        if name in self._metrics:
            return
        if not NAME.fullmatch(name):
            raise ValueError(
                f"{name!r} is not a valid name for a policy's metric: use a-z, 0-9 and _"
            )
        text = POLICY_METRICS.get(name, "A metric of the policy.")
        if counts:
            self._add(Counter, name, text, ("policy",))
        else:
            self._add_gauge(name, text, ("policy",))

    def _add_gauge(self, name: str, text: str, labels: tuple[str, ...]) -> None:
        self._add(Gauge, name, text, labels, multiprocess_mode="livemostrecent")

    def _add(
        self, kind: type[Any], name: str, text: str, labels: tuple[str, ...], **options: Any
    ) -> None:
        names = [*ENGINE_LABELS, *labels]
        self._metrics[name] = kind(PREFIX + name, text, names, registry=self._registry, **options)


def server_shows_metrics() -> bool:
    """Return whether the server will show these metrics; log the reason if not."""
    if envs.VLLM_USE_RUST_FRONTEND:
        logger.warning(
            "vllm_sched_* metrics will be missing from /metrics: vLLM's Rust front end does not "
            "read %s; start without VLLM_USE_RUST_FRONTEND to get them",
            metrics_folder.METRICS_VARIABLE,
        )
        return False
    if os.environ.get(metrics_folder.METRICS_VARIABLE):
        return True
    logger.info(
        "vllm_sched_* metrics are off: start with `vllm-sched serve`, or set %s to an empty "
        "folder before `vllm serve`, to get them on /metrics",
        metrics_folder.METRICS_VARIABLE,
    )
    return False


def open_folder() -> None:
    """Make the folder that connects child processes with /metrics, unless one is set."""
    if os.environ.get(metrics_folder.METRICS_VARIABLE):
        return
    folder = metrics_folder.make_folder()
    os.environ[metrics_folder.METRICS_VARIABLE] = str(folder)
    # prometheus_client chose the class at its import, by vLLM.
    values.ValueClass = values.get_value_class()  # type: ignore[no-untyped-call]
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # not at the end of a forked engine
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
