"""How commands end: measuring commands handle SIGTERM like Ctrl-C."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from vllm_sched.cli import main as program
from vllm_sched.cli.exits import interruptible, sigterm_as_interrupt


@pytest.fixture(autouse=True)
def default_signals() -> Iterator[None]:
    """Restore the default handlers of SIGINT and SIGTERM."""
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    terminate = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, terminate)


def test_sigterm_is_handled_like_ctrl_c() -> None:
    with sigterm_as_interrupt():
        with interruptible() as stopped:
            assert not stopped()
            signal.raise_signal(signal.SIGTERM)
            assert stopped()
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_background_job_that_ignores_ctrl_c_ends_on_sigterm() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with sigterm_as_interrupt(), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)


def test_interrupt_while_a_command_is_imported_prints_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(_: str) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(program, "import_module", stopped)
    assert program.main(["plan", "--gpus", "1"]) == 130
    assert capsys.readouterr().err == "vllm-sched plan: interrupted\n"
