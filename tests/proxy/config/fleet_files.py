"""Fleet files of tests, and their problems."""

from __future__ import annotations

from typing import Any

import yaml

from proxy.config import FleetConfig, parse
from proxy.errors import ConfigError

Json = dict[str, Any]


def worker(port: int = 9001, name: str = "", **fields: Any) -> Json:
    """Return a worker on a port of this machine; a field of None is left out."""
    made = {"name": name or f"w{port}", "url": f"http://127.0.0.1:{port}"} | fields
    return {key: value for key, value in made.items() if value is not None}


def fleet(*workers: Json, **blocks: Any) -> str:
    """Return a fleet file with these blocks, and with one worker if none is given."""
    return yaml.safe_dump({"model": "m", "workers": list(workers) or [worker()], **blocks})


def read(*workers: Json, **blocks: Any) -> FleetConfig:
    """Parse such a fleet file."""
    return parse(fleet(*workers, **blocks), "fleet.yaml")


def problems(text: str) -> dict[str, str]:
    """Return the messages of a file's problems by path; each is a line of the error."""
    try:
        parse(text, "fleet.yaml")
    except ConfigError as error:
        found = error
    else:
        return {}
    assert str(found).splitlines() == [f"fleet.yaml: {problem}" for problem in found.problems]
    return {problem.path: problem.message for problem in found.problems}


def problems_of(*workers: Json, **blocks: Any) -> dict[str, str]:
    """Return the problems of such a fleet file."""
    return problems(fleet(*workers, **blocks))


def blocks_of(path: str, value: object) -> Json:
    """Return the blocks of a fleet file with a value at a path."""
    for name in reversed(path.split(".")):
        value = {name: value}
    assert isinstance(value, dict)
    return value


def check_problem(found: dict[str, str], path: str, words: str) -> None:
    """Check that the only problem is at a path, and that its message has all `words`."""
    assert list(found) == [path]
    for part in words.split(" & "):
        assert part in found[path]
