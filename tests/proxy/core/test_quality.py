"""The quality of decisions, in virtual time on a toy fleet."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from statistics import mean

import pytest

from proxy.core.model.specs import WorkerSpec
from proxy.core.model.types import RequestInfo
from tests.proxy.core.making import GENERAL, LONG, SHORT, make_info, spec
from tests.proxy.core.toy import Job, Speed, Speeds, Toy, p99

PAIR = spec("s", SHORT, 8192), spec("l", LONG, 65_536)
# As on a CPU: each sequence costs time, so that a worker can be full.
COMPUTE_BOUND = Speed(token_s=2e-4, base_s=0.002, sequence_s=0.002)
GPU = Speed(token_s=1e-4, base_s=0.02, sequence_s=2e-4)
Maker = Callable[[random.Random], RequestInfo]


def short(rng: random.Random) -> RequestInfo:
    return make_info(rng.randint(50, 1500), rng.randint(20, 200))


def long(rng: random.Random) -> RequestInfo:
    return make_info(rng.randint(10_000, 40_000), rng.randint(20, 200))


def mixed(share: float) -> Maker:
    """Return a function that makes longs with this probability, else shorts."""
    return lambda rng: long(rng) if rng.random() < share else short(rng)


def send(toy: Toy, info: RequestInfo) -> Job:
    """Send a request that writes its whole output limit."""
    return toy.send(info, info.output_tokens or 1)


def open_load(
    specs: tuple[WorkerSpec, ...],
    speed: Speeds,
    rate: float,
    seconds: float,
    make: Maker,
    **settings: object,
) -> Toy:
    """Send at random times at a rate, and play until all requests have ended."""
    toy, rng, now = Toy(*specs, speed=speed, **settings), random.Random(3), 0.0
    while now < seconds:
        now += rng.expovariate(rate)
        toy.at(now, lambda: send(toy, make(rng)))
    toy.run()
    assert all(job.done_at for job in toy.jobs if job.refusal is None)
    return toy


def saturated(specs: tuple[WorkerSpec, ...], clients: int, *, stream: bool) -> float:
    """Return how many shorts a second a saturated fleet serves."""
    toy, rng, seconds = Toy(*specs, speed=COMPUTE_BOUND), random.Random(1), 60.0

    def again(_: Job | None = None) -> None:
        if toy.now < seconds:
            send(toy, make_info(rng.randint(50, 800), rng.randint(20, 150), stream=stream))

    toy.finished = again
    for i in range(clients):
        toy.at(i / 1000, again)
    toy.run(seconds)
    return sum(job.done_at is not None and job.done_at > 6.0 for job in toy.jobs) / 54.0


def ttfts(toy: Toy, *, long: bool) -> list[float]:
    return [job.ttft for job in toy.jobs if job.info.long is long and job.first_at is not None]


@pytest.mark.parametrize(("clients", "stream"), [(32, True), (64, False)])
def test_long_worker_carries_its_share_of_shorts(clients: int, stream: bool) -> None:
    alone = saturated(PAIR[:1], clients, stream=stream)
    both = saturated(PAIR, clients, stream=stream)
    assert both >= 1.8 * alone


def test_shorts_do_not_wait_behind_longs() -> None:
    def short_p99(*specs: WorkerSpec, policy: str) -> float:
        toy, rng = Toy(*specs, speed=GPU, policy=policy), random.Random(2)
        for i in range(30):
            toy.at(i * 0.3, lambda: send(toy, short(rng)))
        for i in range(2):
            toy.at(20 + i / 100, lambda: send(toy, make_info(30_000, 50)))
        for i in range(20):
            toy.at(20.05 + i / 10, lambda: send(toy, short(rng)))
        toy.run()
        return p99([job.ttft for job in toy.jobs if job.at > 20 and not job.info.long])

    pools = short_p99(*PAIR, policy="adaptive")
    general = short_p99(
        spec("g0", GENERAL, 65_536), spec("g1", GENERAL, 65_536), policy="round_robin"
    )
    assert pools < 1.0
    assert pools <= general / 5


@pytest.mark.parametrize("shorts_pass", [False, True])
def test_adaptive_keeps_shorts_fast_under_mixed_load(shorts_pass: bool) -> None:
    specs = (*PAIR, spec("s1", SHORT, 8192), spec("l1", LONG, 65_536))
    speed = Speed(1e-4, 0.02, 2e-4, shorts_pass=shorts_pass)
    toys = {
        policy: open_load(specs, speed, 12, 150, mixed(0.03), policy=policy)
        for policy in ("adaptive", "length", "round_robin")
    }
    means = {policy: mean(ttfts(toy, long=False)) for policy, toy in toys.items()}
    longs = {policy: mean(ttfts(toy, long=True)) for policy, toy in toys.items()}
    assert means["adaptive"] < means["length"] < means["round_robin"]
    assert longs["adaptive"] < 1.25 * longs["length"]


def test_adaptive_separates_shorts_from_longs_in_a_general_pool() -> None:
    specs = tuple(spec(f"g{i}", GENERAL, 65_536) for i in range(4))
    toys = {
        policy: open_load(specs, GPU, 6, 150, mixed(0.05), policy=policy)
        for policy in ("adaptive", "least_loaded")
    }
    p99s = {policy: p99(ttfts(toy, long=False)) for policy, toy in toys.items()}
    assert p99s["adaptive"] < p99s["least_loaded"] / 2


def test_slow_worker_gets_fewer_requests() -> None:
    specs = tuple(spec(f"g{i}") for i in range(3))
    speed = {"g0": GPU, "g1": GPU, "g2": Speed(4e-4, 0.08, 8e-4)}
    toy = open_load(specs, speed, 12, 150, short)
    counts = Counter(job.where for job in toy.jobs)
    assert 0 < counts["g2"] < min(counts["g0"], counts["g1"]) / 3
    least = open_load(specs, speed, 12, 150, short, policy="least_loaded")
    assert p99(ttfts(toy, long=False)) < p99(ttfts(least, long=False)) / 2


def test_conversations_return_to_the_worker_with_their_prefix() -> None:
    def turns(policy: str) -> float:
        toy = Toy(*(spec(f"g{i}") for i in range(4)), speed=GPU, policy=policy)
        rng = random.Random(5)
        for session in range(40):
            start = rng.uniform(0, 60)
            for turn in range(1, 8):
                prefix = tuple(1000 * session + i for i in range(8 * turn))
                info = make_info(600 * turn, 50, prefix=prefix)
                toy.at(start + 6 * turn, lambda info=info: send(toy, info))  # type: ignore[misc]
        toy.run()
        return mean(ttfts(toy, long=False))

    assert turns("adaptive") < 0.6 * turns("least_loaded")


@pytest.mark.parametrize("rate", [5, 40])
def test_common_prefix_makes_no_hot_spot(rate: float) -> None:
    """A cached prefix is worth its prefill: 5000 tokens x 0.1 ms = 0.5 s.

    An answer of 125 tokens is delayed by 125 x 0.2 ms = 25 ms per sequence beside it. So at any
    rate, at most some 20 requests more than elsewhere are placed where the prefix is.
    """

    def make(rng: random.Random) -> RequestInfo:
        return make_info(5000, rng.randint(50, 200), prefix=tuple(range(1, 33)))

    toy = open_load(tuple(spec(f"g{i}") for i in range(4)), GPU, rate, 100, make)
    peaks = [engine.most_jobs for engine in toy.engines.values()]
    assert max(peaks) - min(peaks) <= 30
    if rate > 5:
        counts = Counter(job.where for job in toy.jobs if job.at > 10)
        assert max(counts.values()) < 1.5 * min(counts.values())
    assert p99([job.ttft for job in toy.jobs if job.at > 10]) < 0.2


def test_waiting_longs_keep_their_reserve() -> None:
    """A flood of shorts beside more longs than the long worker has slots."""
    specs = spec("s", SHORT, 8192, most=16), spec("l", LONG, 65_536, most=4)
    toy, rng = Toy(*specs, speed=GPU, queue_wait_s=600.0), random.Random(4)
    on_long: list[int] = []

    def watch() -> None:
        if toy.router.queue.count_waiting("m", long=True):
            jobs = toy.engines["l"].jobs
            on_long.append(sum(not job.info.long for job in jobs if job.at > 21.0))

    for i in range(12):
        toy.at(20 + i / 100, lambda: send(toy, make_info(20_000, 100)))
    for i in range(600):
        toy.at(i / 15, lambda: send(toy, short(rng)))
        toy.at(i / 15 + 0.01, watch)
    toy.run()
    assert len(on_long) > 50
    assert max(on_long) == 0
    assert all(job.done_at for job in toy.jobs)


def test_overloaded_fleet_rejects_and_keeps_the_wait_limit() -> None:
    specs = (spec("g0", most=8), spec("g1", most=8))
    toy = open_load(specs, COMPUTE_BOUND, 60, 60, short, queue_requests=30, queue_wait_s=4.0)
    rejected = [job for job in toy.jobs if job.refusal is not None]
    assert rejected
    assert {job.refusal.status for job in rejected if job.refusal} == {429}
    waits = [job.lease.charged_at - job.at for job in toy.jobs if job.lease is not None]
    assert max(waits) <= 4.0 + 0.1
    retry_after_s = [job.refusal.retry_after_s or 0 for job in rejected[50:] if job.refusal]
    assert 1 <= mean(retry_after_s) <= 8
