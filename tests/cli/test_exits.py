"""How commands end: measuring commands handle SIGTERM like Ctrl-C."""

from __future__ import annotations

import signal
from collections.abc import Iterator

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
