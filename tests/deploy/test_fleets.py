"""The example fleet files: valid, and for the stated number of GPUs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.cli.conftest import no_collection
from tests.deploy.rendered import ROOT
from vllm_sched.cli.fleet.fleet import read
from vllm_sched.cli.main import main
from vllm_sched.workers.flags import int_value

__all__ = ["no_collection"]

FLEETS = ROOT / "deploy" / "fleets"
GPUS = {"one-gpu": 1, "two-gpus": 2, "four-gpus": 4, "eight-gpus": 8}


@pytest.mark.parametrize("file", sorted(FLEETS.glob("*.yaml")), ids=lambda path: path.stem)
def test_fleet_file_is_valid_and_shows_its_command(file: Path) -> None:
    router = read(file).router
    assert read(file).workers
    assert not router.allow_anonymous  # without tenants the router listens on loopback only
    assert router.admin.host == "127.0.0.1"
    assert re.search(
        rf"^#     vllm-sched (up|router)\s+deploy/fleets/{file.name}",
        file.read_text(),
        re.MULTILINE,
    )


@pytest.mark.parametrize(("name", "gpus"), GPUS.items())
def test_every_gpu_has_one_worker_with_a_drain_time_and_a_policy(name: str, gpus: int) -> None:
    fleet = read(FLEETS / f"{name}.yaml")
    used: list[int] = []
    for worker in fleet.workers:
        assert worker.launch is not None
        devices = worker.launch.env.get("CUDA_VISIBLE_DEVICES", "0").split(",")
        assert len(devices) == (int_value(worker.launch.args, "--tensor-parallel-size") or 1)
        used += map(int, devices)
        assert (int_value(worker.launch.args, "--shutdown-timeout") or 0) >= fleet.router.drain_s
        # Workers with long prompts have a policy.
        assert bool(worker.launch.policies) is (worker.role != "short")
    assert sorted(used) == list(range(gpus))


def test_reference_fleet_can_be_simulated_with_its_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = FLEETS / "reference-24.yaml"
    assert len(read(file).tenants) == 50
    text = file.read_text().replace("\\\n#", "")
    (command,) = re.findall(r"^#     vllm-sched (simulate .*)$", text, re.MULTILINE)
    words = [str(file) if each.endswith(file.name) else each for each in shlex.split(command)]
    assert main([*words, "--num-requests", "100"]) == 0
    text = "".join(capsys.readouterr())
    assert "100 requests in" in text
    assert "not in the fleet file" not in text
