"""The registry of connectors."""

from __future__ import annotations

import typing

from proxy.config import TransferConfig
from proxy.transfer.registry import CONNECTORS, connector

NAMES = typing.get_args(TransferConfig.model_fields["connector"].annotation)


def test_fleet_file_names_are_the_registered_connectors() -> None:
    assert set(NAMES) == set(CONNECTORS)
    for name in NAMES:
        assert connector(TransferConfig.model_validate({"connector": name})).name == name
