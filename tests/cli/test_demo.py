"""`vllm-sched demo`: the fleets it compares. A real one is played by `make demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from proxy.config import load, parse
from vllm_sched.cli import demo
from vllm_sched.cli.main import main
from vllm_sched.cli.up import placed

ROOT = Path(__file__).parents[2]
FLEET = ROOT / "deploy/fleets/cpu-demo.yaml"


def test_one_pool_knows_no_roles_and_no_limits() -> None:
    pool = demo.one_pool(load(FLEET))
    assert {worker.role for worker in pool.workers} == {"general"}
    # The short worker's limit is the router's own: without it, it holds whatever the long one does.
    assert {worker.stated_max_model_len for worker in pool.workers} == {16384}
    assert pool.routing.policy == "round_robin"


def test_a_fleet_it_can_not_start_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "fleet.yaml"
    source.write_text("model: tiny\nworkers: [{name: a, url: 'http://127.0.0.1:9'}]\n")
    assert main(["demo", str(source)]) == 2
    assert "workers[0].launch: is missing" in capsys.readouterr().err


def test_both_routers_get_the_same_uncached_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[tuple[str, ...]] = []
    files: dict[str, str] = {}

    def measured(play: Any, arguments: Any) -> int:
        del arguments
        folder: Path = play.args[3]
        for config, name in ((play.args[1], "pools"), (demo.one_pool(play.args[1]), "one-pool")):
            router = demo.router_of(config, folder, name)
            files[name] = Path(router.command[-1]).read_text()
            commands.append(router.command)
        return 0

    monkeypatch.setattr(demo.measuring, "measured", measured)
    assert main(["demo", str(FLEET), "--rounds", "1"]) == 0
    pools, one_pool = (parse(files[name], name) for name in ("pools", "one-pool"))
    assert [w.url for w in pools.workers] == [w.url for w in one_pool.workers]
    assert pools.router.port != one_pool.router.port
    assert all(command[-2] == "router" for command in commands)
    worker = demo.to_play(placed(pools).workers[0], 3)
    assert worker.launch is not None
    assert worker.launch.args[-1] == "--no-enable-prefix-caching"
    assert worker.launch.cpus == (3,)


@pytest.mark.parametrize(("offered", "cpus"), [({0, 1, 5}, [0, 1]), ({4}, [None, None])])
def test_each_worker_gets_a_processor_where_there_are_enough(
    offered: set[int], cpus: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo.os, "sched_getaffinity", lambda _: offered)
    monkeypatch.setattr(demo, "on_cpu", lambda: True)
    assert demo.own_cpus(2) == cpus
