"""The loads: arrivals scaled to a machine, so that each load means the same on all of them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Final, TypeAlias

from vllm_sched.cost.step_time import Chunk, StepShape
from vllm_sched.sim.planning.capacity_bound import decode_seconds
from vllm_sched.sim.types import Job, WorkerModel

CHAT, LONG, WARM = "chat", "long", "warm"
CHAT_TOKENS, OUTPUT_TOKENS = (60, 600), (60, 240)
LONG_OUTPUT_TOKENS: Final = 32
DECODES: Final = 12  # chats that decode at once, on average
Arrivals: TypeAlias = Iterator[tuple[float, Job]]
Load: TypeAlias = Callable[[WorkerModel, random.Random], Arrivals]


def prefill_s(model: WorkerModel, tokens: int, context: int = 0) -> float:
    """Return the time to compute a prompt alone, in steps of the whole budget."""
    seconds, done = 0.0, context
    while done < context + tokens:
        chunk = Chunk(min(model.max_num_batched_tokens, context + tokens - done), done)
        seconds += model.time.seconds(StepShape.from_chunks([chunk], 0, 0))
        done += chunk.tokens
    return seconds


def chat_rate(model: WorkerModel, decodes: int = DECODES) -> float:
    """Return the requests per second that keep this many chats decoding, without prompts."""
    tokens = sum(OUTPUT_TOKENS) / 2
    context = sum(CHAT_TOKENS) / 2 + tokens / 2
    return decodes / (tokens * decode_seconds(model.time, decodes, context))


def chats(model: WorkerModel, rng: random.Random, until: float, decodes: int = DECODES) -> Arrivals:
    rate, now = chat_rate(model, decodes), 0.0
    for number in range(1_000_000):
        now += rng.expovariate(rate)
        if now > until:
            return
        prompt, output = rng.randint(*CHAT_TOKENS), rng.randint(*OUTPUT_TOKENS)
        yield now, _job(f"{CHAT}{number}", prompt, output, CHAT, rng)


def occasional(model: WorkerModel, rng: random.Random) -> Arrivals:
    """Yield chats, and one long prompt at a time: a quarter of the engine's time."""
    lengths = [rng.randint(16_000, 48_000) for _ in range(10)]
    now = 0.0
    for number, tokens in enumerate(lengths):
        alone_s = prefill_s(model, tokens)
        yield (
            now + rng.uniform(0, alone_s),
            _job(f"{LONG}{number}", tokens, LONG_OUTPUT_TOKENS, LONG, rng),
        )
        now += 4 * alone_s
    yield from chats(model, rng, now)


def bursts(model: WorkerModel, rng: random.Random) -> Arrivals:
    """Yield chats, and bursts of eight long prompts: four tenths of the engine's time."""
    return _bursts(model, rng, bursts=3, prompts=8, tokens=(12_000, 36_000))


def documents(model: WorkerModel, rng: random.Random) -> Arrivals:
    """Yield chats, and bursts of 16 documents of one to a few steps each."""
    return _bursts(model, rng, bursts=4, prompts=16, tokens=(2_000, 8_000))


def _bursts(
    model: WorkerModel, rng: random.Random, *, bursts: int, prompts: int, tokens: tuple[int, int]
) -> Arrivals:
    now = 0.0
    for burst in range(bursts):
        lengths = [rng.randint(*tokens) for _ in range(prompts)]
        alone_s = sum(prefill_s(model, length) for length in lengths)
        at = now + rng.uniform(0, 0.5 * alone_s)
        for number, length in enumerate(lengths):
            yield at, _job(f"{LONG}{burst}-{number}", length, LONG_OUTPUT_TOKENS, LONG, rng)
        now += 2.5 * alone_s
    yield from chats(model, rng, now)


def agents(model: WorkerModel, rng: random.Random) -> Arrivals:
    """Yield chats, and agents' turns: most of a prompt is cached, 2k to 50k tokens are left."""
    sessions = 4
    cached = [rng.randint(20_000, 40_000) for _ in range(sessions)]
    now = 0.0
    for number, tokens in enumerate(cached):
        yield now, _job(f"{WARM}{number}", tokens, 1, WARM, rng, piece=(number, tokens))
        now += 1.5 * prefill_s(model, tokens)
    start = now
    for number in range(40):
        session = rng.randrange(sessions)
        left = int(math.exp(rng.uniform(math.log(2_000), math.log(50_000))))
        job = _job(
            f"{LONG}{number}", cached[session] + left, LONG_OUTPUT_TOKENS, LONG, rng,
            piece=(session, cached[session]),
        )  # fmt: skip
        yield now, job
        now += rng.expovariate(0.4 / prefill_s(model, left, cached[session]))
    yield from ((start + at, job) for at, job in chats(model, rng, now - start))


def saturated(model: WorkerModel, rng: random.Random) -> Arrivals:
    """Yield more than the engine can serve: one prompt in twelve is long."""
    lengths = [rng.randint(12_000, 24_000) for _ in range(12)]
    whole_s = sum(prefill_s(model, tokens) for tokens in lengths) + 132 / chat_rate(model)
    for number, tokens in enumerate(lengths):
        at = rng.uniform(0, 0.6 * whole_s)
        yield at, _job(f"{LONG}{number}", tokens, LONG_OUTPUT_TOKENS, LONG, rng)
    for number in range(132):
        prompt, output = rng.randint(*CHAT_TOKENS), rng.randint(*OUTPUT_TOKENS)
        at = rng.uniform(0, 0.6 * whole_s)
        yield at, _job(f"{CHAT}{number}", prompt, output, CHAT, rng)


def only_chats(model: WorkerModel, rng: random.Random) -> Arrivals:
    yield from chats(model, rng, 300 / chat_rate(model, 96), 96)


def embeddings(model: WorkerModel, rng: random.Random) -> Arrivals:
    """Yield prompts without a response, at four fifths of what the engine can compute."""
    tokens = 700
    each_s = prefill_s(model, model.max_num_batched_tokens) * tokens / model.max_num_batched_tokens
    now = 0.0
    for number in range(600):
        now += rng.expovariate(0.8 / each_s)
        yield now, _job(f"{CHAT}{number}", rng.randint(200, 1_200), 1, CHAT, rng)


LOADS: Final[Mapping[str, Load]] = {
    "occasional longs": occasional,
    "bursts of 8": bursts,
    "16 documents": documents,
    "agents": agents,
    "saturated": saturated,
    "chats only": only_chats,
    "embeddings": embeddings,
}


def _job(
    name: str,
    prompt: int,
    output: int,
    klass: str,
    rng: random.Random,
    piece: tuple[int, int] | None = None,
) -> Job:
    shared = () if piece is None else (piece,)
    return Job(name, prompt, output, text=rng.getrandbits(60), shared=shared, klass=klass)
