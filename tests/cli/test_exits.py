"""How commands end: measuring commands handle SIGTERM like Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_sched.cli import main as program
from vllm_sched.cli.exits import interruptible, signals_as_interrupt


@pytest.fixture(autouse=True)
def default_signals() -> Iterator[None]:
    """Restore the handlers of SIGINT, SIGTERM and SIGHUP."""
    default = {signal.SIGINT: signal.default_int_handler}
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {each: signal.signal(each, default.get(each, signal.SIG_DFL)) for each in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_sigterm_and_sighup_are_handled_like_ctrl_c(number: signal.Signals) -> None:
    with signals_as_interrupt():
        with interruptible() as stopped:
            assert not stopped()
            signal.raise_signal(number)
            assert stopped()
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(number)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert signal.getsignal(number) is signal.SIG_DFL


def test_command_under_nohup_ignores_sighup() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with signals_as_interrupt():
        signal.raise_signal(signal.SIGHUP)


def test_background_job_that_ignores_ctrl_c_ends_on_sigterm() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with signals_as_interrupt(), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)


def test_interrupt_while_a_command_is_imported_prints_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(_: str) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(program, "import_module", stopped)
    assert program.main(["plan", "--gpus", "1"]) == 130
    assert capsys.readouterr().err == "vllm-sched plan: interrupted\n"


def test_reload_during_the_start_of_a_router_is_done_after_it(tmp_path: Path) -> None:
    """It must not end the router: systemd does not restart after a SIGHUP."""
    fleet = tmp_path / "fleet.yaml"
    os.mkfifo(fleet)
    worker, ports = "{name: a, url: 'http://a.test'}", "{port: 0, admin: {port: 0}}"
    text = f"model: m\nworkers: [{worker}]\nrouter: {ports}\n"
    command = [sys.executable, "-m", "vllm_sched.cli.main", "router", str(fleet)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as router:
        try:
            with fleet.open("w") as read_by_router:  # opens once the router does
                router.send_signal(signal.SIGHUP)
                read_by_router.write(text)
            assert router.stderr is not None
            assert any("/v1" in line for line in router.stderr)
            fleet.write_text(text)  # for the reload
            assert any("reloaded" in line for line in router.stderr)
        finally:
            router.kill()
