"""Commands are found by name, and each imports only its own modules."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_sched.cli import main
from vllm_sched.cli.fleet import key


@pytest.mark.parametrize("command", main.MODULES)
def test_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main.main([command, "--help"])
    assert exited.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: vllm-sched {command} ")


def test_serve_refuses_flags_before_the_model_and_its_usage_shows_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main.main(["serve", "--policy", "lanes", "some/model"]) == 2
    assert "give MODEL first" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main.main(["serve", "--help"])
    assert capsys.readouterr().out.startswith("usage: vllm-sched serve MODEL [-h] [--policy NAME]")


def test_help_and_unknown_command_list_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--help"], ["nonsense"]):
        with pytest.raises(SystemExit):
            main.main(words)
        printed = "".join(capsys.readouterr())
        assert [name for name in main.MODULES if name not in printed] == []


@pytest.mark.parametrize(
    ("command", "modules"),
    [
        ("key", "exits fleet fleet.key main"),
        ("router", "exits fleet fleet.fleet fleet.journals fleet.transfer_checks main"),
    ],
)
def test_command_imports_no_module_of_another(command: str, modules: str) -> None:
    code = (
        f"import sys; from vllm_sched.cli.main import parser; parser({command!r}); "
        "print(*sorted(m[15:] for m in sys.modules if m.startswith('vllm_sched.cli.'))); "
        "print(*sorted({'aiohttp', 'rich', 'vllm_sched.bench'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{modules}\n\n"


def test_closed_stderr_does_not_send_errors_to_stdout() -> None:
    command = [sys.executable, "-m", "vllm_sched.cli.main", "check", "nowhere.yaml"]
    for closing, expected in (('exec "$@" 2>&-', ""), ('exec "$@" 2>&1', "vllm-sched check: ")):
        done = subprocess.run(["sh", "-c", closing, "sh", *command], capture_output=True, text=True)
        assert done.returncode == 2
        assert done.stdout[:18] == expected


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", ["key", "--version"])
def test_reader_that_ends_causes_no_traceback(command: str, unbuffered: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "vllm_sched.cli.main", command],
            stdout=writer,
            stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.parametrize("unwritable", ["pipe", "disk", "terminal"])
def test_results_are_saved_although_they_cannot_be_printed(unwritable: str, tmp_path: Path) -> None:
    saved, fleet = tmp_path / "saved.json", tmp_path / "fleet.yaml"
    fleet.write_text("model: m\nworkers:\n  - {name: w0, profile: h100-8b, url: http://h:1}\n")
    words = ["--engine", "fluid", "--workload", "9x9", "--num-requests", "9", "--save", str(saved)]
    if unwritable == "disk":
        output = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, output = os.pipe() if unwritable == "pipe" else os.openpty()
        os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "vllm_sched.cli.main", "simulate", str(fleet), *words],
            stdout=output, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    finally:
        os.close(output)
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    assert json.loads(saved.read_text())["completed"] == 9
    if unwritable != "pipe":
        assert done.stderr.splitlines()[-1].startswith("vllm-sched simulate: standard output: ")


def failing(error: OSError) -> Callable[[], str]:
    def fail() -> str:
        raise error

    return fail


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_full_disk_under_another_file_is_reported_with_its_name(
    number: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(key, "make_key", failing(OSError(number, os.strerror(number), "/x/y")))
    assert main.main(["key"]) == 2
    assert capfd.readouterr().err == f"vllm-sched key: /x/y: {os.strerror(number)}\n"


@pytest.mark.parametrize("number", [errno.EPIPE, errno.ENOSPC])
def test_error_that_names_no_file_is_not_taken_for_one_of_standard_output(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Example: a router that closes its connection."""
    monkeypatch.setattr(key, "make_key", failing(OSError(number, os.strerror(number))))
    with pytest.raises(OSError, match=os.strerror(number)):
        main.main(["key"])
