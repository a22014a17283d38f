"""`vllm-sched up`: real processes, with a cheap server instead of vLLM."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import proxy.app
from proxy.config import FleetConfig
from tests.cli.program import Program
from tests.workers.servers import assert_gone, eventually
from vllm_sched.cli.fleet import up
from vllm_sched.cli.main import main
from vllm_sched.workers import connectors, launch
from vllm_sched.workers.launch import free_port

ROOT = Path(__file__).parents[3]
SERVER = "tests.workers.health_server"
ENV = {"PYTHONPATH": str(ROOT)}
# `vllm-sched` with the cheap server as worker.
CHEAP = f"""
import sys
from vllm_sched.workers import connectors, launch
launch.SERVER_MODULE, launch.on_cpu = {SERVER!r}, lambda: True
from vllm_sched.cli.main import main
sys.exit(main())
"""


@pytest.fixture(autouse=True)
def cheap(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Launch cheap servers, with their logs in the test's folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(launch, "SERVER_MODULE", SERVER)
    monkeypatch.setattr(launch, "on_cpu", lambda: True)


def written(folder: Path, *workers: dict[str, Any], **blocks: Any) -> str:
    path = folder / "fleet.yaml"
    path.write_text(yaml.safe_dump({"model": "m", "workers": list(workers), **blocks}))
    return str(path)


def launched(name: str, *args: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "launch": {"args": list(args), "env": ENV}, **more}


def run_instead_of_router(
    monkeypatch: pytest.MonkeyPatch, do: Callable[[FleetConfig], int]
) -> None:
    """Replace the router's `run` with `do`."""
    monkeypatch.setattr(proxy.app, "run", lambda _, *, config, **__: do(config))


def processes() -> dict[int, str]:
    """Return the cheap servers that this test started, by process id."""
    mine = f"TMPDIR={os.environ['TMPDIR']}"
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            variables = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if words[1:3] == ["-m", SERVER] and mine in variables:
            found[int(entry.name)] = " ".join(words)
    return found


