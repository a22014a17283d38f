"""The fleet files that are there to be used: right, and for as many GPUs as they say."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from proxy.config import FleetConfig
from tests.deploy.rendered import ROOT
from vllm_sched.cli.fleet.fleet import read
from vllm_sched.cli.main import main

FLEETS = ROOT / "deploy" / "fleets"
GPUS = {"one-gpu": 1, "two-gpus": 2, "four-gpus": 4, "eight-gpus": 8}


@pytest.mark.parametrize("file", sorted(FLEETS.glob("*.yaml")), ids=lambda path: path.stem)
def test_each_is_good_and_says_how_to_use_it(file: Path) -> None:
    assert read(file).workers
    assert re.search(
        rf"^#     vllm-sched (up|router)\s+deploy/fleets/{file.name}",
        file.read_text(),
        re.MULTILINE,
    )


@pytest.mark.parametrize("file", sorted(FLEETS.glob("*.yaml")), ids=lambda path: path.stem)
def test_none_lets_whoever_reaches_it_use_it_without_a_key(file: Path) -> None:
    router = read(file).router
    assert not router.allow_anonymous  # so that without tenants it listens on loopback alone
    assert router.admin.host == "127.0.0.1"


def config(name: str) -> FleetConfig:
    """Read one."""
    return read(FLEETS / f"{name}.yaml")


@pytest.mark.parametrize(("name", "gpus"), GPUS.items())
def test_every_gpu_has_one_worker(name: str, gpus: int) -> None:
    used: list[int] = []
    for worker in config(name).workers:
        assert worker.launch is not None
        devices = worker.launch.env.get("CUDA_VISIBLE_DEVICES", "0").split(",")
        (split,) = [
            int(arg.partition("=")[2])
            for arg in worker.launch.args
            if arg.startswith("--tensor-parallel-size=")
        ] or [1]
        assert len(devices) == split
        used += map(int, devices)
    assert sorted(used) == list(range(gpus))


@pytest.mark.parametrize("name", GPUS)
def test_requests_that_run_are_waited_for(name: str) -> None:
    fleet = config(name)
    for worker in fleet.workers:
        assert worker.launch is not None
        (seconds,) = [
            int(arg.partition("=")[2])
            for arg in worker.launch.args
            if arg.startswith("--shutdown-timeout=")
        ]
        assert seconds >= fleet.router.drain_s


@pytest.mark.parametrize("name", GPUS)
def test_whoever_prefills_long_prompts_has_the_policy_for_them(name: str) -> None:
    for worker in config(name).workers:
        assert worker.launch is not None
        assert bool(worker.launch.policies) is (worker.role != "short")


def test_the_reference_fleet_is_simulated_with_the_applications_it_is_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = FLEETS / "reference-24.yaml"
    assert len(config("reference-24").tenants) == 50
    told = file.read_text().replace("\\\n#", "")
    (command,) = re.findall(r"^#     vllm-sched (simulate .*)$", told, re.MULTILINE)
    words = [str(file) if each.endswith(file.name) else each for each in shlex.split(command)]
    assert main([*words, "--num-requests", "100"]) == 0
    told = "".join(capsys.readouterr())
    assert "100 requests in" in told
    assert "not in the fleet file" not in told
