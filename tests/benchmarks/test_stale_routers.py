"""`python -m benchmarks.stale_routers` for a few virtual seconds."""

from __future__ import annotations

import pytest

from benchmarks.stale_routers.__main__ import main, sides
from benchmarks.stale_routers.hosts import USUAL_AGE_S, WAITS_S, Delays, StaleFleet
from benchmarks.stale_routers.play import Load, Side, make_fleet, make_schedule, play
from proxy.core.fleet.worker_load import WorkerLoad


@pytest.mark.parametrize("age_s", [0.0, 0.01, USUAL_AGE_S, 0.2])
def test_delays_add_up_to_the_age(age_s: float) -> None:
    delays = Delays.of_age(age_s)
    assert sum(delays) == pytest.approx(age_s)
    assert min(delays) >= 0
    assert delays.flush_s + delays.publish_s + delays.read_s <= WAITS_S


def seen_elsewhere(age_s: float | None, seconds: float) -> tuple[StaleFleet, list[WorkerLoad]]:
    """Play until `seconds`; return what each router knows of the other's charges."""
    load = Load(30.0, 4.0)
    fleet = make_fleet(Side(2, age_s), load, seed=1)
    fleet.play(make_schedule(load, 1), stopped=lambda: fleet.now >= seconds)
    known = [worker.remote_load for router in fleet.routers for worker in router.fleet.roster]
    return fleet, known


def test_routers_know_each_other_after_the_age() -> None:
    _, known = seen_elsewhere(0.05, 2.0)
    assert any(load.requests for load in known)
    _, early = seen_elsewhere(1e6, 2.0)
    assert not any(load.requests for load in early)
    _, apart = seen_elsewhere(None, 2.0)
    assert not any(load.requests for load in apart)


def test_a_run_is_the_same_each_time() -> None:
    job = Side(4, USUAL_AGE_S), Load(30.0, 1.5, max_requests=8), 1
    figures = play(job)
    assert figures == play(job)
    assert figures.most <= 8 + 3  # one request per other host above the limit


def test_tables_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert sides([1, 2], [0.1]) == [Side(1), Side(2, 0.1), Side(2)]
    options = "--routers 1 2 --age-ms 37 --rates 20 --seeds 1 --seconds 2 --jobs 1"
    assert main(options.split()) == 0
    printed = capsys.readouterr().out
    assert "20 requests/s" in printed
    assert "37 ms" in printed
