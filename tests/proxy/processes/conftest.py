"""Virtual groups, closed at the end of a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from proxy.core.model.specs import WorkerSpec
from tests.proxy.processes.virtual_group import VirtualGroup


@pytest.fixture
def make_group() -> Iterator[Callable[..., VirtualGroup]]:
    """Return a function that makes virtual groups."""
    groups: list[VirtualGroup] = []

    def make(size: int, *specs: WorkerSpec, **settings: object) -> VirtualGroup:
        groups.append(VirtualGroup(size, *specs, **settings))
        return groups[-1]

    yield make
    for group in groups:
        group.table.close()
