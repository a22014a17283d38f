"""`vllm-sched drain` asks a running router."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxy.admin.schemas import Drained, shown_worker
from proxy.core.fleet.worker import Worker
from proxy.core.model.role import Role
from proxy.core.model.specs import WorkerSpec
from tests.cli.fleet.test_fleet import FLEET, Admin, admin, written
from vllm_sched.cli.main import main

__all__ = ["admin"]


def drained(**fields: object) -> dict[str, object]:
    worker = Worker(WorkerSpec("s0", "http://h:1", Role.GENERAL, "tiny"), 0)
    worker.draining, worker.requests = True, 3
    whole = Drained(**shown_worker(worker, 0.0).model_dump())
    return whole.model_copy(update=fields).model_dump(mode="json")


def run(tmp_path: Path, admin: Admin, *options: str) -> int:
    fleet = FLEET | {"router": {"admin": {"port": admin.server_port}}}
    return main(["drain", written(tmp_path, fleet), *options])


@pytest.mark.parametrize(
    ("options", "path", "shown"),
    [
        ((), "s0/drain", "s0: draining, 3 requests\n"),
        (("--undo",), "s0/undrain", "s0: draining\n"),
        (
            ("--now",),
            "s0/drain?now=true",
            "s0: draining, 3 requests, 7 moved\n  2 remain: field\n  1 remain: no_worker\n",
        ),
    ],
)
def test_drain_prints_what_the_worker_still_has(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    admin: Admin,
    options: tuple[str, ...],
    path: str,
    shown: str,
) -> None:
    more: dict[str, object] = {"moved": 7, "remaining": {"no_worker": 1, "field": 2}}
    admin.answer = drained(**more) if "--now" in options else drained()
    assert run(tmp_path, admin, "s0", *options) == 0
    assert admin.requests == [(f"/admin/workers/{path}", {})]
    assert capsys.readouterr().out == shown


def test_an_unknown_worker_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], admin: Admin
) -> None:
    admin.status, admin.answer = 404, {"error": {"message": "there is no worker 'a/b'"}}
    assert run(tmp_path, admin, "a/b", "--now") == 2
    assert admin.requests == [("/admin/workers/a%2Fb/drain?now=true", {})]
    assert capsys.readouterr().err == (
        f"vllm-sched drain: {admin.url}: there is no worker 'a/b' (status 404)\n"
    )
