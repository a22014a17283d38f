"""A worker's /metrics page: what the engine half and vLLM declare, with numbers that grow."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from grafana import declared
from tests.proxy.health.vllm_page import Engine, vllm_page
from tests.proxy.wire import scripts
from vllm_sched.policies.registry import POLICIES
from vllm_sched.policies.types import EngineFacts

if TYPE_CHECKING:
    from tests.proxy.wire.fake_worker import Call

KINDS = ("mixed", "decode")
NEW_EVERY_S = 0.4


class EnginePage:
    """Writes the page that all workers show; now and then a little more has happened."""

    def __init__(self, usage: float, model: str = "tiny") -> None:
        self._module = declared.engine_metrics()
        self._ours = CollectorRegistry()
        self._told = self._module.Metrics(model, "0", self._ours)
        for name, (_, labels) in self._module.FACTS.items():
            self._told.fact(name, 1.0, *labels)
        self._vllms = CollectorRegistry()
        names = declared.vllms()
        known = {name.removesuffix("_total") for name in names if name.endswith("_total")}
        labels = ["model_name", "engine"]
        self._counters = [
            Counter(name, "x", labels, registry=self._vllms) for name in sorted(known)
        ]
        timed = {name.rpartition("_")[0] for name in names if not name.endswith("_total")}
        timed.add("vllm:nixl_bytes_transferred")
        self._histograms = [
            Histogram(name, "x", labels, registry=self._vllms) for name in sorted(timed)
        ]
        known |= timed
        self._model, self._times = model, 0
        self._page, self._made_at = b"", float("-inf")
        policies = {
            name: policy(EngineFacts(2000, 64, 16), policy.settings_type())
            for name, policy in POLICIES.items()
        }
        self._policy_gauges = [(n, own) for n, each in policies.items() for own in each.gauges()]
        self._policy_counters = [
            (n, own) for n, each in policies.items() for own in each.counters()
        ]
        # Those with labels and numbers of ours stand in for the plain ones.
        mine = sorted(known)
        plain = vllm_page(Engine(usage=usage), model=model).splitlines(keepends=True)
        self._plain = b"".join(
            line for line in plain if not any(name.encode() in line for name in mine)
        )

    def step(self) -> None:
        """Let everything that is counted happen once."""
        module, state = self._module, self._module.EngineState()
        self._times += 1
        for kind in KINDS:
            self._told.stepped(kind, 500, 8, 0.02)
            self._told.predicted(kind, 0.025, 0.02)
        self._told.admitted("long_prompt", "short")
        self._told.held("long_prompt", 0.5)
        for name, (_, labels) in module.GAUGES.items():
            state.gauges[name][tuple(labels)] = 1.0
        state.policy_gauges = dict.fromkeys(self._policy_gauges, 1.0)
        state.policy_counters = dict.fromkeys(self._policy_counters, float(self._times))
        self._told.write(state, float(self._times))
        for each in self._histograms:
            each.labels(self._model, "0").observe(0.1)
        for counter in self._counters:
            counter.labels(self._model, "0").inc()

    def page(self) -> bytes:
        """Write it, or show the last one if that is new."""
        if (now := time.monotonic()) - self._made_at >= NEW_EVERY_S:
            self.step()
            own = generate_latest(self._vllms) + generate_latest(self._ours)
            self._page, self._made_at = self._plain + own, now
        return self._page

    def script(self) -> Callable[[Call], Awaitable[None]]:
        """Answer with it."""

        async def run(call: Call) -> None:
            await scripts.answer(body=self.page(), content_type=b"text/plain")(call)

        return run
