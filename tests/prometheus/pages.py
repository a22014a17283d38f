"""A worker's metrics page with all declared metrics and growing numbers."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from grafana import declared
from tests.proxy.health.vllm_page import Engine, vllm_page
from tests.proxy.wire import scripts
from tests.proxy.wire.fake_worker import Call
from vllm_sched.policies.registry import POLICIES
from vllm_sched.policies.types import EngineFacts

KINDS = ("mixed", "decode")
UPDATE_INTERVAL_S = 0.4


class EnginePage:
    """The page of all workers; its numbers grow with time."""

    def __init__(self, usage: float, model: str = "tiny") -> None:
        self._module = declared.engine_metrics()
        self._policy_registry = CollectorRegistry()
        self._metrics = self._module.Metrics(model, "0", self._policy_registry)
        for name, (_, labels) in self._module.FACTS.items():
            self._metrics.set_fact(name, 1.0, *labels)
        self._vllm_registry = CollectorRegistry()
        names = declared.vllms()
        known = {name.removesuffix("_total") for name in names if name.endswith("_total")}
        labels = ["model_name", "engine"]
        self._counters = [
            Counter(name, "x", labels, registry=self._vllm_registry) for name in sorted(known)
        ]
        timed = {name.rpartition("_")[0] for name in names if not name.endswith("_total")}
        timed.add("vllm:nixl_bytes_transferred")
        self._histograms = [
            Histogram(name, "x", labels, registry=self._vllm_registry) for name in sorted(timed)
        ]
        known |= timed
        self._model, self._times = model, 0
        self._page, self._made_at = b"", float("-inf")
        policies = {
            name: policy(EngineFacts(2000, 64, 16), policy.settings_type())
            for name, policy in POLICIES.items()
        }
        self._policy_gauges = [(n, own) for n, p in policies.items() for own in p.gauges()]
        self._policy_counters = [(n, own) for n, p in policies.items() for own in p.counters()]
        # Metrics with labels and growing numbers replace those of `vllm_page`.
        replaced = sorted(known)
        plain = vllm_page(Engine(usage=usage), model=model).splitlines(keepends=True)
        self._plain = b"".join(
            line for line in plain if not any(name.encode() in line for name in replaced)
        )

    def step(self) -> None:
        """Count every event once."""
        module, state = self._module, self._module.EngineState()
        self._times += 1
        for kind in KINDS:
            self._metrics.count_step(kind, 500, 8, 0.02)
            self._metrics.count_prediction(kind, 0.025, 0.02)
        self._metrics.count_admission("long_prompt", "short")
        self._metrics.observe_hold("long_prompt", 0.5)
        for name, (_, labels) in module.GAUGES.items():
            state.gauges[name][tuple(labels)] = 1.0
        state.policy_gauges = dict.fromkeys(self._policy_gauges, 1.0)
        state.policy_counters = dict.fromkeys(self._policy_counters, float(self._times))
        self._metrics.write(state, float(self._times))
        for histogram in self._histograms:
            histogram.labels(self._model, "0").observe(0.1)
        for counter in self._counters:
            counter.labels(self._model, "0").inc()

    def page(self) -> bytes:
        """Return the page, updated if it is old."""
        if (now := time.monotonic()) - self._made_at >= UPDATE_INTERVAL_S:
            self.step()
            own = generate_latest(self._vllm_registry) + generate_latest(self._policy_registry)
            self._page, self._made_at = self._plain + own, now
        return self._page

    def script(self) -> Callable[[Call], Awaitable[None]]:

        async def run(call: Call) -> None:
            await scripts.answer(body=self.page(), content_type=b"text/plain")(call)

        return run
