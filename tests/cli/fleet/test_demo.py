"""`vllm-sched demo`: the fleets that it compares. `make demo` runs a real one."""

from __future__ import annotations

import argparse
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from proxy.config import FleetConfig, load, parse
from tests.bench.canned import canned_comparison
from tests.cli.program import Program
from vllm_sched.bench.compare.compare import Comparison, ComparisonPlan
from vllm_sched.bench.compare.workloads import build
from vllm_sched.cli.fleet import demo
from vllm_sched.cli.fleet.up import assign_ports
from vllm_sched.errors import UsageError
from vllm_sched.workers import connectors, launch

ROOT = Path(__file__).parents[3]
FLEET = ROOT / "deploy/fleets/cpu-demo.yaml"
ENDS = ROOT / "deploy/fleets/prefill-decode.yaml"


@pytest.fixture(autouse=True)
def nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that a CPU build of vLLM with NIXL is installed."""
    monkeypatch.setattr(launch, "on_cpu", lambda: True)
    monkeypatch.setattr(demo, "on_cpu", lambda: True)
    monkeypatch.setattr(connectors, "_factory_source", lambda: '"NixlConnector"')


def test_watch_hints_name_commands_and_files_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    live, dashboards = demo.watch_hints(FLEET, load(FLEET))
    assert live.endswith("cpu-demo.yaml`, and the status page is http://127.0.0.1:18109/")
    folder = FLEET.parents[2]
    named = re.findall(r"[\w/.-]+/[\w*-]+\.(?:yaml|md|json)", dashboards)
    assert len(named) == 3
    assert all(list(folder.glob(each)) for each in named)
    # A shell finds the command from the Makefile's folder, without its PATH.
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", "/nowhere")
    commands = re.findall("`(.*?) up ", demo.watch_hints(FLEET, load(FLEET))[0])
    assert [Path(each).name for each in commands] == ["vllm-sched"]
    assert Path(commands[0]).is_file()
    monkeypatch.setenv("PATH", str(Path(commands[0]).parent.absolute()))
    assert demo.watch_hints(FLEET, load(FLEET))[0].startswith("live: `vllm-sched up ")


def test_fleet_without_launch_or_connector_is_refused(
    tmp_path: Path, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "fleet.yaml"
    source.write_text("model: tiny\nworkers: [{name: a, url: 'http://127.0.0.1:9'}]\n")
    assert "workers[0].launch: is missing" in program.refusal("demo", source)
    monkeypatch.setattr(connectors, "_factory_source", lambda: '"ExampleConnector"')
    assert "has no NixlConnector" in program.refusal("demo", FLEET)


def test_both_routers_use_the_same_uncached_workers(
    monkeypatch: pytest.MonkeyPatch, program: Program
) -> None:
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

    monkeypatch.setattr(demo.measuring, "run_measurement", measured)
    printed = program("demo", FLEET, "--rounds", "1").out
    assert printed.splitlines() == demo.watch_hints(FLEET, load(FLEET))
    pools, one_pool = (parse(files[name], name) for name in ("pools", "one-pool"))
    assert [w.url for w in pools.workers] == [w.url for w in one_pool.workers]
    assert pools.router.port != one_pool.router.port
    assert all(command[-2] == "router" for command in commands)
    worker = demo.played_worker(assign_ports(pools).workers[0], 3)
    assert worker.launch is not None
    assert worker.launch.args[-1] == "--no-enable-prefix-caching"
    assert worker.launch.cpus == (3,)


@pytest.mark.parametrize("status", [1, 130])
def test_hints_are_printed_only_after_a_success(
    status: int, monkeypatch: pytest.MonkeyPatch, program: Program
) -> None:
    def failed(play: Any, _: Any) -> int:
        handovers: list[str] = play.args[4]
        handovers.append("prefill and decode: 3 prompts handed over")
        return status

    monkeypatch.setattr(demo.measuring, "run_measurement", failed)
    printed = program("demo", FLEET, status=status).out
    assert printed == "prefill and decode: 3 prompts handed over\n"


def test_demo_routers_have_no_tenants_and_no_discovery(tmp_path: Path) -> None:
    hashed = f"sha256:{'0' * 64}"
    pools = [{"name": "others", "dns": "others.example"}]
    shared = {
        **yaml.safe_load(FLEET.read_text()),
        "tenants": [{"name": "chat", "class": "interactive", "key_hashes": [hashed]}],
        "discovery": {"pools": pools},
    }
    config = parse(yaml.safe_dump(shared), "fleet.yaml")
    file = Path(demo.router_of(config, tmp_path, "pools").command[-1])
    played = load(file)
    assert (played.tenants, played.discovery) == ((), None)
    assert roles(played) == roles(config)


def test_full_disk_is_reported_with_the_fleet_file_of_a_router(tmp_path: Path) -> None:
    (tmp_path / "pools.yaml").symlink_to("/dev/full")
    with pytest.raises(UsageError, match=f"^{tmp_path}/pools.yaml: No space left on device$"):
        demo.router_of(load(FLEET), tmp_path, "pools")


def roles(config: FleetConfig) -> list[str]:
    return [worker.role for worker in config.workers]


def test_fleets_are_compared_with_smaller_fleets() -> None:
    found = {name: config for name, (_, config) in demo.fleets_to_play(load(FLEET)).items()}
    assert {name: roles(config) for name, config in found.items()} == {
        "baseline": ["general", "general"],
        "pools": ["short", "long"],
        "halves": ["prefill", "decode"],
        "all": ["short", "long", "prefill", "decode"],
    }
    assert [config.transfer is not None for config in found.values()] == [False, False, True, True]
    for name, config in found.items():  # the router accepts each fleet
        parse(yaml.safe_dump(config.model_dump(mode="json")), name)
    pool = found["baseline"]
    # Only the router limits the short worker, which holds as much as the long one.
    assert {worker.stated_max_model_len for worker in pool.workers} == {16384}
    assert pool.routing.policy == "round_robin"
    # Two workers make one pool, or prefill and decode.
    two = [config for _, config in demo.fleets_to_play(load(ENDS)).values()]
    assert [roles(config) for config in two] == [["general", "general"], ["prefill", "decode"]]
    assert two[0].transfer is None


@pytest.mark.parametrize(
    ("offered", "cpus"), [({0, 1, 5}, [0, 1, 0, 1]), ({4}, [None, None, None, None])]
)
def test_each_worker_gets_a_processor_if_there_are_enough(
    offered: set[int], cpus: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo.os, "sched_getaffinity", lambda _: offered)
    assert demo.own_cpus(load(FLEET).workers) == cpus


PAGE = """\
# TYPE proxy_handovers_total counter
proxy_handovers_total{outcome="prefilled"} 13
proxy_handovers_total{outcome="transferred"} 12
"""


@pytest.mark.parametrize(("page", "count"), [(PAGE, 12), ("", 0)])
def test_handed_over_counts_prompts(page: str, count: int) -> None:
    plan = ComparisonPlan("tiny", build("long-blocks-short", longs=3, seed=0), rounds=2)
    text = demo.describe_handovers(page, plan)
    assert text.startswith(f"{count} prompts handed over, in 2 rounds and a warm-up round")
    assert text.endswith(", 3 of them long")


async def test_hand_overs_are_reported_for_each_fleet_with_a_transfer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    @asynccontextmanager
    async def running(*_: Any) -> AsyncIterator[None]:
        yield

    async def measure(*_: Any) -> None:
        pass

    for name, stub in {"running": running, "measure": measure, "_page": lambda _: PAGE}.items():
        monkeypatch.setattr(demo, name, stub)
    monkeypatch.setattr(demo, "make_worker", lambda *_: None)
    lines: list[str] = []
    plan = ComparisonPlan("tiny", build("long-blocks-short", seed=0), 1)
    await demo._play(ROOT, assign_ports(load(FLEET)), plan, tmp_path, lines, None)  # type: ignore[arg-type]
    assert [line.partition(":")[0] for line in lines] == ["prefill and decode", "all four roles"]


def test_three_contenders_are_printed_drawn_and_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two = canned_comparison()
    third = replace(canned_comparison().contenders[1], role="halves", label="P/D")
    third.rounds[0].records[1].error = "gone"

    async def play(_: Any) -> Comparison:
        return replace(two, contenders=[*two.contenders, third])

    arguments = argparse.Namespace(save=tmp_path / "c.json", plot=tmp_path / "c.svg")
    assert demo.measuring.run_measurement(play, arguments) == 1
    printed = capsys.readouterr().out
    assert "short prompts" in printed
    assert "halves: long: gone" in printed
    assert "P/D" in (tmp_path / "c.svg").read_text()
    assert (tmp_path / "c.json").is_file()
