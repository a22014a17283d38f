"""`vllm-sched drain` asks a running router."""

from __future__ import annotations

import pytest

from proxy.admin.schemas import Drained, shown_worker
from proxy.core.fleet.worker import Worker
from proxy.core.model.role import Role
from proxy.core.model.specs import WorkerSpec
from tests.cli.fleet.admin import Admin
from tests.cli.fleet.conftest import FleetFile
from tests.cli.program import Program


def drained(**fields: object) -> dict[str, object]:
    worker = Worker(WorkerSpec("s0", "http://h:1", Role.GENERAL, "tiny"), 0)
    worker.draining, worker.requests = True, 3
    whole = Drained(**shown_worker(worker, 0.0).model_dump())
    return whole.model_copy(update=fields).model_dump(mode="json")


MOVED = "s0: draining, 3 requests, 7 moved\n  2 remain: field\n  1 remain: no_worker\n"


@pytest.mark.parametrize(
    ("option", "path", "shown"),
    [
        ([], "s0/drain", "s0: draining, 3 requests\n"),
        (["--undo"], "s0/undrain", "s0: draining\n"),
        (["--now"], "s0/drain?now=true", MOVED),
    ],
)
def test_drain_prints_what_the_worker_still_has(
    option: list[str], path: str, shown: str, fleet_file: FleetFile, program: Program, admin: Admin
) -> None:
    more: dict[str, object] = {"moved": 7, "remaining": {"no_worker": 1, "field": 2}}
    admin.answer = drained(**more if option == ["--now"] else {})
    fleet = fleet_file(router={"admin": {"port": admin.server_port}})
    assert program("drain", fleet, "s0", *option).out == shown
    assert admin.requests == [(f"/admin/workers/{path}", {})]


def test_an_unknown_worker_is_reported(
    fleet_file: FleetFile, program: Program, admin: Admin
) -> None:
    admin.status, admin.answer = 404, {"error": {"message": "there is no worker 'a/b'"}}
    fleet = fleet_file(router={"admin": {"port": admin.server_port}})
    line = program.refusal("drain", fleet, "a/b", "--now")
    assert line == f"vllm-sched drain: {admin.url}: there is no worker 'a/b' (status 404)"
    assert admin.requests == [("/admin/workers/a%2Fb/drain?now=true", {})]
