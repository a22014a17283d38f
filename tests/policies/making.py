"""Real schedulers with one or more policies, and a clock that the test sets."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from tests.engine.schedulers import answer, make_request, make_scheduler, until
from vllm_sched import PolicyScheduler, SyncPolicyScheduler
from vllm_sched.policies.long_prompts.chunk_size import LongChunk

Policies = Mapping[str, Mapping[str, object]]


class Bench:
    """A scheduler, its policies by name, and its time."""

    def __init__(
        self, policies: Policies | None, *, ahead: bool | None = None, **engine: Any
    ) -> None:
        """Make the scheduler; with `ahead` an asynchronous one, with two steps in flight."""
        if ahead is not None:
            engine["scheduler_cls"] = PolicyScheduler if ahead else SyncPolicyScheduler
            engine["async_scheduling"] = ahead
        self.scheduler = make_scheduler(policies, **engine)
        self.depth = 2 if ahead else 1
        self.in_flight: deque[Any] = deque()
        self.now = 1000.0
        self.scheduler.clock = lambda: self.now
        if policies:
            self.scheduler.waiting._clock = lambda: self.now
        self.policies = {policy.name: policy for policy in self.scheduler._policies}
        self.barred: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        return self.policies[name]

    def add(
        self,
        name: str,
        tokens: int | Sequence[int],
        *,
        lane: str | None = None,
        extra_args: Mapping[str, object] | None = None,
        **more: Any,
    ) -> Any:
        """Add a request that arrives now; `extra_args` are its `vllm_xargs`, like its lane."""
        if lane is not None:
            extra_args = {"lane": lane}
        request = make_request(tokens, name=name, extra_args=extra_args, **more)
        self.scheduler.add_request(request)
        return request

    def add_all(self, prompts: Mapping[str, int | Sequence[int]], **more: Any) -> list[Any]:
        """Add requests, given as their names and prompts."""
        return [self.add(name, tokens, **more) for name, tokens in prompts.items()]

    def decode(self, *names: str, output: int = 900) -> None:
        """Start requests that decode for a long time."""
        self.add_all(dict.fromkeys(names, 3), output=output)
        self.step()

    def step(self, seconds: float = 0.01) -> dict[str, int]:
        output = self.scheduler.schedule()
        result = answer(self.scheduler, output)
        seconds = self.scheduled(output, seconds)
        self.in_flight.append((output, result))
        self.now += seconds
        while len(self.in_flight) >= self.depth:
            self.finish()
        return dict(output.num_scheduled_tokens)

    def scheduled(self, output: SchedulerOutput, seconds: float) -> float:  # noqa: ARG002
        """Return the duration of a step that was just scheduled."""
        return seconds

    def finish(self) -> None:
        self.scheduler.update_from_output(*self.in_flight.popleft())

    def steps(self, count: int) -> list[dict[str, int]]:
        return [self.step() for _ in range(count)]

    def play(self, *events: Event) -> None:
        """Play events in order: a call, a number of steps, or the exact tokens of one step."""
        for number, event in enumerate(events):
            if isinstance(event, int):
                self.steps(event)
            elif isinstance(event, Mapping):
                assert self.step() == event, f"event {number}"
            else:
                event(self)

    def until(self, over: Callable[[], object], max_steps: int = 10_000) -> dict[str, int]:
        """Run steps until `over()` is true; return the last step's tokens."""
        return until(self, over, max_steps, Bench.step)

    def entries(self) -> list[str]:
        """Run until no request waits; return the names in order of entry."""
        entered: list[str] = []
        while len(self.scheduler.waiting):
            before = self.running
            self.step()
            entered += [r.request_id for r in self.scheduler.running if r.request_id not in before]
        return entered

    def abort(self, *names: str) -> None:
        self.scheduler.finish_requests([*names], RequestStatus.FINISHED_ABORTED)

    def receive(self, *names: str) -> None:
        """Report that the KV of these requests has come from other workers."""
        output = SchedulerOutput.make_empty()
        result = answer(self.scheduler, output)
        result.kv_connector_output = KVConnectorOutput(finished_recving={*names})
        self.scheduler.update_from_output(output, result)

    def preempt(self, request: Any) -> None:
        self.scheduler.running.remove(request)
        self.scheduler._preempt_request(request, 0.0)

    def turn_away(self, name: str) -> None:
        """Make vLLM skip this request, like one whose grammar compiles."""
        ask = self.scheduler._handle_blocked_waiting_request
        self.barred.add(name)
        self.scheduler._handle_blocked_waiting_request = lambda r: (
            r.request_id not in self.barred and ask(r)
        )

    @property
    def running(self) -> set[str]:
        return {request.request_id for request in self.scheduler.running}

    def drain(self, max_steps: int = 10_000) -> int:
        for count in range(max_steps):
            if not self.scheduler.has_unfinished_requests():
                while self.in_flight:
                    self.finish()
                return count
            self.step()
        raise AssertionError(f"requests never finish: {sorted(self.scheduler.requests)[:9]}")


Event = Callable[[Bench], object] | Mapping[str, int] | int


def add(name: str, tokens: int, **more: Any) -> Event:
    return lambda bench: bench.add(name, tokens, **more)


def add_all(names: str, tokens: int, **more: Any) -> Event:
    """Return the arrival of requests whose names have one letter."""
    return lambda bench: bench.add_all(dict.fromkeys(names, tokens), **more)


def decode(*names: str, output: int = 900) -> Event:
    return lambda bench: bench.decode(*names, output=output)


def wait(seconds: float) -> Event:

    def advance(bench: Bench) -> None:
        bench.now += seconds

    return advance


class PinnedChunk:
    """In place of `ChunkSize`: long prompts always have chunks of this size."""

    token_s = 0.0

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    @property
    def usual_chunk(self) -> LongChunk:
        """Return the chunk of the next step, and its least size with shorts."""
        return LongChunk(self.tokens, -(-self.tokens // 2))

    def next_chunk(self) -> LongChunk:
        """Return the same: no step is a comparison."""
        return self.usual_chunk

    def observe(self, result: object) -> None:
        """Learn nothing."""
