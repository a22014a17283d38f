"""Workers that `vllm-sched up` starts publish the journals that the router reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from proxy.config import FleetConfig
from proxy.errors import ConfigError
from tests.cli.fleet.test_up import run_instead_of_router
from tests.cli.program import Program
from vllm_sched.cli.fleet import fleet, up

FIRST, SECOND = "tcp://127.0.0.1:15700", "tcp://127.0.0.1:15701"
RANKS = ["--data-parallel-size=2"]


pytestmark = pytest.mark.usefixtures("cpu")


def written(folder: Path, *workers: dict[str, Any], key_file: Path | None = None) -> Path:
    journal = {} if key_file is None else {"key_file": str(key_file)}
    path = folder / "fleet.yaml"
    path.write_text(
        yaml.safe_dump({"model": "m", "workers": [*workers], "router": {"journal": journal}})
    )
    return path


def block(endpoint: str, *args: str, **settings: str) -> dict[str, Any]:
    journal = {"endpoint": endpoint, **settings}
    return {"args": [*args], "policies": {"journal": journal}}


def settings_of(config: FleetConfig, folder: Path, index: int = 0) -> dict[str, Any]:
    command = up.make_worker(config, config.workers[index], folder, folder).command
    config_json = command[command.index("--additional-config") + 1]
    settings: dict[str, Any] = json.loads(config_json)["vllm_sched"]
    return settings


def test_worker_publishes_the_journal_of_the_file(tmp_path: Path) -> None:
    worker = {"name": "a", "journal": FIRST, "launch": {"policies": {"lanes": {}}}}
    config = up.assign_ports(fleet.read(written(tmp_path, worker)))
    assert settings_of(config, tmp_path) == {"lanes": {}, "journal": {"endpoint": FIRST}}
    # Without policies, and signed.
    path = written(tmp_path, {"name": "a", "journal": FIRST, "launch": {}}, key_file=Path("key"))
    journal = {"endpoint": FIRST, "key_file": str(Path("key").absolute())}
    assert settings_of(fleet.read(path), tmp_path) == {"journal": journal}


def test_auto_selects_another_free_port_for_each_worker(tmp_path: Path) -> None:
    workers = [{"name": name, "journal": "auto", "launch": {"args": RANKS}} for name in "ab"]
    config = up.assign_ports(fleet.read(written(tmp_path, *workers)))
    journals = [worker.journal for worker in config.workers]
    assert len({*journals[0], *journals[1]}) == 4
    for index, (first, second) in enumerate(journals):
        address, _, port = first.rpartition(":")
        assert address == "tcp://127.0.0.1"
        assert second == f"{address}:{int(port) + 1}"
        assert settings_of(config, tmp_path, index) == {"journal": {"endpoint": first}}


@pytest.mark.parametrize(
    ("worker", "journal"),
    [
        ({"launch": block(FIRST)}, [FIRST]),
        ({"launch": block(FIRST, *RANKS)}, [FIRST, SECOND]),
        ({"launch": block("ipc:///run/j", *RANKS)}, ["ipc:///run/j", "ipc:///run/j_dp1"]),
        ({"launch": block("tcp://*:15700")}, [FIRST]),
        ({"launch": block("tcp://[::]:15700")}, ["tcp://[::1]:15700"]),
        ({"launch": block("tcp://0.0.0.0:15700"), "journal": "tcp://h:15700"}, ["tcp://h:15700"]),
        ({"launch": block(FIRST), "journal": FIRST}, [FIRST]),
        ({"launch": {"args": RANKS}, "journal": FIRST}, [FIRST, SECOND]),
        ({"launch": {"args": RANKS}, "journal": [FIRST, SECOND]}, [FIRST, SECOND]),
        ({"launch": {}}, []),
        ({"url": "http://h:1", "journal": FIRST}, [FIRST]),
    ],
)
def test_router_reads_what_the_worker_publishes(
    tmp_path: Path, worker: dict[str, Any], journal: list[str]
) -> None:
    config = fleet.read(written(tmp_path, {"name": "a", **worker}))
    assert list(config.workers[0].journal) == journal
    assert up.assign_ports(config).workers[0].journal == config.workers[0].journal


@pytest.mark.parametrize(
    ("workers", "where", "words"),
    [
        ([{"launch": block(FIRST), "journal": SECOND}], "journal", f"listens on {FIRST!r}; give"),
        ([{"launch": block(FIRST), "journal": "auto"}], "journal", "'auto': launch.policies"),
        ([{"launch": block("tcp://*:1"), "journal": FIRST}], "journal", "listens on 'tcp://*:1'"),
        ([{"launch": {}, "journal": [FIRST, SECOND]}], "journal", f"listen on {FIRST}; give the"),
        ([{"launch": {"args": RANKS}, "journal": "tcp://h:65535"}], "journal", "port 65536"),
        ([{"launch": {}, "journal": ["auto", FIRST]}], "journal[0]", "'auto' is the whole"),
        ([{"url": "http://h:1", "journal": "auto"}], "journal[0]", "a worker with a launch"),
        ([{"launch": block(FIRST)}, {"launch": block(FIRST)}], "journal", "is the same; give"),
        (
            [{"launch": block(FIRST, *RANKS)}, {"launch": {}, "journal": SECOND}],
            "journal", "workers[0].journal is the same",
        ),
        (
            [{"launch": {"args": ["--scheduler-cls=x"]}, "journal": FIRST}],
            "launch.args[0]", "is set by launch.policies and journal",
        ),
    ],
)  # fmt: skip
def test_contradictions_are_reported(
    tmp_path: Path, workers: list[dict[str, Any]], where: str, words: str
) -> None:
    named = [{"name": f"w{index}", **worker} for index, worker in enumerate(workers)]
    with pytest.raises(ConfigError) as refused:
        fleet.read(written(tmp_path, *named))
    [problem] = refused.value.problems
    number = len(workers) - 1
    assert (problem.path, problem.name) == (f"workers[{number}].{where}", f"w{number}")
    assert words in problem.message


@pytest.mark.parametrize(("own", "good"), [("key", True), ("other", False), (None, False)])
def test_key_of_a_block_is_the_key_of_the_router(
    tmp_path: Path, own: str | None, good: bool
) -> None:
    settings = {} if own is None else {"key_file": str(tmp_path / own)}
    worker = {"name": "a", "launch": block(FIRST, **settings)}
    path = written(tmp_path, worker, key_file=tmp_path / "key")
    if good:
        assert settings_of(fleet.read(path), tmp_path)["journal"] == {"endpoint": FIRST} | settings
        return
    with pytest.raises(ConfigError, match="give both the same file") as refused:
        fleet.read(path)
    assert "workers[0].launch.policies (a): journal.key_file: " in str(refused.value)


def test_ports_are_chosen_and_checked_by_up_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: Program
) -> None:
    worker = {"name": "a", "url": "http://127.0.0.1:9", "journal": "auto", "launch": {}}
    line = program.refusal("router", written(tmp_path, worker))
    assert "workers[0].journal: is missing, and this command" in line
    run_instead_of_router(monkeypatch, lambda _: 0)
    worker = {"name": "a", "journal": "tcp://192.0.2.1:15700", "launch": {}}
    line = program.refusal("up", written(tmp_path, worker))
    assert "workers[0].journal[0]: 'tcp://192.0.2.1:15700': " in line
