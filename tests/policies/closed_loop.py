"""A simulated engine with a cost model, policies and an endless backlog."""

from __future__ import annotations

import math
import random
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm_sched.cost.step_time import Chunk, StepShape, StepTime
from vllm_sched.policies.types import Gate, LaneCount, Policy, Step, StepResult


@dataclass
class FakeRequest:
    """The request attributes that policies read."""

    request_id: str
    num_prompt_tokens: int = 100
    arrival_time: float = 0.0
    priority: int = 0
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    num_output_tokens: int = 0
    cached: int = 0
    outputs: int = 0  # total output tokens

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens


@dataclass
class ClosedLoop:
    """Slots that are filled from an endless backlog, as the policy allows."""

    policies: Sequence[Policy]  # only the last has gates
    time: StepTime
    slots: int
    mean_output: float
    mean_prompt: float
    budget: int = 8192
    backlog: int = 10_000
    noise: float = 0.0
    seed: int = 0
    now: float = 0.0
    steps: int = 0
    done: int = 0
    batches: list[int] = field(default_factory=list)  # admitted in each step with admissions
    longest_s: float = 0.0
    # Seconds between two tokens with prefill in between, and the number of prompts.
    gaps: list[tuple[float, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Separate generators, so that every policy gets the same requests.
        self._rng, self._noise = random.Random(self.seed), random.Random(self.seed)
        self._ends: defaultdict[int, list[FakeRequest]] = defaultdict(list)
        self._prefilling: deque[FakeRequest] = deque()
        self._active = 0
        self._context = 0
        self._gone = 0
        self._gap_s, self._gap_prompts = 0.0, 0
        self._paused_since: float | None = None
        self._count = 0
        self.policy = self.policies[-1]
        self._head = self._request()

    @property
    def throughput(self) -> float:
        return self.done / self.now

    def run(self, requests: int) -> ClosedLoop:
        """Run until `requests` more requests have departed."""
        until = self.done + requests
        while self.done < until:
            self.step()
        return self

    def measured(self, warm_up: int, requests: int) -> float:
        """Return the throughput after a warm-up."""
        self.run(warm_up)
        done, then = self.done, self.now
        self.run(requests)
        return (self.done - done) / (self.now - then)

    def step(self) -> None:
        """Schedule one step as the engine does, and advance the clock."""
        policy = self.policy
        running = self._active + len(self._prefilling)
        step = Step(
            index=self.steps,
            now=self.now,
            budget=self.budget,
            decode_tokens=self._active,
            prefills=list(self._prefilling),
            free_slots=self.slots - running,
            num_running=running,
            num_waiting=self.backlog,
            context_tokens=self._context,
            num_departed=self._gone,
            paused_s=0.0 if self._paused_since is None else self.now - self._paused_since,
        )
        step.next_to_enter = lambda: (
            self._head if step.free_slots > 0 and self._gate(running) is not Gate.CLOSED else None
        )
        lane = policy.lane(self._head, lambda: self._head.cached)
        for each in self.policies:
            each.begin_step(step, {lane: LaneCount(self.backlog, 0, 1.0)})
        pauses = any(each.pauses_decodes(step) for each in self.policies)
        self._paused_since = (self._paused_since or self.now) if pauses else None
        decodes = 0 if pauses else self._active
        left = self.budget - decodes
        chunks: list[Chunk] = []
        finished: list[FakeRequest] = []
        admitted = 0
        while left > 0:
            if self._prefilling and len(chunks) < len(step.prefills):
                request = self._prefilling[len(chunks)]
            elif running < self.slots and self._gate(running) is not Gate.CLOSED:
                request, self._head = self._head, self._request()
                self._prefilling.append(request)
                policy.admitted(request)
                admitted += 1
                running += 1
            else:
                break
            tokens = min(left, request.num_prompt_tokens - request.num_computed_tokens)
            tokens = policy.chunk(request, request.num_computed_tokens, tokens)
            chunks.append(Chunk(tokens, request.num_computed_tokens))
            request.num_computed_tokens += tokens
            left -= tokens
            if request.num_computed_tokens == request.num_prompt_tokens:
                finished.append(request)
        if admitted:
            self.batches.append(admitted)
        self._pass(chunks, finished, decodes)

    def _pass(self, chunks: list[Chunk], finished: list[FakeRequest], decodes: int) -> None:
        context = self._context if decodes else 0
        shape = StepShape(
            sum(chunk.tokens for chunk in chunks),
            sum(chunk.attention for chunk in chunks),
            decodes,
            context,
            len(chunks),
        )
        seconds = self.time.seconds(shape)
        seconds *= 1 + abs(self._noise.gauss(0, self.noise)) if self.noise else 1.0
        self.now += seconds
        self.longest_s = max(self.longest_s, seconds if decodes or not self._active else 0.0)
        self._gap_s += seconds
        self._gap_prompts += len(chunks)
        if decodes or not self._active:
            if decodes and self._gap_prompts:
                self.gaps.append((self._gap_s, self._gap_prompts))
            self._gap_s, self._gap_prompts = 0.0, 0
        self.steps += 1
        if not decodes and self._active:
            # A paused decode ends one step later.
            moved = {at + 1: requests for at, requests in self._ends.items()}
            self._ends = defaultdict(list, moved)
        gone = self._ends.pop(self.steps, []) if decodes else []
        for request in gone:
            self._active -= 1
            self._context -= request.num_tokens
            request.num_output_tokens = request.outputs
            self.policy.departed(request, self.now)
        self._gone = len(gone)
        self.done += len(gone)
        for request in finished:
            self._prefilling.remove(request)
            self._active += 1
            # Full length from the start: only the mean matters.
            self._context += request.num_tokens
            self._ends[self.steps + request.outputs - 1].append(request)
        self.policy.observe(StepResult(seconds, chunks, decodes, decodes, context))

    def _gate(self, running: int) -> Gate:
        if not running:
            return Gate.OPEN
        lane = self.policy.lane(self._head, lambda: self._head.cached)
        return self.policy.gate(lane, self._head, 1.0)

    def _request(self) -> FakeRequest:
        self._count += 1
        steps = math.ceil(math.log(1 - self._rng.random()) / math.log1p(-1 / self.mean_output))
        prompt = max(round(self._rng.expovariate(1 / self.mean_prompt)), 1)
        return FakeRequest(str(self._count), prompt, outputs=max(steps, 1) + 1)
