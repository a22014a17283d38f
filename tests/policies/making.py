"""Real schedulers with one or more policies, and a clock that the test sets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tests.engine.schedulers import answer, make_request, make_scheduler, until


class Bench:
    """A scheduler, its policies by name, and its time."""

    def __init__(self, policies: Mapping[str, Mapping[str, object]], **engine: Any) -> None:
        self.scheduler = make_scheduler(policies, **engine)
        self.now = 1000.0
        self.scheduler.clock = lambda: self.now
        self.scheduler.waiting._clock = lambda: self.now
        self.policies = {policy.name: policy for policy in self.scheduler._policies}
        self.barred: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        return self.policies[name]

    def add(
        self, name: str, tokens: int | Sequence[int], *, lane: str | None = None, **more: Any
    ) -> Any:
        """Add a request that arrives now."""
        request = make_request(tokens, name=name, **more)
        if lane is not None:
            assert request.sampling_params is not None
            request.sampling_params.extra_args = {"lane": lane}
        self.scheduler.add_request(request)
        return request

    def step(self, seconds: float = 0.01) -> dict[str, int]:
        """Run one step of this duration."""
        output = self.scheduler.schedule()
        result = answer(self.scheduler, output)
        self.now += seconds
        self.scheduler.update_from_output(output, result)
        return dict(output.num_scheduled_tokens)

    def steps(self, count: int) -> list[dict[str, int]]:
        """Run `count` steps."""
        return [self.step() for _ in range(count)]

    def until(self, over: Callable[[], object], max_steps: int = 10_000) -> dict[str, int]:
        """Run steps until `over()` is true; return the last step's tokens."""
        return until(self, over, max_steps, Bench.step)

    def turn_away(self, name: str) -> None:
        """Make vLLM skip this request, like one whose grammar compiles."""
        ask = self.scheduler._handle_blocked_waiting_request
        self.barred.add(name)
        self.scheduler._handle_blocked_waiting_request = lambda r: (
            r.request_id not in self.barred and ask(r)
        )

    @property
    def running(self) -> set[str]:
        """The names of running requests."""
        return {request.request_id for request in self.scheduler.running}

    def drain(self, max_steps: int = 10_000) -> int:
        """Run until no request is left; return the number of steps."""
        for count in range(max_steps):
            if not self.scheduler.has_unfinished_requests():
                return count
            self.step()
        raise AssertionError("requests that never finish")


class PinnedChunk:
    """In place of `ChunkSize`: long prompts always have chunks of this size."""

    token_s = 0.0

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    @property
    def usual(self) -> tuple[int, int]:
        """Return the chunk of the next step, and its least size with shorts."""
        return self.tokens, -(-self.tokens // 2)

    def plan(self) -> tuple[int, int]:
        """Return the same: no step is a comparison."""
        return self.usual

    def observe(self, result: object) -> None:
        """Learn nothing."""
