"""The registry of connectors."""

from __future__ import annotations

import typing

import pytest

from proxy.config import TransferConfig
from proxy.transfer.registry import CONNECTORS, connector

NAMES = typing.get_args(TransferConfig.model_fields["connector"].annotation)


def test_fleet_file_names_are_the_registered_connectors() -> None:
    assert set(NAMES) == set(CONNECTORS)


@pytest.mark.parametrize("name", NAMES)
def test_connector_has_its_registered_name(name: str) -> None:
    assert connector(TransferConfig.model_validate({"connector": name})).name == name
