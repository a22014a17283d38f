"""Fleet files and a fake admin API."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from tests.cli.fleet.admin import Admin
from tests.cli.program import Printed, Program

FleetFile = Callable[..., Path]
Explain = Callable[..., Printed]
FLEET = {
    "model": "tiny",
    "workers": [
        {"name": "s0", "role": "short", "url": "http://127.0.0.1:9001", "max_model_len": 2048},
        {"name": "l0", "role": "long", "url": "http://127.0.0.1:9002", "max_model_len": 16384},
    ],
    "routing": {"short_limit": 1500},
}


@pytest.fixture
def fleet_file(tmp_path: Path) -> FleetFile:
    """Return a function that writes a fleet file with changes to FLEET."""

    def write(**blocks: object) -> Path:
        path = tmp_path / "fleet.yaml"
        path.write_text(yaml.safe_dump({**FLEET, **blocks}, sort_keys=False))
        return path

    return write


@pytest.fixture
def explain(program: Program, fleet_file: FleetFile) -> Explain:
    """Return a function that runs `explain` with a fleet."""

    def run(*options: object, status: int = 0, **blocks: object) -> Printed:
        return program("explain", fleet_file(**blocks), *options, status=status)

    return run


@pytest.fixture
def admin() -> Iterator[Admin]:
    with Admin() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()
