"""The real engine under endless shorts, with a request that a policy holds.

Reports for each policy when the held request began, with a short bound and with a very long one.
"""

from __future__ import annotations

import random
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine.llm_engine import LLMEngine

from tests.engine.flood_scenes import AHEAD, BOUND_S, MANY, MOST_STEPS, SCENES, STEP_S, Request
from tests.engine.one_engine import add, exchange_scheduler, prompt_of


class Flood:
    """Shorts wait at all times until the held request begins, or until the last step."""

    def __init__(
        self, engine: LLMEngine, name: str, bound: str, scene: dict[str, Any] | None = None
    ) -> None:
        self.engine = engine
        self.name = name
        self.scene = scene or SCENES[name]
        self.now = 0.0
        self.rng = random.Random(2)
        self.begun: dict[str, float] = {}
        self.first_tokens: dict[str, float] = {}  # time of each first token
        self.longs = 0  # most concurrent long prefills
        self.finished: set[str] = set()
        self.added: set[str] = set()
        policies = {name: self.scene["policy"] | self.scene[bound]}
        self.scheduler = exchange_scheduler(engine, policies, self)

    def begin(self, output: SchedulerOutput) -> None:
        """Record which requests begin with a step."""
        for request_id in output.num_scheduled_tokens:
            name = request_id.partition("-")[0]  # the engine adds a suffix
            self.begun.setdefault(name, self.now)
        self.longs = max(self.longs, self.longs_in(output.num_scheduled_tokens))

    def end(self, output: SchedulerOutput) -> None:  # noqa: ARG002
        self.now += STEP_S

    def longs_in(self, tokens: dict[str, int]) -> int:
        """Return the number of long prefills before this step."""
        threshold = self.scene["policy"].get("long_prefill_token_threshold", 10**6)
        return sum(
            r.num_prompt_tokens - r.num_computed_tokens + tokens.get(r.request_id, 0) > threshold
            for r in self.scheduler.running
        )

    def add(self, request_id: str, request: Request) -> None:
        self.added.add(request_id)
        size, length, lane = request
        add(self.engine, request_id, prompt_of(size, self.rng), length, lane, self.now)

    def step(self) -> None:
        for done in self.engine.step():
            self.first_tokens.setdefault(done.request_id, self.now)
            if done.finished:
                self.finished.add(done.request_id)

    def play(self, max_steps: int = MOST_STEPS) -> dict[str, Any]:
        """Return when the held request began, and the state of others by then."""
        came, late_steps, number = 0.0, 0, 0
        for index, request in enumerate(self.scene["before"]):
            self.add(f"before {index}", request)
        for number in range(max_steps):
            if number == self.scene["held_at"]:
                self.add("held", self.scene["held"])
                came = self.now
            while count(self.added - self.finished, "short") < AHEAD:
                self.add(f"short {len(self.added)}", self.scene["shorts"])
            late_steps += number > self.scene["held_at"] and self.now - came > BOUND_S
            self.step()
            if "held" in self.begun:
                break
        passed = [name for name, at in self.begun.items() if at > came and name != "held"]
        found = {
            "waited": self.begun["held"] - came if "held" in self.begun else None,
            "steps": number,
            "late_steps": late_steps,
            "shorts_passed": count(passed, "short"),
            "shorts_wait": count(self.added - self.begun.keys(), "short"),
            "before_first_tokens": count(self.first_tokens, "before"),
            "before_done": count(self.finished, "before"),
            "longs": self.longs,
            "begun": self.begun,
            "first_tokens": self.first_tokens.copy(),
            "counters": {p.name: dict(p.counters()) for p in self.scheduler._policies}[self.name],
        }
        self.engine.abort_request([*self.added - self.finished])
        for _ in range(100):  # leave an idle engine
            if not self.engine.has_unfinished_requests():
                break
            self.step()
        return found


def count(names: Any, kind: str) -> int:
    return sum(name.startswith(kind) for name in names)


def play_all(engine: LLMEngine) -> dict[str, dict[str, Any]]:
    done: dict[str, dict[str, Any]] = {}
    for name in SCENES:
        bounded = Flood(engine, name, "bounded").play()
        unbounded = Flood(engine, name, "unbounded").play(bounded["steps"] + 15)
        done[name] = {"bounded": bounded, "unbounded": unbounded}
    done["many"] = {
        bound: Flood(engine, "long_prompt", bound, MANY).play()
        for bound in ("bounded", "unbounded")
    }
    return done
