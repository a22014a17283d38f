"""Who keeps the processes: what only shows from within."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from proxy.app import supervise
from proxy.config import FleetConfig, parse
from proxy.errors import ProxyError
from proxy.processes import supervisor as module
from proxy.processes.messages import Ask
from proxy.processes.supervisor import Supervisor, how_many
from tests.proxy.wire.site import eventually

DEADLINE_S = 60.0


def config(processes: int | str = 2, port: int = 0) -> FleetConfig:
    """Describe a router of so many."""
    return parse(
        "model: tiny\nworkers: [{name: a, url: 'http://127.0.0.1:9'}]\n"
        f"router: {{port: {port}, admin: {{port: 0}}, processes: {processes}}}\n",
        "fleet.yaml",
    )


@pytest.mark.parametrize(("cpus", "wanted"), [(1, 1), (6, 6), (48, 8)])
def test_auto_is_one_for_each_processor_up_to_a_number(
    cpus: int, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cpus)))
    monkeypatch.setattr(module, "QUOTA", Path("/none"))
    assert how_many(config("auto")) == wanted
    assert how_many(config(3)) == 3


@pytest.mark.parametrize(
    ("quota", "wanted"),
    [("max 100000", 6), ("250000 100000", 2), ("50000 100000", 1), ("9900000 100000", 6), ("?", 6)],
)
def test_auto_heeds_what_a_container_may_use(
    quota: str, wanted: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    monkeypatch.setattr(module, "QUOTA", tmp_path / "cpu.max")
    assert how_many(config("auto")) == 6
    (tmp_path / "cpu.max").write_text(f"{quota}\n")
    assert how_many(config("auto")) == wanted


async def test_one_that_stands_still_is_killed_and_another_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "STILL_S", 2.0)
    monkeypatch.setattr(module, "LOOK_S", 0.1)
    monkeypatch.setattr(module, "ANSWER_S", 0.2)
    kept = Supervisor(config(), None)
    await kept.start()
    try:
        pids = kept.pids
        os.kill(pids[0], signal.SIGSTOP)
        # Meanwhile nobody waits for its answers.
        assert set(await kept.gather(Ask(1, "page"))) == {1}
        await eventually(lambda: kept.restarts == 1, within=DEADLINE_S)
        await eventually(lambda: len(kept.pids) == 2, within=DEADLINE_S)
        assert pids[0] not in kept.pids
    finally:
        await kept.stop()
    assert kept.pids == []


async def test_processes_that_can_not_begin_are_an_error_of_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\nexit 3\n")
    script.chmod(0o755)
    monkeypatch.setattr(module.sys, "executable", str(script))
    with pytest.raises(ProxyError, match="before it served"):
        await supervise(config())
