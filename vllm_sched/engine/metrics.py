"""What the engine half tells of itself on the worker's own /metrics: `vllm_sched_*`.

The scheduler lives in the engine's process and /metrics in the server's. What connects them is
prometheus_client's folder of mapped files, PROMETHEUS_MULTIPROC_DIR, which must be set before
either process starts: `vllm_sched.engine.server` does that. Where it is not set nothing is counted,
and one line in the log says how to have it.

Cost: what each step did is kept as it is, which takes a microsecond or two, and counted and written
five times a second and when all are gone, and only what has changed: done in one go, it takes a
fraction of what it would take between the scheduler's own work. Labels are few: lanes and reasons
have the names that policies give them; beyond `MOST_LABELS` of a kind all are `other`.
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
# As vLLM labels its own.
ENGINE_LABELS: Final = ("model_name", "engine")
WRITE_EVERY_S: Final = 0.2
MOST_LABELS: Final = 32
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
    "requests_waiting": ("Requests that wait, by lane.", ("policy", "lane")),
    "requests_running": ("Requests that run, by the lane they came from.", ("policy", "lane")),
    "oldest_wait_seconds": ("How long the one in front of a lane has waited.", ("policy", "lane")),
    "requests_held": (
        "Requests that wait because a policy holds their lane, by why.",
        ("policy", "reason"),
    ),
    "prefill_backlog_tokens": (
        "Tokens of prompts still to compute, waiting and running; cached ones among those "
        "waiting are not subtracted.",
        ("class",),
    ),
    "prefills_running": ("Requests in prefill.", ("class",)),
    "step_budget_tokens": ("Tokens that the last step was allowed.", ()),
    "step_time_coefficient_seconds": (
        "What the engine's steps were found to take, fitted online.",
        ("coefficient",),
    ),
}
# Said once.
FACTS: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "info": ("What runs here.", ("version", "scheduler", "policies")),
    "start_time_seconds": ("When the engine started, since the epoch.", ()),
}
COUNTERS: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "steps": ("Steps, by what they computed.", ("kind",)),
    "step_tokens": ("Tokens computed, by what they were.", ("kind",)),
    "steps_predicted": ("Steps whose time was predicted.", ("kind",)),
    "step_predicted_seconds": ("Time that those steps were predicted to take.", ("kind",)),
    "step_observed_seconds": (
        "Time that those steps took; where somebody decoded, since the result before.",
        ("kind",),
    ),
    "step_error_seconds": (
        "How far those predictions were off, either way, summed up.",
        ("kind",),
    ),
    "requests_admitted": ("Requests that began to run, by lane.", ("policy", "lane")),
}
# With the label that says of what.
HISTOGRAMS: Final[dict[str, tuple[str, str, tuple[float, ...]]]] = {
    "step_seconds": ("How long steps took, by what they computed.", "kind", STEP_BUCKETS),
    "hold_seconds": (
        "For how long a policy held the lane of a request, wherever in it that stood, while "
        "slots were free; of requests that began to run.",
        "policy",
        HOLD_BUCKETS,
    ),
}
# Of policies' own numbers; one without a line here is shown too.
POLICIES_OWN: Final[dict[str, str]] = {
    "starvation_releases": "Requests let through because they had waited for too long.",
    "batch_members": "Requests of the batch that runs, or is being formed.",
    "batch_forming": "Whether the batch still takes requests in.",
    "decodes_paused": "Whether decodes wait for prompts just now.",
    "paused_steps": "Steps in which decodes waited for prompts.",
    **{f"running_{lane}": f"Requests of the class {lane} that run." for lane in LANES},
    **{f"waiting_{lane}": f"Requests of the class {lane} that wait." for lane in LANES},
    "unknown_lanes": "Requests that asked for a class that there is not.",
    "long_prefills": "Long prompts in prefill, as they count against the places for them.",
    "step_limit_seconds": "How long a step one chunk of a long prompt may cause.",
    "k": "Departures to wait for before requests are admitted.",
    "k_best": "The same as reckoned, before it is kept within bounds.",
    "holding": "Whether nobody is admitted just now.",
    "held_seconds": "Time in which nobody was admitted.",
    "holds_ended_departures": "Holds that ended because K had departed, as is meant.",
    "holds_ended_room": "Holds that ended because there was room again.",
    "holds_ended_few": "Holds that ended because few were left that wait.",
    "holds_ended_idle": "Holds that ended because nothing ran any more.",
    "holds_ended_overdue": "Holds that ended because somebody had waited for too long.",
    "mean_output_tokens": "Mean length of answers, learnt.",
    "mean_prompt_tokens": "Mean length of prompts, learnt.",
    "prompts_in_rotation": "Prompts that take turns in prefill.",
    "turn_tokens": "Tokens of a turn.",
    "chunk_budget_tokens": "Tokens of prompts that a step may compute beside decodes, as set last.",
    "margin": "What predictions are multiplied by, so that steps keep to the target.",
    "drift": "By how much steps have been slower of late than was predicted.",
    "predicted_step_seconds": "How long the last step with prefill was predicted to take.",
    "long_steps": "Steps with prefill that took longer than the target.",
    "slack_steps": "Steps that spent what others had saved.",
    **{f"fit_{name}": f"The step time's `{name}`, fitted online." for name in COEFFICIENTS},
}
NAME: Final = re.compile(r"[a-z][a-z0-9_]*")


Gauges: TypeAlias = dict[str, dict[tuple[str, ...], float]]  # by name and labels


@dataclass(slots=True)
class EngineState:
    """The state of things when gauges are written."""

    gauges: Gauges = field(default_factory=lambda: defaultdict(dict))
    # By policy and name, as policies tell them.
    policy_gauges: Mapping[tuple[str, str], float] = field(default_factory=dict)
    policy_counters: Mapping[tuple[str, str], float] = field(default_factory=dict)


@dataclass(slots=True)
class StepTally:
    """Steps of a kind, since they were written last."""

    steps: int = 0
    buckets: list[int] = field(default_factory=lambda: [0] * (len(STEP_BUCKETS) + 1))
    seconds: float = 0.0
    predicted: int = 0  # of them
    predicted_s: float = 0.0
    observed_s: float = 0.0  # of those that were predicted
    error_s: float = 0.0

    def sums(self) -> dict[str, float]:
        """Give the counters that this adds to."""
        return {
            "steps": self.steps,
            "steps_predicted": self.predicted,
            "step_predicted_seconds": self.predicted_s,
            "step_observed_seconds": self.observed_s,
            "step_error_seconds": self.error_s,
        }


class BatchHistogram(Histogram):
    """A histogram that takes in at once what was counted elsewhere.

    To observe each step takes as long as all else that is done for it here.
    """

    def add(self, buckets: Sequence[int], seconds: float) -> None:
        """Take in so many observations in each bucket, and their sum."""
        for bucket, count in zip(self._buckets, buckets, strict=True):
            if count:
                bucket.inc(count)
        self._sum.inc(seconds)


class BoundedLabels:
    """Lets so many different values of a label through, and calls the rest `other`."""

    def __init__(self, most: int = MOST_LABELS) -> None:
        self._most = most
        self._known: set[Hashable] = set()

    def __call__(self, labels: tuple[str, ...]) -> tuple[str, ...]:
        """Return the labels, or as many times `other`."""
        if labels not in self._known:
            if len(self._known) >= self._most:
                return (OTHER,) * len(labels)
            self._known.add(labels)
        return labels


class Metrics:
    """The numbers of one engine.

    Engines on other machines than the server's are not on its page: a folder has one machine.
    """

    def __init__(self, model: str, engine: str, registry: CollectorRegistry | None = None) -> None:
        # Of its own: what counts are the mapped files, and a second engine may live in a process.
        self._registry = registry or CollectorRegistry()
        self._own = (model, engine)
        self._gauges = {
            name: self._gauge(name, text, labels) for name, (text, labels) in GAUGES.items()
        }
        self._counters = {
            name: self._counter(name, text, labels) for name, (text, labels) in COUNTERS.items()
        }
        self._step_seconds = self._histogram("step_seconds", *HISTOGRAMS["step_seconds"])
        self._hold_seconds = self._histogram("hold_seconds", *HISTOGRAMS["hold_seconds"])
        self._bounds: dict[str, BoundedLabels] = defaultdict(BoundedLabels)
        self._children: dict[tuple[str, tuple[str, ...]], Any] = {}
        self._shown: dict[tuple[str, tuple[str, ...]], float] = {}
        self._tallies: dict[str, StepTally] = defaultdict(StepTally)
        self._prefill_tokens = self._decode_tokens = 0
        self._sums: dict[tuple[str, tuple[str, ...]], float] = defaultdict(float)
        self._told: dict[tuple[str, str], float] = {}
        self._written_at = float("-inf")

    def fact(self, name: str, value: float, *labels: str) -> None:
        """Say what never changes."""
        text, names = FACTS[name]
        self._gauge(name, text, names).labels(*self._own, *labels).set(value)

    # What was done

    def stepped(
        self,
        kind: str,
        prefill_tokens: int,
        decode_tokens: int,
        seconds: float | None = None,
    ) -> None:
        """Count a step; without a time if it had none to speak of."""
        tally = self._tallies[kind]
        tally.steps += 1
        self._prefill_tokens += prefill_tokens
        self._decode_tokens += decode_tokens
        if seconds is not None:
            tally.buckets[bisect_left(STEP_BUCKETS, seconds)] += 1
            tally.seconds += seconds

    def predicted(self, kind: str, seconds: float, observed: float) -> None:
        """Count a step whose time was predicted, and what it took."""
        tally = self._tallies[kind]
        tally.predicted += 1
        tally.predicted_s += seconds
        tally.observed_s += observed
        tally.error_s += abs(seconds - observed)

    def admitted(self, policy: str, lane: str) -> None:
        """Count a request that began to run."""
        self._sums["requests_admitted", self._bounds["lane"]((policy, lane))] += 1

    def held(self, policy: str, seconds: float) -> None:
        """Count a request that began to run, having been held by this policy for so long."""
        self._child("hold_seconds", self._hold_seconds, (policy,)).observe(max(seconds, 0.0))

    # Now and then

    def due(self, now: float) -> bool:
        """Tell whether it is time to write."""
        return now - self._written_at >= WRITE_EVERY_S

    def write(self, state: EngineState, now: float) -> None:
        """Show the state of things, and what was counted since."""
        self._written_at = now
        shown = dict.fromkeys(self._shown, 0.0)  # what is told no more is nothing now
        for name, by_labels in state.gauges.items():
            for labels, value in by_labels.items():
                key = name, self._bounds[name](labels)
                shown[key] = value if key[1] == labels else shown.get(key, 0.0) + value
        for (policy, name), value in state.policy_gauges.items():
            self._policys_own(name, counts=False)
            shown[name, (policy,)] = value
        for key, value in shown.items():
            if self._shown.get(key) != value:
                self._child(key[0], self._gauges[key[0]], key[1]).set(value)
        self._shown = shown
        for told, value in state.policy_counters.items():
            self._policys_own(told[1], counts=True)
            self._sums[told[1], (told[0],)] += max(value - self._told.get(told, 0.0), 0.0)
            self._told[told] = value
        self._add_up_steps()
        for key, value in self._sums.items():
            self._child(key[0], self._counters[key[0]], key[1]).inc(value)
        self._sums.clear()

    # Inside

    def _add_up_steps(self) -> None:
        for kind, tally in self._tallies.items():
            if any(tally.buckets):
                child = self._child("step_seconds", self._step_seconds, (kind,))
                child.add(tally.buckets, tally.seconds)
            for name, value in tally.sums().items():
                if value:
                    self._sums[name, (kind,)] += value
        self._tallies.clear()
        for kind, tokens in (("prefill", self._prefill_tokens), ("decode", self._decode_tokens)):
            if tokens:
                self._sums["step_tokens", (kind,)] += tokens
        self._prefill_tokens = self._decode_tokens = 0

    def _child(self, name: str, metric: Any, labels: tuple[str, ...]) -> Any:
        child = self._children.get((name, labels))
        if child is None:
            child = self._children[name, labels] = metric.labels(*self._own, *labels)
        return child

    def _policys_own(self, name: str, *, counts: bool) -> None:
        """Make the metric of a policy's number when it is first told."""
        known: dict[str, Any] = self._counters if counts else self._gauges
        if name in known:
            return
        if not NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name for a policy's number: use a-z, 0-9 and _")
        make = self._counter if counts else self._gauge
        known[name] = make(name, POLICIES_OWN.get(name, "A policy's own number."), ("policy",))

    def _gauge(self, name: str, text: str, labels: tuple[str, ...]) -> Gauge:
        return Gauge(
            PREFIX + name,
            text,
            [*ENGINE_LABELS, *labels],
            registry=self._registry,
            multiprocess_mode="livemostrecent",
        )

    def _counter(self, name: str, text: str, labels: tuple[str, ...]) -> Counter:
        return Counter(PREFIX + name, text, [*ENGINE_LABELS, *labels], registry=self._registry)

    def _histogram(
        self, name: str, text: str, label: str, buckets: tuple[float, ...]
    ) -> BatchHistogram:
        return BatchHistogram(
            PREFIX + name,
            text,
            [*ENGINE_LABELS, label],
            registry=self._registry,
            buckets=buckets,
        )


