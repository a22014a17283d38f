"""`router.processes` in the fleet file."""

from __future__ import annotations

import pytest

from proxy.config import parse
from proxy.errors import ConfigError

FILE = "model: tiny\nworkers: [{name: a, url: 'http://127.0.0.1:9'}]\nrouter: {processes: %s}\n"


@pytest.mark.parametrize("number", ["1", "2", "64", "auto"])
def test_processes_may_be_a_number_or_auto(number: str) -> None:
    assert str(parse(FILE % number, "fleet.yaml").router.processes) == number


def test_default_is_one_process() -> None:
    assert parse(FILE.partition("router")[0], "fleet.yaml").router.processes == 1


@pytest.mark.parametrize("number", ["0", "65", "-1", "many", "AUTO"])
def test_invalid_values_name_the_range(number: str) -> None:
    with pytest.raises(ConfigError, match=r"router\.processes: .*from 1 to 64, or auto"):
        parse(FILE % number, "fleet.yaml")


@pytest.mark.parametrize("number", ["true", "1.5", "[2]"])
def test_other_types_are_refused(number: str) -> None:
    with pytest.raises(ConfigError, match=r"router\.processes"):
        parse(FILE % number, "fleet.yaml")
