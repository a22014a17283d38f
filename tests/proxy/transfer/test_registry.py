"""The connectors by name."""

from __future__ import annotations

import typing

import pytest

from proxy.config import TransferConfig
from proxy.transfer.registry import CONNECTORS, connector

NAMES = typing.get_args(TransferConfig.model_fields["connector"].annotation)


def test_every_name_that_a_fleet_file_may_say_is_one() -> None:
    assert set(NAMES) == set(CONNECTORS)


@pytest.mark.parametrize("name", NAMES)
def test_each_is_what_it_is_called(name: str) -> None:
    assert connector(TransferConfig.model_validate({"connector": name})).name == name