def reaches_the_server() -> bool:
    """Return whether what is counted here will be on /metrics; log why it will not."""
    if envs.VLLM_USE_RUST_FRONTEND:
        logger.warning(
            "vllm_sched_* metrics will be missing from /metrics: vLLM's Rust front end does not "
            "read %s; start without VLLM_USE_RUST_FRONTEND to have them",
            metrics_folder.METRICS_VARIABLE,
        )
        return False
    if os.environ.get(metrics_folder.METRICS_VARIABLE):
        return True
    logger.info(
        "vllm_sched_* metrics are off: start with `vllm-sched serve`, or set %s to an empty "
        "folder before `vllm serve`, to have them on /metrics",
        metrics_folder.METRICS_VARIABLE,
    )
    return False


def open_folder() -> None:
    """Connect the processes that this one will start with its own /metrics.

    A folder that is named already is its owner's to empty.
    """
    if os.environ.get(metrics_folder.METRICS_VARIABLE):
        return
    folder = metrics_folder.make_folder()
    os.environ[metrics_folder.METRICS_VARIABLE] = str(folder)
    # Decided when prometheus_client was first imported, which importing vLLM did.
    values.ValueClass = values.get_value_class()  # type: ignore[no-untyped-call]
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # a forked engine that ends must not take the folder with it
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