def answers(url: str, path: str = "/health") -> bool:
    try:
        with urllib.request.urlopen(f"{url}{path}", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def test_workers_run_only_while_the_router_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pids: list[int] = []

    def serve(config: FleetConfig) -> int:
        urls = [worker.url for worker in config.workers if worker.url]
        assert len(set(urls)) == 3
        for url in urls[:2]:
            eventually(lambda url=url: answers(url))
        ports = [url.rpartition(":")[2] for url in urls]
        pids.extend(pid for pid, line in processes().items() if any(p in line for p in ports))
        return 5

    run_instead_of_router(monkeypatch, serve)
    elsewhere = {"name": "c", "url": f"http://127.0.0.1:{free_port()}"}
    path = written(tmp_path, launched("a"), launched("b"), elsewhere)
    assert main(["up", path, "--log-dir", str(tmp_path / "logs")]) == 5
    assert len(pids) == 2
    assert_gone(pids)
    out = capsys.readouterr().err
    assert f"a: starting; log: {tmp_path}/logs/a.log\n" in out
    assert out.endswith("all workers have stopped\n")
    assert {p.name for p in (tmp_path / "logs").iterdir()} == {"a.log", "b.log"}


def test_dead_worker_is_reported_with_its_log_and_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed: list[str] = []

    def serve(_: FleetConfig) -> int:
        def twice() -> bool:
            printed.append(capsys.readouterr().err)
            return "".join(printed).count("a died with exit code 1") == 2

        eventually(twice)
        return 0

    run_instead_of_router(monkeypatch, serve)
    assert main(["up", written(tmp_path, launched("a", "--die"))]) == 0
    text = "".join(printed)
    assert "restart in 1 s; log: " in text
    assert "restart in 2 s; log: " in text
    assert "\n    no such device\n" in text


def test_interrupt_before_the_router_handles_signals_exits_with_130(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def serve(_: FleetConfig) -> int:
        os.kill(os.getpid(), signal.SIGTERM)  # handled like Ctrl-C
        raise AssertionError("not interrupted")

    run_instead_of_router(monkeypatch, serve)
    before = signal.getsignal(signal.SIGTERM)
    assert main(["up", written(tmp_path, launched("a"))]) == 130
    assert signal.getsignal(signal.SIGTERM) is before
    assert "interrupted" in capsys.readouterr().err


def test_wiring_of_transfer_workers_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: Program
) -> None:
    monkeypatch.setattr(connectors, "_factory_source", lambda: '"NixlConnector"')
    run_instead_of_router(monkeypatch, lambda _: 0)
    ends = launched("p", role="prefill"), launched("d", role="decode")
    printed = program("up", written(tmp_path, *ends, transfer="nixl")).err
    assert "p: NixlConnector as kv_producer, side channel 127.0.0.1:" in printed
    assert "d: NixlConnector as kv_consumer, side channel 127.0.0.1:" in printed
    assert "NIXL's thread sleeps between polls, blocks of 128" in printed


def problem_lines(program: Program, path: str) -> list[tuple[str, str]]:
    """Return the places and messages that `up` reports before any start."""
    lines = program("up", path, status=2).err.splitlines()
    return [(line.split(": ")[2], line) for line in lines]


def test_unavailable_cpus_and_ports_are_refused(tmp_path: Path, program: Program) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        path = written(
            tmp_path,
            {"name": "a", "launch": {"cpus": [0, 5000]}},
            {"name": "b", "launch": {}, "url": url},
            {"name": "c", "launch": {}, "url": "http://192.0.2.1:9000"},
        )
        (cpus, what), (one, why), (other, _) = problem_lines(program, path)
    assert (cpus, one, other) == ("workers[0].launch.cpus", "workers[1].url", "workers[2].url")
    assert "5000: this machine has CPUs" in what
    assert "Address already in use" in why
    assert "another port" in why


@pytest.mark.parametrize("own", ["additional-config: {other: 1}", "additional-config.other: 1"])
def test_forbidden_flags_of_a_config_file_are_refused(
    tmp_path: Path, program: Program, own: str
) -> None:
    """The launch block's own flags come later and would override them."""
    flags = tmp_path / "flags.yaml"
    flags.write_text(f"port: 8000\napi-key: hush\n{own}\n")
    args = {"args": ["--config", str(flags)]}
    workers = [
        {"name": "a", "launch": args | {"policies": {"long_prompt": {}}}},
        {"name": "b", "launch": args},
    ]
    (a, first), (b, second), (c, third) = problem_lines(program, written(tmp_path, *workers))
    assert (a, b, c) == (*["workers[0].launch.args"] * 2, "workers[1].launch.args")
    assert "'--additional-config': is set by launch.policies" in first
    assert "'--api-key': comes from the worker's api_key" in second
    assert "hush" not in first + second + third


def test_fleet_without_launch_and_wrong_log_folder_are_refused(
    tmp_path: Path, program: Program
) -> None:
    external = written(tmp_path, {"name": "a", "url": "http://a"})
    assert "use `vllm-sched router`" in program.refusal("up", external)
    path = written(tmp_path, launched("a"))
    assert f"--log-dir {path}: File exists" in program.refusal("up", path, "--log-dir", path)


def worker_of(tmp_path: Path, worker: dict[str, Any], **blocks: Any) -> launch.Worker:
    config = up.assign_ports(proxy.app.load(Path(written(tmp_path, worker, **blocks))))
    return up.make_worker(config, config.workers[0], tmp_path, tmp_path)


def value(made: launch.Worker, flag: str) -> str:
    return made.command[made.command.index(flag) + 1]


def test_launch_command_has_the_settings_of_the_file(tmp_path: Path) -> None:
    made = worker_of(
        tmp_path,
        {
            "name": "a",
            "url": "http://localhost:18999",
            "model": "served",
            "max_model_len": 4096,
            "api_key": "hush",
            "launch": {
                "model": "org/loaded",
                "args": ["--max-num-seqs", "4"],
                "policies": {"long_prompt": {"max_wait_s": 5}},
                "cpus": [0],
                "env": {"A": "b"},
            },
        },
    )
    assert value(made, "--model") == "org/loaded"
    assert value(made, "--served-model-name") == "served"
    assert (value(made, "--host"), value(made, "--port")) == ("localhost", "18999")
    assert (value(made, "--max-model-len"), value(made, "--max-num-seqs")) == ("4096", "4")
    assert '{"long_prompt": {"max_wait_s": 5}}' in value(made, "--additional-config")
    assert "hush" not in made.command
    assert made.cpus == (0,)
    assert made.log == tmp_path / "a.log"
    assert made.deadline_s > 600
    plain = worker_of(tmp_path, launched("a", "--max-model-len=99", max_model_len=99)).command
    assert "--scheduler-cls" not in plain
    assert [word for word in plain if "max-model-len" in word] == ["--max-model-len=99"]


def test_model_is_a_folder_beside_the_file_or_built_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "weights").mkdir()
    made = worker_of(tmp_path, {"name": "a", "launch": {"model": "weights"}})
    assert value(made, "--model") == str(tmp_path / "weights")
    tiny = {"name": "a", "launch": {"model": "tiny"}}
    made = worker_of(tmp_path, tiny)
    assert (Path(value(made, "--model")) / "model.safetensors").is_file()
    (tmp_path / "file").touch()
    monkeypatch.setenv("VLLM_SCHED_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(launch.WorkerError, match=r"set VLLM_SCHED_CACHE to a writable.*\Z"):
        worker_of(tmp_path, tiny)


def test_api_key_is_passed_in_the_environment(tmp_path: Path) -> None:
    made = worker_of(tmp_path, launched("a", api_key="hush"))
    code = "import os; print(os.environ['VLLM_API_KEY']); exit(1)"
    made.command = (sys.executable, "-c", code)
    with pytest.raises(launch.WorkerError, match="hush"), made:
        pytest.fail("entered")


def test_workers_of_one_device_load_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "on_cpu", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    one = {"CUDA_VISIBLE_DEVICES": "1"}
    assert [up.device(env) for env in ({}, one, {})] == ["0,1", "1", "0,1"]
    monkeypatch.setattr(launch, "on_cpu", lambda: True)
    assert up.device(one) is None


@pytest.fixture
def running(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str, list[int]]]:
    """Run `vllm-sched up` with two cheap workers behind the real router."""
    port = free_port()
    path = written(
        tmp_path,
        launched("a", role="short"),
        launched("b", role="long"),
        router={"port": port, "admin": {"port": 0}},
    )
    command = [sys.executable, "-c", CHEAP, "up", path]
    before = processes()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as p:
        url = f"http://127.0.0.1:{port}"
        pids: set[int] = set()

        def up_and_ready() -> bool:
            pids.update(processes().keys() - before.keys())
            return p.poll() is not None or (len(pids) >= 2 and answers(url, "/ready"))

        eventually(up_and_ready)
        yield p, url, [*pids]
        p.kill()


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 0), (signal.SIGKILL, -9)]
)
def test_no_worker_is_left_after_any_signal(
    running: tuple[subprocess.Popen[str], str, list[int]], number: signal.Signals, status: int
) -> None:
    process, url, workers = running
    assert answers(url, "/v1/models")
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == status, output
    assert "a: starting; log: " in output
    assert len(workers) == 2
    assert_gone(workers)
