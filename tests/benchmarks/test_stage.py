"""The routers and opponents of the benchmark."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from benchmarks.router import opponents
from benchmarks.router.opponents import install, peers
from benchmarks.router.stage import OURS, Cpus, our_router
from proxy.config import load


def test_our_router_is_started_by_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("KEPT", "yes")
    urls = ["http://127.0.0.1:9001", "http://127.0.0.1:9002"]
    router = our_router(tmp_path, urls)
    assert "HTTP_PROXY" not in router.env
    assert router.env["KEPT"] == "yes"
    program, command, path = router.command
    assert (Path(program).name, command, router.name) == ("vllm-sched", "router", OURS)
    fleet = load(Path(path))
    assert [(w.role, w.url) for w in fleet.workers] == [("short", urls[0]), ("long", urls[1])]
    assert fleet.router.port == router.port
    routing = fleet.routing
    assert (routing.policy, routing.prefix_affinity, routing.tokenize) == ("adaptive", True, True)
    fleet = load(Path(our_router(tmp_path, urls, hands_over=True).command[2]))
    assert [(w.role, w.url) for w in fleet.workers] == [("prefill", urls[0]), ("decode", urls[1])]
    assert fleet.routing.disaggregate_above == 1


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
