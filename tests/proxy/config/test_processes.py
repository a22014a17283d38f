"""How many processes a fleet file may ask for."""

from __future__ import annotations

import pytest

from proxy.config import parse
from proxy.errors import ConfigError

FILE = "model: tiny\nworkers: [{name: a, url: 'http://127.0.0.1:9'}]\nrouter: {processes: %s}\n"


@pytest.mark.parametrize("number", ["1", "2", "64", "auto"])
def test_so_many_or_as_many_as_there_are_processors(number: str) -> None:
    assert str(parse(FILE % number, "fleet.yaml").router.processes) == number


def test_one_if_nothing_is_said() -> None:
    assert parse(FILE.partition("router")[0], "fleet.yaml").router.processes == 1


@pytest.mark.parametrize("number", ["0", "65", "-1", "many", "AUTO"])
def test_anything_else_is_refused_with_what_it_may_be(number: str) -> None:
    with pytest.raises(ConfigError, match=r"router\.processes: .*from 1 to 64, or auto"):
        parse(FILE % number, "fleet.yaml")


@pytest.mark.parametrize("number", ["true", "1.5", "[2]"])
def test_what_is_no_number_is_refused(number: str) -> None:
    with pytest.raises(ConfigError, match=r"router\.processes"):
        parse(FILE % number, "fleet.yaml")
