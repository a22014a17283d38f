"""What our server does before it hands over to vLLM's."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest
from vllm.engine.arg_utils import EngineArgs

from vllm_sched.engine.server import check_before_loading, pass_on
from vllm_sched.errors import UsageError
from vllm_sched.workers.tiny_model import tiny_model

USR1 = signal.SIGUSR1


@pytest.fixture
def _usr1_waits() -> Iterator[None]:
    """Have children begin with the signal blocked: it waits until they look."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {USR1})
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def await_it(end: Connection) -> None:
    """Play the engine."""
    end.send(signal.sigwait({USR1}))


def look_for_it(end: Connection) -> None:
    """Play another process."""
    end.recv()
    end.send(USR1 in signal.sigpending())


@pytest.mark.usefixtures("_usr1_waits")
@pytest.mark.parametrize("name", ["EngineCore", "EngineCore_DP1"])
def test_a_signal_reaches_the_engines_and_nobody_else(name: str) -> None:
    context = multiprocessing.get_context("fork")
    ends = {}
    children = []
    for title, body in ((name, await_it), ("ApiServer_0", look_for_it)):
        ends[title], theirs = context.Pipe()
        child = context.Process(target=body, args=(theirs,), name=title, daemon=True)
        child.start()
        children.append(child)
    pass_on(USR1)
    assert ends[name].poll(30)
    assert ends[name].recv() == USR1
    ends["ApiServer_0"].send("look")
    assert ends["ApiServer_0"].poll(30)
    assert ends["ApiServer_0"].recv() is False
    for child in children:
        child.join(30)
        assert child.exitcode == 0


def test_settings_are_checked_before_the_model_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    # What it puts in the place of this goes with the test.
    monkeypatch.setattr(EngineArgs, "create_engine_config", EngineArgs.create_engine_config)
    check_before_loading()

    def configure(threshold: int) -> None:
        # The context is of the model, stretched: none of its files says how far.
        EngineArgs(
            model=str(tiny_model()),
            dtype="float32",
            hf_overrides={
                "max_position_embeddings": 1024,
                "rope_parameters": {
                    "rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0,
                },
            },
            additional_config={
                "vllm_sched": {"long_prompt": {"long_prefill_token_threshold": threshold}}
            },
        ).create_engine_config()  # fmt: skip

    configure(2048)
    with pytest.raises(UsageError, match="max_model_len=2048"):
        configure(2049)
