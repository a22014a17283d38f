"""A run's JSON: the keys of `vllm bench serve` and our own, also for simulations."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from vllm_sched.bench.results.goodput import Targets
from vllm_sched.bench.results.outcome import Outcome
from vllm_sched.bench.results.sessions import PlayedSession, session_figures
from vllm_sched.bench.results.summary import ALL, by_class, details
from vllm_sched.bench.traffic.schedule import Schedule
from vllm_sched.files import write_whole


@dataclass(frozen=True)
class BenchResult:
    schedule: Schedule
    targets: Targets
    outcomes: Sequence[Outcome]
    duration: float
    backend: str  # an API's name, or the simulator's
    model: str
    notes: Mapping[str, Any] = field(default_factory=dict)  # further JSON keys
    warnings: Sequence[str] = ()
    sessions: Sequence[PlayedSession] = ()

    def classes(self) -> dict[str, dict[str, Any]]:
        return by_class(self.outcomes, self.duration, self.targets)

    def session_figures(self) -> dict[str, Any] | None:
        return session_figures(self.sessions, self.outcomes) if self.sessions else None

    def to_json(self) -> dict[str, Any]:
        schedule = self.schedule
        classes = self.classes()
        rate = schedule.offered_rate
        return {
            # For people only: the start of a run is stored nowhere else.
            "date": datetime.now().astimezone().strftime("%Y%m%d-%H%M%S"),
            "endpoint_type": self.backend,
            "backend": self.backend,
            "label": schedule.source.name,
            "model_id": self.model,
            "tokenizer_id": self.model,
            "num_prompts": len(self.outcomes),
            "request_rate": "inf" if rate is None else rate,
            "burstiness": schedule.offered_burstiness,
            "max_concurrency": schedule.concurrency,
            **classes[ALL],
            **details(self.outcomes),
            **({"sessions": sessions} if (sessions := self.session_figures()) else {}),
            "classes": {name: figures for name, figures in classes.items() if name != ALL},
            "goodput_targets_ms": self.targets.as_ms(),
            "workload": {
                "name": schedule.source.name,
                "seed": schedule.seed,
                "scale": schedule.scale,
                "timed": schedule.timed,
                "tenants": schedule.tenants,
            },
            **self.notes,
            "warnings": list(self.warnings),
        }

    def save(self, path: Path) -> None:
        write_whole(path, json.dumps(self.to_json()) + "\n")
