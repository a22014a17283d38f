"""Wrong options of the measuring programs are refused before anything starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from benchmarks import both_pools
from benchmarks.agents import __main__ as agents
from benchmarks.agents import real
from benchmarks.isolation import __main__ as isolation
from benchmarks.policies import __main__ as policies
from benchmarks.router import __main__ as router
from benchmarks.soak import __main__ as soak

NO_TRIAL = "'rotations' is no trial; use one of: rotation, chunk_budget"
POSITIVE = "--longs, --every, --shorts, --decoded: must be positive"


@pytest.mark.parametrize(
    ("main", "options", "message"),
    [
        (agents.main, "--sessions 0", "must be 1 or more"),
        (real.main, "--sessions 0", "must be 1 or more"),
        (both_pools.main, "--rounds=0", "--rounds"),
        (both_pools.main, "--concurrency=1", "--concurrency"),
        (both_pools.main, "--seconds=3", "--seconds"),
        (both_pools.main, "--save=/nowhere/at/all.json", "--save"),
        (isolation.main, "--rounds=-1", "must not be negative"),
        (isolation.main, "--rounds=0", "nothing to do"),
        (isolation.main, "--save no/such/folder/f.json", "make it first"),
        (isolation.main, "--longs=0", POSITIVE),
        (isolation.main, "--every=0", POSITIVE),
        (isolation.main, "--shorts=0", POSITIVE),
        (isolation.main, "--decoded=0", POSITIVE),
        (isolation.main, "--above high", "--above"),
        (policies.main, "rotations", NO_TRIAL),
        (router.main, "--rounds 0", "at least 1"),
        (router.main, "--save /nowhere/at/all.json", "make it first"),
        (router.main, "--only nothing", "invalid choice"),
        (soak.main, "--minutes 1 --processes 2 --kill-member 30", "no process would be killed"),
    ],
)
def test_wrong_option_is_refused(
    main: Callable[[Sequence[str]], int],
    options: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as exited:
        main(options.split())
    assert exited.value.code == 2
    assert message in capsys.readouterr().err
