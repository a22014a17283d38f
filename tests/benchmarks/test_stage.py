"""The routers and opponents of the benchmark."""

from __future__ import annotations

import os
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.router import opponents
from benchmarks.router.opponents import OpponentError, install, peers
from benchmarks.router.stage import OURS, Cpus, Side, our_router
from proxy.config import load
from vllm_sched.workers.launch import Worker, WorkerError


def test_our_router_is_started_by_its_command(tmp_path: Path) -> None:
    urls = ["http://127.0.0.1:9001", "http://127.0.0.1:9002"]
    router = our_router(tmp_path, urls)
    program, command, path = router.command
    assert (Path(program).name, command, router.name) == ("vllm-sched", "router", OURS)
    fleet = load(Path(path))
    assert [(w.role, w.url) for w in fleet.workers] == [("short", urls[0]), ("long", urls[1])]
    assert fleet.router.port == router.port
    routing = fleet.routing
    assert (routing.policy, routing.prefix_affinity, routing.tokenize) == ("adaptive", True, True)


def test_our_router_hands_everything_over_if_configured(tmp_path: Path) -> None:
    urls = ["http://127.0.0.1:9001", "http://127.0.0.1:9002"]
    fleet = load(Path(our_router(tmp_path, urls, hands_over=True).command[2]))
    assert [(w.role, w.url) for w in fleet.workers] == [("prefill", urls[0]), ("decode", urls[1])]
    assert fleet.routing.disaggregate_above == 1


def test_proxy_variables_are_removed_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("KEPT", "yes")
    env = our_router(tmp_path, ["http://127.0.0.1:9001"] * 2)._env
    assert "HTTP_PROXY" not in env
    assert env["KEPT"] == "yes"


@pytest.mark.parametrize("opponent", [*opponents.ROUND_ROBIN, *opponents.CACHE_AWARE])
def test_opponent_command_has_workers_ports_and_policy(opponent: opponents.Opponent) -> None:
    command = opponent.command(Path("/peers"), ["http://a:1", "http://b:2"], (5000, 5001))
    assert command[0] == f"/peers/bin/{opponent.script}"
    pairs = dict(pairwise(command))
    assert pairs["--policy"] == ("cache_aware" if "cache" in opponent.name else "round_robin")
    assert (pairs["--port"], pairs["--prometheus-port"]) == ("5000", "5001")
    at = command.index("--worker-urls")
    assert command[at + 1 : at + 3] == ["http://a:1", "http://b:2"]


def test_opponent_with_hand_overs_has_prefill_and_decode_workers() -> None:
    command = opponents.HANDING_OVER.command(Path("/peers"), ["http://a:1", "http://b:2"], (1, 2))
    pairs = dict(pairwise(command))
    assert (pairs["--prefill"], pairs["--decode"]) == ("http://a:1", "http://b:2")
    assert "--worker-urls" not in command


def test_side_lists_its_live_processes() -> None:
    assert Side("direct", 1).pids() == []
    router = Worker(["sh", "-c", "echo so long; exec sleep 60"], port=1, name="router")
    router.start()
    try:
        side, process = Side("router", 1, router), router._process
        assert process is not None
        assert side.pids() == [process.pid]
        while not router.log.read_text():
            time.sleep(0.01)
        process.kill()
        process.wait()
        with pytest.raises(WorkerError, match="so long"):
            side.pids()
    finally:
        router.stop()


def test_cpus_are_split_if_there_are_two(monkeypatch: pytest.MonkeyPatch) -> None:
    for available, expected in (
        ({3}, Cpus()),
        ({0, 1}, Cpus(frozenset({1}), frozenset({0}))),
        ({2, 4, 5}, Cpus(frozenset({5}), frozenset({2, 4}))),
    ):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, available=available: available)
        assert Cpus.apart() == expected


def test_opponents_are_installed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, ...]] = []
    monkeypatch.setattr(opponents, "_run", lambda *command: ran.append(command))
    peers(tmp_path).mkdir()
    install(tmp_path)
    assert [command[1] for command in ran] == ["venv", "pip"]
    assert set(opponents.PINS) < set(ran[1])
    assert str(peers(tmp_path)) in ran[0]
    assert sys.prefix not in "".join(ran[1][1:])
    install(tmp_path)
    assert len(ran) == 2
    monkeypatch.setattr(opponents, "PINS", ("vllm-router==9",))
    install(tmp_path)
    assert len(ran) == 4


def test_failed_installation_is_reported_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "uv").write_text("#!/bin/sh\necho no network >&2\nexit 1\n")
    (tmp_path / "uv").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(OpponentError, match=r"--without-peers:\nno network"):
        install(tmp_path)
    assert not (peers(tmp_path) / "pins.txt").exists()
