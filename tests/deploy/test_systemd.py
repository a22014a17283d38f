"""The units, as systemd itself reads them where it is here."""

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
    """Read a unit; a key that comes twice is an error."""
    parser = configparser.ConfigParser(interpolation=None, delimiters="=")
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string((SYSTEMD / name).read_text())
    return parser


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="there is no systemd here")
@pytest.mark.parametrize("name", UNITS)
def test_systemd_has_nothing_to_say_against_it(name: str, tmp_path: Path) -> None:
    text = (SYSTEMD / name).read_text()
    (tmp_path / name).write_text(text.replace(PROGRAM, "/bin/true"))
    told = ["systemd-analyze", "verify", "--recursive-errors=no", str(tmp_path / name)]
    done = subprocess.run(told, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    # And it would, had it something to say.
    (tmp_path / name).write_text(text.replace("Restart=on-failure", "Restart=sometimes"))
    assert "sometimes" in subprocess.run(told, capture_output=True, text=True).stderr


@pytest.mark.parametrize("name", UNITS)
def test_it_stops_slowly_restarts_and_may_do_little(name: str) -> None:
    service = unit(name)["Service"]
    default = FleetConfig(model="m", workers=(WorkerConfig(name="a", url="http://a"),))
    assert float(service["TimeoutStopSec"]) > default.router.drain_s
    # What the command returns for a mistake of the user's.
    assert service["RestartPreventExitStatus"] == "2"
    assert service["Restart"] == "on-failure"
    # It says nothing of these, and one that fails is tried again for ever.
    assert not [key for key in service if key.startswith("ExecStartPre")]
    assert service["NoNewPrivileges"] == "yes"
    assert service["CapabilityBoundingSet"] == ""
    assert service["KillMode"] == "mixed"  # the others of several processes are told by the first
    assert service["ProtectSystem"] == "strict"
    assert int(service["LimitNOFILE"]) >= 8192
    assert service.get("DynamicUser") == "yes" or service.get("User") == "vllm-sched"
    assert service["ExecStart"].startswith(f"{PROGRAM} ")


def test_fleets_that_it_may_be_given_have_drained_before_it_is_killed() -> None:
    longest = max(read(path).router.drain_s for path in (ROOT / "deploy" / "fleets").glob("*.yaml"))
    assert float(unit(UNITS[0])["Service"]["TimeoutStopSec"]) > longest


def test_there_is_a_folder_for_batches_that_nobody_else_reads() -> None:
    service = unit(UNITS[0])["Service"]
    text = (SYSTEMD / UNITS[0]).read_text()
    assert f"router.batches.path: /var/lib/{service['StateDirectory']}/" in text
    assert service["StateDirectoryMode"] == "0700"


def test_no_two_of_different_users_have_one_folder() -> None:
    folders = [unit(name)["Service"]["StateDirectory"] for name in UNITS]
    assert len(set(folders)) == len(UNITS)
    assert unit(UNITS[0])["Service"]["DynamicUser"] == "yes"
    # The workers' own is where they are told to keep what they fetch.
    environment = unit(UNITS[1])["Service"]["Environment"]
    paths = [each.partition("=")[2] for each in environment.split()]
    assert all(Path(path).is_relative_to(f"/var/lib/{folders[1]}") for path in paths)


@pytest.mark.parametrize("text", [None, "workers: [", "model: m\nworkers: []\nno_such: 1\n"])
def test_a_file_that_can_not_be_used_is_what_no_restart_mends(
    text: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "fleet.yaml"
    if text is not None:
        path.write_text(text)
    start = unit(UNITS[0])["Service"]["ExecStart"].split()
    assert main([*start[1:-1], str(path)]) == 2


def test_a_reload_is_the_signal_that_the_router_reads_its_file_for() -> None:
    assert unit(UNITS[0])["Service"]["ExecReload"] == "/bin/kill -HUP $MAINPID"


def test_the_workers_user_is_made() -> None:
    made = (SYSTEMD / "vllm-sched.sysusers").read_text()
    assert re.search(r"^u vllm-sched ", made, re.MULTILINE)
