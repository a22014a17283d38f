"""The systemd units, verified by systemd if it is installed."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from proxy.config import FleetConfig, WorkerConfig
from tests.deploy.rendered import ROOT
from vllm_sched.cli.fleet.fleet import read
from vllm_sched.cli.main import main

SYSTEMD = ROOT / "deploy" / "systemd"
PROGRAM = "/opt/vllm-sched/bin/vllm-sched"
UNITS = ("vllm-sched-router.service", "vllm-sched-worker@.service")


def unit(name: str) -> configparser.ConfigParser:
    """Return a parsed unit; a duplicate key is an error."""
    parser = configparser.ConfigParser(interpolation=None, delimiters="=")
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string((SYSTEMD / name).read_text())
    return parser


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="there is no systemd here")
@pytest.mark.parametrize("name", UNITS)
def test_systemd_verifies_the_unit(name: str, tmp_path: Path) -> None:
    text = (SYSTEMD / name).read_text()
    (tmp_path / name).write_text(text.replace(PROGRAM, "/bin/true"))
    command = ["systemd-analyze", "verify", "--recursive-errors=no", str(tmp_path / name)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    # A wrong unit is reported.
    (tmp_path / name).write_text(text.replace("Restart=on-failure", "Restart=sometimes"))
    assert "sometimes" in subprocess.run(command, capture_output=True, text=True).stderr


@pytest.mark.parametrize("name", UNITS)
def test_unit_has_timeouts_restarts_and_few_privileges(name: str) -> None:
    service = unit(name)["Service"]
    default = FleetConfig(model="m", workers=(WorkerConfig(name="a", url="http://a"),))
    assert float(service["TimeoutStopSec"]) > default.router.drain_s
    # The exit code for user errors.
    assert service["RestartPreventExitStatus"] == "2"
    assert service["Restart"] == "on-failure"
    # RestartPreventExitStatus does not apply to ExecStartPre.
    assert not [key for key in service if key.startswith("ExecStartPre")]
    assert service["NoNewPrivileges"] == "yes"
    assert service["CapabilityBoundingSet"] == ""
    assert service["KillMode"] == "mixed"  # the first process stops the others
    assert service["ProtectSystem"] == "strict"
    assert int(service["LimitNOFILE"]) >= 8192
    assert service.get("DynamicUser") == "yes" or service.get("User") == "vllm-sched"
    assert service["ExecStart"].startswith(f"{PROGRAM} ")


def test_router_unit_stops_after_the_drain_reloads_and_keeps_batches_private() -> None:
    service = unit(UNITS[0])["Service"]
    longest = max(read(path).router.drain_s for path in (ROOT / "deploy" / "fleets").glob("*.yaml"))
    assert float(service["TimeoutStopSec"]) > longest
    assert service["ExecReload"] == "/bin/kill -HUP $MAINPID"
    assert service["RestartForceExitStatus"] == "SIGHUP"
    text = (SYSTEMD / UNITS[0]).read_text()
    assert f"router.batches.path: /var/lib/{service['StateDirectory']}/" in text
    assert service["StateDirectoryMode"] == "0700"


def test_units_of_different_users_have_separate_folders() -> None:
    made = (SYSTEMD / "vllm-sched.sysusers").read_text()
    assert re.search(r"^u vllm-sched ", made, re.MULTILINE)
    folders = [unit(name)["Service"]["StateDirectory"] for name in UNITS]
    assert len(set(folders)) == len(UNITS)
    assert unit(UNITS[0])["Service"]["DynamicUser"] == "yes"
    # Workers keep downloads in their own folder.
    environment = unit(UNITS[1])["Service"]["Environment"]
    paths = [each.partition("=")[2] for each in environment.split()]
    assert all(Path(path).is_relative_to(f"/var/lib/{folders[1]}") for path in paths)


@pytest.mark.parametrize("text", [None, "workers: [", "model: m\nworkers: []\nno_such: 1\n"])
def test_invalid_fleet_file_exits_with_2(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    if text is not None:
        path.write_text(text)
    start = unit(UNITS[0])["Service"]["ExecStart"].split()
    assert main([*start[1:-1], str(path)]) == 2
