"""`python -m benchmarks.both_pools` without workers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import both_pools
from benchmarks.both_pools import ALONE, BOTH, DIRECT, Rate, fleet, main, promises, rate, sides
from proxy.config import parse
from proxy.core.model.role import Role
from vllm_sched.bench.client.player import PlayedRun
from vllm_sched.bench.results.outcome import Outcome
from vllm_sched.errors import UsageError


def ended(*times: float, worker: str = "", error: str = "") -> list[Outcome]:
    return [
        Outcome(0.0, "x", 1500, 8, ticks=[at], completed=8, worker=worker, error=error)
        for at in times
    ]


def played(outcomes: Sequence[Outcome], busy: float = 0.25) -> PlayedRun:
    return PlayedRun(tuple(outcomes), duration=20.0, busy=busy, stall=0.0)


def rate_of(requests_per_s: float) -> Rate:
    return Rate(requests_per_s, 1508 * requests_per_s, round(17 * requests_per_s), {}, 0.1)


def test_workers_differ_only_in_role_and_processor() -> None:
    short, long = fleet([2, 5, 7]).workers
    assert (short.role, long.role) == (Role.SHORT, Role.LONG)
    assert short.launch is not None
    assert long.launch is not None
    assert (short.launch.cpus, long.launch.cpus) == ((2,), (5,))
    assert short.launch.args == long.launch.args
    with pytest.raises(UsageError, match="two processors are needed"):
        fleet([0])


def test_sides_are_one_worker_both_workers_and_no_router(tmp_path: Path) -> None:
    config = fleet([0, 1])
    alone, both, direct = sides(config, tmp_path)
    assert (alone.name, both.name, direct.name) == (ALONE, BOTH, DIRECT)
    assert direct.urls == [str(worker.url) for worker in config.workers]
    assert direct.router is None
    for side, names in ((alone, ["short-0"]), (both, ["short-0", "long-0"])):
        assert side.router is not None
        assert side.urls == [side.router.url]
        path = Path(side.router.command[-1])
        before = parse(path.read_text(), str(path))
        assert [worker.name for worker in before.workers] == names
        assert {worker.max_requests for worker in before.workers} == {None}
        assert before.routing.policy == "adaptive"


def test_only_requests_within_the_measured_stretch_count() -> None:
    one = played(
        [
            *ended(1.0, 3.0, 20.5, worker="a"),  # before, at the edge of, and after the stretch
            *ended(3.5, 20.0, worker="a"),
            *ended(4.0, worker="b"),
            *ended(5.0, error="refused"),
        ]
    )
    both = rate([one, played(ended(4.0), busy=0.3)], 3.0, 20.0, router_s=0.0)
    # Two concurrent loops are one side, and both counted the same process.
    assert (both.counted, both.beside) == (4, pytest.approx(0.3))
    found = rate([one], 3.0, 20.0, router_s=2.0)
    assert (found.counted, found.by_worker) == (3, {"a": 2, "b": 1})
    assert found.requests_per_s == pytest.approx(3 / 17)
    assert found.tokens_per_s == pytest.approx(3 * 1508 / 17)
    assert found.beside == pytest.approx(0.35)
    assert found.failed == ["refused"]


def test_promise_is_the_median_ratio_of_the_rounds() -> None:
    found = {
        ALONE: [rate_of(10.0), rate_of(12.0), rate_of(8.0)],
        BOTH: [rate_of(19.0), rate_of(18.0), rate_of(16.0)],
        DIRECT: [rate_of(20.0), rate_of(18.0), rate_of(20.0)],
    }
    requests, tokens, ceiling, router = promises(found)
    assert (requests.measured, requests.kept) == (pytest.approx(1.9), True)
    assert (tokens.measured, tokens.kept) == (pytest.approx(1.9), True)
    assert (ceiling.measured, ceiling.bound) == (pytest.approx(2.0), "")
    assert (router.measured, router.bound) == (pytest.approx(0.95), "")
    found[BOTH] = [rate_of(17.9), rate_of(21.4), rate_of(14.3)]
    assert not promises(found)[0].kept
    assert not promises({ALONE: [rate_of(0.0)], BOTH: [rate_of(1.0)], DIRECT: [rate_of(1.0)]})[
        0
    ].kept


@pytest.mark.parametrize("failed", [[], ["reset by peer"]])
def test_figures_are_saved_and_failed_requests_set_the_exit_code(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    failed: list[str],
) -> None:
    both = Rate(19.5, 29_406.0, 332, {"short-0": 168, "long-0": 164}, 0.05, failed)

    async def run(*_: object) -> dict[str, list[Rate]]:
        return {ALONE: [rate_of(10.0)], BOTH: [both], DIRECT: [rate_of(20.0)]}

    monkeypatch.setattr(both_pools, "run", run)
    path = tmp_path / "figures.json"
    assert main(["--rounds", "1", "--save", str(path)]) == len(failed)
    printed = capsys.readouterr().out
    assert "1.95x" in printed
    assert "long-0 164, short-0 168" in printed
    assert ("1 failed, one of them: reset by peer" in printed) == bool(failed)
    whole = json.loads(path.read_text())
    assert whole["rounds"][BOTH][0]["counted"] == 332
    assert whole["promises"][0]["kept"] is True
    assert whole["load"]["concurrency"] == 16
