"""The registry of connectors."""

from __future__ import annotations

import typing
from pathlib import Path

import pytest

from proxy import transfer
from proxy.config import TransferConfig
from proxy.transfer.registry import CONNECTORS, connector

NAMES = typing.get_args(TransferConfig.model_fields["connector"].annotation)
# Modules of the folder that are no connectors.
OTHER_MODULES = {"__init__", "legs", "registry", "types"}


@pytest.mark.plain("reads sources")
def test_every_connector_is_one_file_in_the_registry() -> None:
    files = {path.stem for path in Path(transfer.__path__[0]).glob("*.py")} - OTHER_MODULES
    names = sorted(name.replace("-", "_") for name in CONNECTORS)
    assert names == sorted(files), "add it to CONNECTORS in proxy/transfer/registry.py"


@pytest.mark.plain("reads sources")
@pytest.mark.parametrize("name", CONNECTORS)
def test_every_connector_has_a_file_of_tests(name: str) -> None:
    assert Path(__file__).with_name(f"test_{name.replace('-', '_')}.py").exists()


def test_fleet_file_names_are_the_registered_connectors() -> None:
    assert sorted(NAMES) == sorted(CONNECTORS), (
        "add it to transfer.connector in proxy/config/fleet_file.py"
    )
    for name in NAMES:
        assert connector(TransferConfig.model_validate({"connector": name})).name == name
